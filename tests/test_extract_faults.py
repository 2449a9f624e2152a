"""Faults around an extraction: a failed check stays failed, bad lines and settings are one line, starts may fail."""

import json

import pytest

from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards, verify_shards
from extract import parity
from extract.cli import main
from helpers import run_command


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
