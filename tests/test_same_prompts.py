"""A benchmark file that changes between two runs into one report folder."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_eval_cli import evaluate, made, read_report  # noqa: F401  (made is a fixture)

FAST = ("--methods=ar,chain", "--max_new_tokens=4")


def write(file: Path, *texts: str) -> str:
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(file)


def test_other_words_and_lost_prompts_are_refused_and_new_ones_decoded(
    made: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    assert evaluate(made, out, *FAST, benchmark=write(file, "Hello.")) == 0
    before = (out / "results.jsonl").read_bytes()
    assert evaluate(made, out, *FAST, benchmark=write(file, "Good-bye.")) == 2
    assert "prompt line-1 of" in (error := capsys.readouterr().err)
    assert "had other words when it was decoded" in error
    file.write_text(json.dumps({"id": "new", "prompt": "Hello."}) + "\n")
    assert evaluate(made, out, *FAST, benchmark=str(file)) == 2
    assert "is not in the benchmark any more" in capsys.readouterr().err
    assert (out / "results.jsonl").read_bytes() == before
    assert evaluate(made, out, *FAST, benchmark=write(file, "Hello.", "More.")) == 0
    assert read_report(out)["results"][0]["prompts"] == 2
    # Results of versions that recorded no hash pass.
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line.pop("text_hash", None) is None for line in lines] == [True, False, False]
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluate(made, out, *FAST, benchmark=str(file)) == 0


def test_generate_refuses_a_target_of_nan(
    made: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would answer with token 0 for ever, and the drafts would agree or not: no number of that means anything."""
    shutil.copytree(made / "target", target := tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][5] = float("nan")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    flags = ("--engine=transformers-generate", f"--target={target}", "--limit=1", "--max_new_tokens=4")
    assert evaluate(made, tmp_path / "out", *flags) == 2
    assert "error: the target's logits are NaN or infinite" in capsys.readouterr().err
