"""Benchmarks that need a GPU for their figures do run on a CPU in a small form, and report what fails instead of ending."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.fused_target import padded_rows
from dflash_kit.shards import ShardsHeader, open_shards
from dflash_kit.target import TargetSpec
from helpers import HAS_GPU, REPO, requires_vllm, until

sys.path.append(str(REPO / "benchmarks"))

import decode_hybrid
import decode_hybrid_kernel
import drafter_choices
import extract_gpu
import extract_rates
import hybrid_shapes
import measuring
import replay_device
from drafting import tiny_drafter

TINY = ["--shape", "tiny", "--context", "20", "--budgets", "5,20", "--repetitions", "1"]
on_cpu = pytest.mark.skipif(HAS_GPU, reason="with a GPU it takes its own path")


@pytest.fixture(autouse=True)
def settings() -> Any:
    """What the benchmark sets in its process."""
    yield
    torch.set_grad_enabled(True)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@on_cpu
def test_hybrid_passes_are_timed_and_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    decode_hybrid.main([*TINY, "--out", str(tmp_path / "r.json")])
    found = last_line(capsys)
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert {*found["portable"]} == {"prefill_s", "step_ms", "5", "20"}
    assert all(isinstance(found["fused"][budget]["eager_ms"], float) for budget in ("0", "5", "20"))
    for budget in (5, 20):
        assert 0 < found[f"state_per_node_{budget}"]["last_layer_differs_by"] < 1e-5
    assert found["relative_error"]["of_the_path"] < 1e-5
    assert set(found["over_one_step"]) == {"0", "5", "20"}


@on_cpu
def test_whole_rounds_of_a_hybrid_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    decode_hybrid.main([*TINY, "--rounds"])
    found = last_line(capsys)
    drafted = ["draft", "build", "verify", "commit"]
    stages = {"ar": drafted[2:], "chain": drafted, "ddtree-5": drafted, "ddtree-20": drafted}
    assert {method: [*entry["stages_ms"]] for method, entry in found["rounds"].items()} == stages
    assert [entry["rows_padded"] for entry in found["rounds"].values()] == [1, 16, 8, 24]
    assert found["drafter"]["sliding_layers"] == 4 and found["drafter"]["layers"] == 5
    assert found["over_ar"]["ar"] == found["over_chain"]["chain"] == 1.0
    assert {*found["over_ar"]} == {*found["over_chain"]} == {*stages}
    assert "portable" not in found


@on_cpu
def test_a_hybrid_with_experts_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with_experts = ["--shape", "tiny-experts", *TINY[2:]]
    decode_hybrid.main(with_experts)
    found = last_line(capsys)
    assert all(isinstance(found[engine]["20"], kind) for engine, kind in (("portable", float), ("fused", dict)))
    assert found["relative_error"]["of_the_path"] < 1e-5
    decode_hybrid.main([*with_experts, "--rounds"])
    found = last_line(capsys)
    assert found["drafter"]["layers"] == 8 and found["drafter"]["recipe"] == "qwen3.6-35b-a3b.yaml"
    assert set(found["over_chain"]) == {"ar", "chain", "ddtree-5", "ddtree-20"}


def test_the_floor_counts_the_experts_that_are_read() -> None:
    draw, chosen = torch.Generator().manual_seed(0), []
    for _ in range(400):
        chosen.append(len({int(i) for _ in range(17) for i in torch.randperm(16, generator=draw)[:2]}))
    expected = hybrid_shapes.distinct_experts(16, 2, 17)
    assert abs(sum(chosen) / len(chosen) - expected) < 0.2 and expected < 15
    model = hybrid_shapes.make_model(hybrid_shapes.SHAPES["tiny-experts"], "meta")
    unit_rates, linear = {"copy_tb_s": 1e-9, "matrix_tflop_s": 1e-9}, hybrid_shapes.linear_shape(model)
    one, many = (hybrid_shapes.floor_ms(model, linear, rows, 20, unit_rates) for rows in (1, 10_000))
    expert = 3 * 64 * 32  # of hidden width 64 and inner width 32
    assert many["bytes"] - one["bytes"] == pytest.approx(2 * 8 * (16 - 2) * expert, rel=1e-6)
    dense = sum(p.numel() for p in model.parameters() if p.ndim == 2) - 500 * 64
    computed = 2 * (dense + 8 * 2 * expert)
    assert computed < one["operations"] < 1.2 * computed


@pytest.mark.parametrize("name", ["27b", "35b-a3b", "tiny"])
@pytest.mark.parametrize("budget", [0, 64, 256])
def test_the_memory_of_a_verification_is_what_the_formula_says(name: str, budget: int) -> None:
    """A row's bytes by formula, against the tensors of real passes; buffers shared by all layers are a small part."""
    sizes = hybrid_shapes.SHAPES[name]
    layers, shape = hybrid_shapes.linear_shape(hybrid_shapes.make_model(sizes, "meta"))
    kept, shared = hybrid_shapes.verification_bytes(sizes, budget)
    assert kept == padded_rows(budget + 1) * hybrid_shapes.row_bytes(shape)
    if name != "tiny":
        state = 4 * shape.heads * shape.key * shape.value
        assert shared < 0.1 * layers * kept or budget == 0
        assert layers * kept + shared < (budget + 1) * layers * state / (30 if budget else 1)


