"""What the evaluation command refuses, as users see it: status 2, one line on stderr, no traceback."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from drafting import decode_once, greedy_header, make_engine, record_row, tiny_drafter
from safetensors.torch import load_file, save_file

from decode.cli import main
from decode.fused_engine import FusedEngine
from decode.settings import EvalConfig
from dflash_kit.errors import KitError, run_cli
from dflash_kit.shards import ShardWriter
from dflash_kit.spool import ConsumedJournal
from dflash_kit.target import TargetSpec, digest, load_target
from helpers import make_tiny_target

Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, an untrained drafter, one prompt, and a shard of one answer."""
    root = tmp_path_factory.mktemp("refusals")
    target = make_tiny_target(root / "target")
    spec, model = TargetSpec.from_pretrained(target), load_target(target)
    drafter, _ = tiny_drafter(target)
    (root / "prompts.jsonl").write_text(json.dumps({"id": "one", "prompt": "Say hello."}) + "\n")
    header = greedy_header(spec, drafter)
    prompt = list(b"Say hello.")
    said = decode_once(make_engine(model, None, eos=()), prompt, "ar", 0, 8).token_ids
    with ShardWriter(root / "shards", header) as writer:
        writer.add(record_row(model, drafter, prompt, said, "one"))
    drafter.save_pretrained(root / "drafter", dtype=torch.float32, provenance={"target": str(target)})
    return root


@pytest.fixture
def refuse(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run the command, see that it is refused, and return its line; nothing may have been decoded."""

    def run(*flags: str, decoded_nothing: bool = True) -> str:
        capsys.readouterr()
        defaults = {
            "--ckpt": made / "drafter",
            "--benchmarks": made / "prompts.jsonl",
            "--max_new_tokens": 8,
            "--out": tmp_path / "out",
        }
        given = {flag.partition("=")[0] for flag in flags}
        argv = [f"{name}={value}" for name, value in defaults.items() if name not in given]
        assert run_cli(main, [*argv, *flags]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert not (tmp_path / "out" / "report.json").exists()
        assert not decoded_nothing or not (tmp_path / "out").exists()
        return lines[0]

    return run


def damage(folder: Path, copy: Path, name: str, value: float = float("nan")) -> Path:
    """A copy of a model folder with one number of one tensor replaced."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_a_folder_that_is_being_written(made: Path, tmp_path: Path, refuse: Refuse) -> None:
    busy = tmp_path / "busy"
    busy.mkdir()
    with (busy / "results.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing" in refuse(f"--out={busy}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.1.mlp.up_proj.weight"])
def test_drafter_with_a_number_that_is_none(
    made: Path, tmp_path: Path, refuse: Refuse, name: str, value: float
) -> None:
    ckpt = damage(made / "drafter", tmp_path / "damaged", name, value)
    for flags in ((), (f"--replay={made / 'shards'}",)):
        assert f"{name} holds NaN or infinity" in refuse(f"--ckpt={ckpt}", *flags)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight"])
def test_target_with_a_number_that_is_none(made: Path, tmp_path: Path, refuse: Refuse, name: str) -> None:
    """Its argmax is the NaN whatever is drafted: it used to accept every draft and end with status 0."""
    target = damage(made / "target", tmp_path / "damaged", name)
    error = refuse(f"--target={target}", decoded_nothing=False)
    assert "logits behind prompt one of" in error
    assert "NaN" in error


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_replay_with_damaged_ends_of_the_target(made: Path, tmp_path: Path, refuse: Refuse, name: str) -> None:
    target = damage(made / "target", tmp_path / "damaged", name)
    error = refuse(f"--target={target}", f"--replay={made / 'shards'}")
    assert f"{name} holds NaN or infinity" in error or "weights_hash" in error  # whichever is met first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fused_engine_checks_the_logits_of_a_prompt(bad: float) -> None:
    """Its kernels need a GPU, so a stub stands for its target."""
    logits = torch.tensor([0.5, -float("inf"), 2.0])  # a masked token is no fault
    engine = FusedEngine.__new__(FusedEngine)
    engine.max_context = 9
    engine.target = Mock(device=torch.device("cpu"))
    engine.target.prefill.return_value = logits, torch.tensor([2])
    assert engine.prefill([1, 2], 4, 4, "one").max_new_tokens == 4
    logits[0] = bad
    with pytest.raises(KitError, match="prompt one"):
        engine.prefill([1, 2], 4, 4, "one")


@pytest.mark.parametrize("name", ["foo", "../b", "a/", "a/b/c", "a/b c", "a/-b", "/tmp"])
@pytest.mark.parametrize("more", [(), ("--dry_run",), ("--push_dry_run",)])
def test_a_name_that_the_hub_does_not_take(refuse: Refuse, name: str, more: tuple[str, ...]) -> None:
    assert f"push_to_hub is {name!r}" in refuse(f"--push_to_hub={name}", "--base_model=org/target", *more)


@pytest.mark.parametrize("base", [None, "../b", "a/b/c"])
def test_a_card_without_a_hub_id_of_the_target(made: Path, refuse: Refuse, base: str | None) -> None:
    """The checkpoint names a folder, which says nothing to others."""
    named = () if base is None else (f"--base_model={base}",)
    for more in ((), ("--dry_run",)):
        error = refuse("--push_to_hub=org/drafter", *named, *more)
        assert f"the target is {base or str(made / 'target')!r} here" in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r'{"prompt": "half \ud800"}', "half of a surrogate pair"),
        (r'{"id": "\udfff", "prompt": "whole"}', "half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "half of a surrogate pair"),
        ('{"prompt": ' + "[" * 100_000, "recursion"),
        ("5", "a row is a JSON object"),
    ],
)
def test_a_line_that_is_no_prompt(tmp_path: Path, refuse: Refuse, line: str, words: str) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    error = refuse(f"--benchmarks={file}")
    assert "odd.jsonl line 2" in error
    assert words in error


