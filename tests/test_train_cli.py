"""The command: flags, dry run, one-line refusals, and that each way of launching it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_helpers import launched_environment, make_shards, small_run

from dflash_kit.checkpoint import read_config, read_provenance
from dflash_kit.config import parse_config
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError, run_cli
from dflash_kit.target import TargetSpec
from helpers import REPO, make_tiny_target, run_command
from train.cli import TrainConfig, main
from train.job import prepare
from train.settings import NEW_DRAFTER


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("cli") / "shards", tiny_target)


def refusal(capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert run_cli(main, args) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in "".join(lines)
    return errors[0]


def test_nested_settings_are_dotted_flags_and_print_config_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--optim.lr=1e-3", "--drafter.block_size=8", "--print_config"])
    shown = capsys.readouterr().out
    assert "lr: 0.001" in shown and "block_size: 8" in shown and "train:" in shown


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [("--drafter.blok_size=8", "drafter.block_size"), ("--optim.learning_rate=1", "optim."), ("--shard=x", "shards")],
)
def test_unknown_flags_are_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], flag: str, nearest: str
) -> None:
    assert nearest in refusal(capsys, ["--shards=x", "--out=y", flag])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter__block_size": 1}, ["drafter.block_size is 1", "2 or more"]),
        ({"drafter__block_size": 1025}, ["drafter.block_size is 1025", "up to 1024"]),
        ({"drafter__intermediate_size": 0}, ["drafter.intermediate_size is 0", "1 or more"]),
        ({"drafter__num_sliding_layers": 3}, ["num_sliding_layers is 3", "0..2"]),
        ({"drafter__sliding_window": 2}, ["sliding_window is 2", "at least block_size=4"]),
        ({"data__anchors": 0}, ["data.anchors is 0"]),
        ({"optim__lr": -1}, ["optim.lr is -1"]),
        ({"optim__lr": ".nan"}, ["optim.lr is nan"]),
        ({"optim__weight_decay": -1}, ["optim.weight_decay is -1.0", "0 (none) or more"]),
        ({"optim__beta1": 1}, ["optim.beta1 is 1.0", "0 up to below 1"]),
        ({"optim__beta2": -0.1}, ["optim.beta2 is -0.1", "0 up to below 1"]),
        ({"optim__beta2": ".nan"}, ["optim.beta2 is nan", "0 up to below 1"]),
        ({"seed": 2**63}, [f"seed is {2**63}", str(2**63 - 1)]),
        ({"seed": -1}, ["seed is -1", str(2**63 - 1)]),
        ({"optim__schedule": "step"}, ["optim.schedule", "'cosine', 'linear', 'wsd'"]),
        ({"optim__decay_fraction": 0.5}, ["optim.decay_fraction is 0.5", "optim.schedule cosine", "only wsd"]),
        ({"optim__schedule": "wsd", "optim__decay_fraction": 0.97}, ["optim.decay_fraction is 0.97", "at most 1"]),
        ({"optim__schedule": "wsd", "optim__decay_fraction": 0}, ["optim.decay_fraction is 0.0", "above 0"]),
        ({"optim__ema_decay": 1}, ["optim.ema_decay is 1.0", "below 1"]),
        ({"optim__kind": "lion"}, ["optim.kind", "'adamw', 'muon'"]),
        ({"optim__muon_lr": "1e-3"}, ["optim.muon_lr is 0.001", "only muon"]),
        ({"optim__kind": "muon", "optim__muon_lr": 0}, ["optim.muon_lr is 0", "above 0"]),
        ({"data__holdout_fraction": 1.5}, ["data.holdout_fraction is 1.5"]),
        ({"replay__budgets": "[0]"}, ["replay.budgets is [0]"]),
        ({"replay__budgets": "[16,4097]"}, ["replay.budgets is [16, 4097]", "from 1 to 4096"]),
        ({"loss__kind": "mse"}, ["loss.kind", "'decay', 'dpace'"]),
        ({"drafter__mask_token_id": 256}, ["mask_token_id 256", "pad, bos or eos"]),  # case 15: the pad token
        ({"drafter__mask_token_id": 258}, ["mask_token_id 258", "pad, bos or eos"]),
        ({"drafter__mask_token_id": 300}, ["mask_token_id 300", "0..299"]),
        ({"target": REPO / "tests"}, ["tests", "cannot be loaded"]),
        ({"compute_dtype": "float16"}, ["compute_dtype"]),
    ],
)
def test_bad_values_are_one_line_and_leave_nothing_behind(
    shards_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    line = refusal(capsys, small_run(shards_folder, tmp_path / "out", **changes))
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_shards_that_are_not_there_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a shards folder" in refusal(capsys, small_run(tmp_path / "none", tmp_path / "out"))


def test_shards_of_another_target_are_refused_with_both_values(
    shards_folder: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_target(tmp_path / "other", seed=1, num_hidden_layers=7)
    line = refusal(capsys, small_run(shards_folder, tmp_path / "out", target=other))
    here, there = TargetSpec.from_pretrained(tiny_target).config_hash, TargetSpec.from_pretrained(other).config_hash
    assert here in line and there in line and "config_hash" in line


def test_shards_of_another_chat_template_are_refused(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_target(tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert "template_hash" in refusal(capsys, small_run(shards_folder, tmp_path / "out", target=other))


def test_an_output_folder_that_holds_something_else_is_never_touched(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert "is not empty" in refusal(capsys, small_run(shards_folder, out))
    assert [file.name for file in out.iterdir()] == ["thesis.txt"]
    state = tmp_path / "new.state"
    state.mkdir()
    (state / "thesis.txt").write_text("years of work")
    assert "is not empty" in refusal(capsys, small_run(shards_folder, tmp_path / "new"))
    assert [file.name for file in state.iterdir()] == ["thesis.txt"]


def test_replay_rows_must_not_be_trained_on(
    shards_folder: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, small_run(shards_folder, tmp_path / "out", eval_shards=shards_folder))
    assert "eval_shards is the training shards" in line
    twins = make_shards(tmp_path / "twins", tiny_target, num_rows=3)
    assert "3 rows of eval_shards" in refusal(capsys, small_run(shards_folder, tmp_path / "out", eval_shards=twins))
    taps = make_shards(tmp_path / "taps", tiny_target, num_rows=3, num_taps=3, prefix="other")
    assert "target_layer_ids (1, 2, 3)" in refusal(capsys, small_run(shards_folder, tmp_path / "out", eval_shards=taps))


def test_a_dry_run_says_what_would_happen_and_writes_nothing(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small_run(shards_folder, tmp_path / "out"), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    config = parse_config("train", TrainConfig, small_run(shards_folder, tmp_path / "out"), description="")
    assert config.drafter.block_size == 4
    for words in ("107,008 parameters", "21 to train on, 3 to replay", "12 of 2 packed rows", "ZeRO 3", "block 4"):
        assert words in shown, words
    assert list(tmp_path.iterdir()) == []


def test_rows_that_will_be_cut_are_reported(
    shards_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small_run(shards_folder, tmp_path / "out", data__seq_len=24), "--dry_run"]) == 0
    assert "conversations are longer than 24 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["python", "accelerate"])
def test_launchers_work_from_any_folder_and_the_result_loads(
    shards_folder: Path, tiny_target: Path, tmp_path: Path, launcher: str
) -> None:
    out = tmp_path / "out"
    args = small_run(shards_folder, out, optim__max_steps=2, replay__every_steps=0)
    script = REPO / "train" / "run.py"
    if launcher == "python":
        done = run_command(script, *args, cwd=tmp_path)
    else:
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", str(script), *args]
        done = subprocess.run(
            command, cwd=REPO, env=launched_environment(), capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "replay at step 2: chain τ" in done.stdout
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "provenance.json"]
    drafter = Drafter.from_pretrained(out)
    assert drafter.config.target_layer_ids == (1, 2)
    assert read_config(out)["block_size"] == 4
    provenance = read_provenance(out)
    assert provenance["target"] == str(tiny_target)
    assert provenance["shards_header"]["engine"] == "test"
    assert provenance["metrics"]["trained_steps"] == 2
    assert "torch" in provenance["packages"]


def test_mistakes_exit_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    done = run_command(REPO / "train" / "run.py", "--shards", tmp_path / "none", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_settings_of_the_drafter_that_are_left_out_take_the_published_ones(shards_folder: Path, tmp_path: Path) -> None:
    config = parse_config(
        "train", TrainConfig, [f"--shards={shards_folder}", f"--out={tmp_path / 'o'}"], description=""
    )
    drafter = prepare(config).drafter
    assert drafter.layer_types == ("full_attention",) * 5 and drafter.layer_causal == (False,) * 5
    assert (drafter.block_size, drafter.sliding_window, drafter.mask_token_id) == (16, None, 261)


def test_a_bare_flag_switches_on_what_may_also_be_null() -> None:
    args = ["--shards=s", "--out=o", "--drafter.full_causal", "--drafter.sliding_causal=false"]
    settings = parse_config("train", TrainConfig, args, description="").drafter
    assert settings.given() == {"full_causal": True, "sliding_causal": False}


def test_defaults_are_the_published_recipe() -> None:
    config = TrainConfig(shards="s", out="o")
    assert (config.optim.lr, config.optim.clip, config.optim.warmup_fraction) == (6e-4, 1.0, 0.04)
    assert (config.optim.kind, config.optim.schedule, config.optim.ema_decay) == ("adamw", "cosine", 0.0)
    assert (NEW_DRAFTER["block_size"], NEW_DRAFTER["num_hidden_layers"]) == (16, 5)
    assert (config.data.anchors, config.loss.gamma_of(16)) == (512, 7.0)
    with pytest.raises(KitError):
        parse_config("train", TrainConfig, ["--shards=s"], description="")