@on_cpu
def test_the_stages_of_a_linear_layer_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    decode_hybrid_kernel.main(["--shape", "tiny", "--layers", "2", "--budgets", "0,20", "--repetitions", "1"])
    found = last_line(capsys)
    for budget, rows in (("0", 1), ("20", 24)):
        entry = found["budgets"][budget]
        assert entry["rows"] == rows and entry["error"]["delta_torch"] < 1e-6
        assert {"input_product", "convolution", "delta_torch", "gated_norm", "output_product"} < {*entry["ms"]}
        assert all(isinstance(ms, float) for ms in entry["ms"].values()), entry
    above = found["over_one_row"]["20"]
    many, one = (found["budgets"][budget]["ms"]["convolution"] for budget in ("20", "0"))
    assert above["convolution"] == round((many - one) * 6, 3) and above["head"] < 1e3


@on_cpu
def test_replay_is_timed_against_live_rounds(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, _ = tiny_drafter(tiny_target)
    checkpoint = drafter.save_pretrained(
        tmp_path / "drafter", dtype=torch.float32, provenance={"target": str(tiny_target)}
    )
    sizes = ["--prompts", "3", "--max-new-tokens", "12", "--exact-prompts", "1", "--exact-new-tokens", "6"]
    lists = ["--budgets", "4,16", "--anchors", "8,64", "--repetitions", "1", "--limit-s", "0"]
    replay_device.main(["--ckpt", str(checkpoint), *sizes, *lists, "--out", str(tmp_path / "r.json")])
    found = last_line(capsys)
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert {*found["live"]} == {"chain-7", "ddtree-4", "ddtree-16"}
    for part in (found["replay_8"], found["replay_64"], found["exact"]):
        assert part["against_live"]["rounds_differing"] == part["against_live"]["texts_differing"] == 0
        assert part["against_live"]["rounds_compared"] > 0
    assert found["replay_64"]["passes"] < found["replay_8"]["passes"]
    assert found["exact"]["against_host"]["rounds_differing"] == 0
    assert {"context", "draft", "accepted", "all"} <= {*found["stages_s"]}


@on_cpu
@pytest.mark.parametrize("broken", ["tree_delta", "HybridTarget"])
def test_a_fused_engine_that_fails_leaves_the_portable_figures(
    broken: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CompilationError(Exception):
        """As Triton's, of no kind that others share."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise CompilationError("at 3:7: no such layout")

    monkeypatch.setattr(decode_hybrid if broken == "HybridTarget" else decode_hybrid.hybrid_target, broken, fail)
    decode_hybrid.main([*TINY])
    found = last_line(capsys)
    assert isinstance(found["portable"]["20"], float) and isinstance(found["portable"]["step_ms"], float)
    told = found["fused_error"] if broken == "HybridTarget" else found["fused"]["20"]["eager_ms"]
    assert told == "CompilationError: at 3:7: no such layout"
    assert found.get("fused_step_ms") is None


@on_cpu
def test_a_shape_that_does_not_fit_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = decode_hybrid.make_model

    def make_small(shape: dict[str, Any]) -> Any:
        if shape["hidden_size"] == 5120:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(decode_hybrid.SHAPES["tiny"])

    monkeypatch.setattr(decode_hybrid, "make_model", make_small)
    report = measuring.Report(0, None)
    assert decode_hybrid.make("27b", report).config.hidden_size == 64
    found = report.finish()
    assert found["does_not_fit"] == {"27b": "OutOfMemoryError: CUDA out of memory"}
    assert found["shape"] == "9b"


def test_a_report_is_printed_when_the_time_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(measuring, "_kill_children", lambda: None)
    lock = threading.RLock()
    with lock, monkeypatch.context() as patched:  # the watch, which needs it, ends nothing before
        patched.setattr(threading, "RLock", lambda: lock)
        report = measuring.Report(0.1, None, benchmark="x")
        report.add(portable=3.5)
        report.at("fused: budget 64")
    until(lambda: ended)
    assert ended == [measuring.OUT_OF_TIME]
    found = last_line(capsys)
    assert (found["benchmark"], found["portable"]) == ("x", 3.5)
    assert "at: fused: budget 64" in found["unfinished"]


# Extraction


@requires_vllm
def test_sinks_are_changed_between_turns(tiny_target: Path, tmp_path: Path) -> None:
    """The worker's side, as ``register_kv_caches`` leaves it: rows go to a folder, to nothing, to another folder."""
    import extract_sinks

    from dflash_kit.vllm_connector import FinishedRequest
    from dflash_kit.vllm_copy import StateCopier

    spec = TargetSpec.from_pretrained(tiny_target)
    header = ShardsHeader.from_target(
        spec, target_layer_ids=[0, 2], compute_dtype="float32", engine="vllm", engine_version=""
    )
    connector = object.__new__(extract_sinks.SwitchableConnector)
    connector._sink = connector._error = None
    connector._block_size, connector._num_lanes, connector._header = 16, 2, header
    connector._copier = StateCopier(torch.randn(4, 16, 2, header.hidden_size), header)
    connector._extra = {"folder": str(tmp_path / "first"), "writer": {}, "max_pending_bytes": 1 << 20}
    connector._open_sink()

    def take(sample_id: str) -> list[str]:
        connector._capture([FinishedRequest("r", sample_id, list(range(20)), 7, [[5, 20]], [1, 2])])
        status = connector.flush()
        assert status is not None and status["error"] is None
        return [row_id for row_id, _ in status["accepted"]]

    assert take("a") == ["a"]
    connector.finish({"switch_to": ""})
    assert take("b") == ["b"]
    assert connector.status() is not None and connector.status()["bytes"] == 20 * header.bytes_per_token  # type: ignore[index]
    connector.finish({"switch_to": str(tmp_path / "second")})
    assert take("c") == ["c"]
    connector.finish(None)
    assert [open_shards(tmp_path / name).ids for name in ("first", "second")] == [["a"], ["c"]]


def test_the_writer_alone_is_measured_on_any_folder(tiny_target: Path, tmp_path: Path) -> None:
    spec = TargetSpec.from_pretrained(tiny_target)
    header = ShardsHeader.from_target(
        spec, target_layer_ids=[0, 2], compute_dtype="float32", engine="x", engine_version=""
    )
    assert extract_rates.writer_gb_per_s(header, 50, tmp_path, 2, 1e5) > 0
    assert not list(tmp_path.iterdir())
    assert extract_rates.file_system(Path("/dev/shm")) == "tmpfs"


def test_extraction_figures_are_rates_and_ratios_turn_by_turn() -> None:
    figures = extract_gpu.Figures(1000, 40_000)
    for plain_s, ours_s in ((1.0, 1.25), (2.0, 2.0), (4.0, 5.0)):
        figures.take("plain", {"seconds": plain_s}, 1.0)
        figures.take("disk", {"seconds": ours_s, "computing_s": ours_s - 0.1}, 0.9)
    found = figures.summary()
    assert found["tokens_per_s"]["disk"] == {"median": 500.0, "low": 200.0, "high": 800.0}
    assert found["ratio_to_plain"] == {"disk": {"median": 0.8, "low": 0.8, "high": 1.0}}
    assert found["phases_s"]["disk"] == {"seconds": 2.0, "computing_s": 1.9}
    assert found["gpu_idle_share"] == {"plain": 0.0, "disk": 0.1}
    assert found["gb_per_s"] == {"disk": 0.02}


def test_unknown_sinks_and_shapes_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folders = ["--memory_folder", str(tmp_path), "--shapes", "tiny"]
    for wrong, said in ((["--sink", "tape"], "null, memory, disk"), (["--engines", "other"], "plain, shards, stock")):
        with pytest.raises(SystemExit):
            extract_gpu.parse([*folders, *wrong])
        assert said in capsys.readouterr().err


def test_variants_are_trained_and_replayed_once_and_one_that_fails_keeps_no_other_back(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from train_helpers import make_shards

    import decode.cli
    import train.cli
    from dflash_kit.errors import run_cli

    def call(command: list[str], jobs: int, log: Path | None) -> None:
        """As in a process of its own, without the imports."""
        if run_cli({"train/run.py": train.cli.main, "decode/eval.py": decode.cli.main}[command[0]], command[1:]):
            raise drafter_choices.CommandError("it failed")

    shards, held = make_shards(tmp_path / "s", tiny_target), make_shards(tmp_path / "e", tiny_target, prefix="e")
    recipe: dict[str, Any] = {
        "drafter": {"num_hidden_layers": 1, "block_size": 4},
        "data": {"seq_len": 64, "rows_per_step": 2, "holdout_fraction": 0.1},
        "replay": {"max_rows": 3, "every_steps": 6, "budgets": [4]},
        "log_every_steps": 3,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps({"train": recipe}))
    monkeypatch.setattr(drafter_choices, "call", call)
    monkeypatch.setitem(drafter_choices.VARIANTS, "broken", ["--drafter.num_hidden_layers", "0"])
    arguments = ["--config", str(tmp_path / "recipe.yaml"), "--shards", str(shards), "--evaluate", f"held={held}"]
    arguments += ["--steps", "8", "--anchors", "12", "--budgets", "4", "--out", str(tmp_path / "out")]
    arguments += ["--variants", "kl,broken,half_anchors,half_data"]
    drafter_choices.main(arguments)
    found = last_line(capsys)
    assert found["left_out"] == {"kl": "the shards hold no last hidden states", "broken": "it failed"}
    anchors, data = found["variants"]
    assert (anchors["flags"], anchors["train_rows"]) == (["--data.anchors", "6"], found["rows"] - 3)
    assert data["variant"] == "half_data" and data["train_rows"] < found["rows"] * 0.7
    for result in (anchors, data):
        assert set(result["acceptance_length"]["held"]) == {"chain-3", "ddtree-4"} and result["train_s"] > 0
        assert [line["step"] for line in result["curve"]] == [6, 8] and result["last_loss"] > 0
    monkeypatch.setattr(drafter_choices, "call", None)  # nothing is run again
    drafter_choices.main([*arguments[:-1], "half_anchors,dpace,half_data", "--time_limit_s", "0", "--jobs", "2"])
    again = last_line(capsys)
    assert again["variants"] == found["variants"] and [one["jobs"] for one in again["variants"]] == [1, 1]
    assert again["left_out"] == {"dpace": "it would not have ended in time"}
    drafter_choices.main([*arguments[:-1], "half_data", "--steps", "9"])
    assert "other arguments" in last_line(capsys)["left_out"]["half_data"]


def test_variants_run_side_by_side_and_are_told_in_the_order_asked(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from train_helpers import make_shards

    shards = make_shards(tmp_path / "s", tiny_target)
    together, ended = threading.Barrier(2), threading.Event()

    def run(name: str, args: Any) -> dict[str, Any]:
        if name in ("recipe", "dpace"):
            together.wait(30)  # one at a time, nobody would come
        if name == "recipe":
            assert ended.wait(30)
        if name == "dpace":
            ended.set()
        if name == "layers2":
            raise drafter_choices.CommandError("it failed")
        return {"variant": name}

    monkeypatch.setattr(drafter_choices, "run", run)
    (tmp_path / "recipe.yaml").write_text("train: {}")
    (tmp_path / "out").mkdir()
    arguments = ["--config", str(tmp_path / "recipe.yaml"), "--shards", str(shards), "--evaluate", "e=none"]
    arguments += ["--steps", "1", "--out", str(tmp_path / "out"), "--jobs", "2"]
    arguments += ["--variants", "recipe,dpace,layers2,block8"]
    drafter_choices.main(arguments)
    found = last_line(capsys)
    assert [one["variant"] for one in found["variants"]] == ["recipe", "dpace", "block8"]
    assert (found["jobs"], found["left_out"]) == (2, {"layers2": "it failed"})


def test_a_job_has_its_share_of_the_cores_and_its_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "say.py").write_text(
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.argv[1], flush=True); sys.exit(sys.argv[1] == 'bad')"
    )
    monkeypatch.setattr(drafter_choices, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    log = tmp_path / "out" / "recipe.log"
    drafter_choices.call(["say.py", "well"], 5, log)
    with pytest.raises(drafter_choices.CommandError, match=r"status 1; .*recipe\.log"):
        drafter_choices.call(["say.py", "bad"], 5, log)
    assert log.read_text() == "3 well\n3 bad\n"


@pytest.mark.parametrize(
    ("flag", "value", "says"), [("--jobs", "0", "--jobs is 0"), ("--config", "none.yaml", "--config is 'none.yaml'")]
)
def test_no_jobs_and_a_missing_recipe_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, says: str
) -> None:
    (tmp_path / "recipe.yaml").write_text("train: {}")
    given = {"--config": str(tmp_path / "recipe.yaml"), "--shards": "s", "--evaluate": "e=f", "--steps": "1"}
    given[flag] = value
    with pytest.raises(SystemExit):
        drafter_choices.parse([part for pair in given.items() for part in pair])
    assert says in capsys.readouterr().err
