"""Faults around an extraction: a failed check stays failed, bad lines and settings are one line, starts may fail."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards, verify_shards
from extract import parity
from extract.cli import main
from helpers import REPO, run_command


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(3)))
    return path


def arguments(target, prompts, out, *more: str) -> list[str]:
    return [
        *("--model", str(target), "--prompts", str(prompts), "--out", str(out), "--engine", "transformers"),
        *("--target_layer_ids", "[1, 3]", "--sampling.max_new_tokens", "4"),
        *more,
    ]


def lines_of(folder, name="manifest.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


# Parity


def test_a_failed_parity_check_is_not_cured_by_running_again(tiny_target, prompts, tmp_path, monkeypatch):
    out = tmp_path / "s"
    right = parity._layer_outputs
    with monkeypatch.context() as patch:
        patch.setattr(parity, "_layer_outputs", lambda *a: {i: x.roll(1, 0) for i, x in right(*a).items()})
        with pytest.raises(KitError, match="differs from transformers"):
            main(arguments(tiny_target, prompts, out, "--limit=2"))
    (line,) = [line for line in lines_of(out) if line["kind"] == "parity_failed"]
    assert line["sample"] in open_ids(out) and line["layer"] == 1 and line["difference"] > 0.01
    for more in (["--limit=2"], [], ["--parity=0"], ["--dry_run"], ["--num_workers=2"]):
        with pytest.raises(KitError, match=rf"sample {line['sample']}, layer 1, .*delete {out} and extract again"):
            main(arguments(tiny_target, prompts, out, *more))
    for use in (open_shards, verify_shards):
        with pytest.raises(KitError, match="failed their parity check"):
            use(out)
    result = run_command("-m", "extract.verify", out)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


def open_ids(folder) -> list[str]:
    return [row_id for line in lines_of(folder) if line["kind"] == "shard" for row_id in line["ids"]]


def test_a_rerun_that_adds_nothing_checks_what_was_never_checked(tiny_target, prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "s"
    assert main(arguments(tiny_target, prompts, out, "--parity=0")) == 0
    looked_at = []
    right = parity.check_parity
    monkeypatch.setattr(parity, "check_parity", lambda f, ids, **k: (looked_at.append(ids), right(f, ids, **k))[1])
    assert main(arguments(tiny_target, prompts, out)) == 0
    assert "parity   2 rows" in capsys.readouterr().out
    assert main(arguments(tiny_target, prompts, out)) == 0  # there is a record now
    assert looked_at == [open_shards(out).ids[:2]]
    assert [line["ids"] for line in lines_of(out) if line["kind"] == "parity_passed"] == looked_at


# Starts, settings, signals


def test_a_corrected_setting_begins_anew_where_the_start_failed(tiny_target, prompts, tmp_path):
    target, out = tmp_path / "target", tmp_path / "s"
    shutil.copytree(tiny_target, target)
    (target / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(KitError, match="cannot be loaded"):
        main(arguments(target, prompts, out))
    assert [line["kind"] for line in lines_of(out)] == ["header"]
    (target / "model.safetensors").write_bytes((tiny_target / "model.safetensors").read_bytes())
    assert main(arguments(target, prompts, out, "--sampling.max_new_tokens=5", "--storage=float32")) == 0
    assert open_shards(out).header.sampling["max_new_tokens"] == 5
    assert verify_shards(out).ok


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--tensor_parallel_size=0", "at least 1"),
        ("--gpu_memory_utilization=7", "up to 1"),
        ("--gpu_memory_utilization=0", "up to 1"),
        ("--gpu_memory_utilization=.nan", "up to 1"),
        ("--sampling.temperature=1e-40", r"0 \(greedy\) or 0\.01\.\.100"),
        ("--sampling.temperature=.inf", r"0 \(greedy\) or 0\.01\.\.100"),
        ("--sampling.temperature=-1", r"0 \(greedy\) or 0\.01\.\.100"),
        ("--sampling.seed=9223372036854775808", r"0\.\.9223372036854775807"),
        ("--sampling.seed=-1", r"0\.\.9223372036854775807"),
        ("--sampling.top_p=0.9", r"sampling\.top_p is 0\.9 at sampling\.temperature 0"),
        ("--sampling.top_k=5", r"sampling\.top_k is 5 at sampling\.temperature 0"),
        ("--prefix_caching=true", "prefix_caching is True with engine transformers, on which it has no effect"),
        ("--max_num_batched_tokens=64", "max_num_batched_tokens is 64 with engine transformers"),
        ("--tensor_parallel_size=2", "tensor_parallel_size is 2 with engine transformers"),
        ("--engine_args.quantization=fp8", "engine_args is .* with engine transformers"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_range(tiny_target, prompts, tmp_path, option, said):
    with pytest.raises(KitError, match=said):
        main(arguments(tiny_target, prompts, tmp_path / "s", option))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("what", ["--dry_run", "--help", "--limit=0"])
def test_a_closed_pipe_is_one_line(tiny_target, prompts, tmp_path, what):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "extract/dump.py", *arguments(tiny_target, prompts, tmp_path / "s", what)]
    result = subprocess.run(command, cwd=REPO, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    if what == "--help":  # argparse does not mind
        assert (result.returncode, result.stderr) == (0, "")
        return
    assert result.stderr.count("\n") == 1
    if what == "--limit=0":
        assert (result.returncode, "limit is 0" in result.stderr) == (2, True)
    else:
        assert (result.returncode, result.stderr[:34]) == (141, "error: the output is read no more ")


@pytest.mark.parametrize("command", ["extract/dump.py", "train/run.py", "decode/eval.py"])
def test_ctrl_c_during_the_imports_is_one_line(tmp_path, command):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    result = run_command(command, "--help", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr.count("\n")) == (130, 1)
    assert result.stderr.startswith("error: interrupted")