@pytest.mark.parametrize(
    "content", ["5", "[]", '"text"', "{", "[" * 100_000, '{"shards_header": 5}', '{"target": "t", "metrics": []}']
)
def test_a_provenance_that_is_none(made: Path, tmp_path: Path, refuse: Refuse, content: str) -> None:
    ckpt = shutil.copytree(made / "drafter", tmp_path / "drafter")
    (ckpt / "provenance.json").write_text(content)
    assert "provenance.json" in refuse(f"--ckpt={ckpt}")


@pytest.mark.parametrize("content", ["5", "{", "[" * 100_000])
def test_a_config_that_is_no_object(made: Path, tmp_path: Path, refuse: Refuse, content: str) -> None:
    ckpt = shutil.copytree(made / "drafter", tmp_path / "drafter")
    (ckpt / "config.json").write_text(content)
    assert "config.json" in refuse(f"--ckpt={ckpt}")


def test_a_spool_that_is_used_up(made: Path, tmp_path: Path, refuse: Refuse) -> None:
    spool = shutil.copytree(made / "shards", tmp_path / "spool")
    journal = ConsumedJournal(spool)
    journal.consume([path.name for path in spool.glob("*.arrow")])
    journal.close()
    assert "spool hold no row (those that the trainer of a spool has used" in refuse(f"--replay={spool}")


def test_a_report_folder_that_cannot_be(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        for more in ((), ("--dry_run",)):
            assert "--out" in refuse(f"--out={folder}", *more)
    assert "out is 's3://bucket/report', which is no folder" in refuse("--out=s3://bucket/report")


def test_a_file_name_that_is_not_utf8_has_a_digest() -> None:
    assert digest(["\udcff"]) != digest(["\udcfe"])
    assert digest(["ä"]) == "7f3893820e8c5a3a837f9433c5f0070d"


def change_config(ckpt: Path, copy: Path, key: str, value: object) -> Path:
    """A copy of a checkpoint with one value of its ``config.json`` replaced, wherever it stands."""
    shutil.copytree(ckpt, copy)
    raw = json.loads((copy / "config.json").read_text())
    for values in (raw, raw["dflash_config"]):
        if key in values:
            values[key] = value
    (copy / "config.json").write_text(json.dumps(raw))
    return copy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", "two"),
        ("target_layer_ids", "123"),
        ("target_layer_ids", 3),
        ("dflash_config", [1, 2]),
        ("num_key_value_heads", 0),
        ("hidden_size", "64"),
    ],
)
def test_a_config_with_a_wrong_type(made: Path, tmp_path: Path, refuse: Refuse, key: str, value: object) -> None:
    ckpt = change_config(made / "drafter", tmp_path / "odd", key, value)
    assert f"{key} = {value!r}; it must be" in refuse(f"--ckpt={ckpt}")


def test_a_mask_token_that_the_target_says(made: Path, tmp_path: Path, refuse: Refuse) -> None:
    spec = TargetSpec.from_pretrained(made / "target")
    for token_id in {spec.pad_token_id, *spec.eos_token_ids}:
        ckpt = change_config(made / "drafter", tmp_path / f"mask{token_id}", "mask_token_id", token_id)
        for more in ((), ("--dry_run",), (f"--replay={made / 'shards'}",)):
            error = refuse(f"--ckpt={ckpt}", *more)
            assert f"mask_token_id {token_id} is the target's pad, bos or eos token" in error


@pytest.mark.parametrize("budgets", ["²", "60000", "4097", "16,4097", "٣", "0", "-1", "1e3", "9" * 5000])
def test_a_budget_that_is_out_of_range(refuse: Refuse, budgets: str) -> None:
    error = refuse(f"--budgets={budgets}")
    assert "budgets is" in error
    assert "whole numbers from 1 to 4096" in error


@pytest.mark.parametrize("temperature", ["1e-40", "0.009", "-1", "nan", ".inf", "1e30"])
def test_a_temperature_that_is_out_of_range(refuse: Refuse, temperature: str) -> None:
    assert "temperature" in refuse(f"--temperature={temperature}")


def test_limits_themselves_are_allowed(made: Path) -> None:
    config = EvalConfig(ckpt=str(made), budgets="1,4096", temperature=0.01)
    assert config.budget_list == [1, 4096]
