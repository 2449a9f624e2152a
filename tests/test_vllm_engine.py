"""A real vLLM as the engine of an evaluation: one run of the command, which starts vLLM without and with the drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafting import make_trained

from decode.cli import main
from decode.results import PromptResult
from dflash_kit.errors import run_cli
from helpers import requires_vllm, run_command

pytestmark = [requires_vllm, pytest.mark.slow]

LIMIT_TOKENS = 24
PROMPTS = ["What is 2 + 3?", "Name a colour.", "Say hello.", "Count to nine. " * 12]
LONGEST = "line-4"
"""Of one turn: vLLM's context ends with its answer, and drafts must not end before."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """Folder, command line and output of vLLM's evaluation of an all-sliding drafter, and ours beside it."""
    root = tmp_path_factory.mktemp("vllm-engine")
    make_trained(root, PROMPTS, num_sliding_layers=2)
    options = [f"--ckpt={root / 'drafter'}", f"--benchmarks={root / 'prompts.jsonl'}"]
    options += [f"--max_new_tokens={LIMIT_TOKENS}", "--methods=ar,chain"]
    theirs = [*options, "--engine=vllm", "--cpu_threads=1", f"--out={root / 'vllm'}"]
    done = run_command("decode/eval.py", *theirs)
    assert done.returncode == 0, done.stderr
    assert (
        "Triton" not in done.stderr
    )  # its processes remark on what is not installed before they know that they must not
    assert run_cli(main, [*options, f"--out={root / 'ours'}"]) == 0
    return root, theirs, done.stdout


def read_responses(out: Path) -> dict[Any, Any]:
    lines = (out / "results.jsonl").read_text().splitlines()[1:]
    return {
        (result.prompt_id, response.turn, response.method): response
        for result in (PromptResult.from_dict(json.loads(line)) for line in lines)
        for response in result.responses
    }


def test_vllm_decodes_our_checkpoint_with_the_same_tokens_in_the_same_rounds(
    finished: tuple[Path, list[str], str],
) -> None:
    root, _, said = finished
    theirs, ours = read_responses(root / "vllm"), read_responses(root / "ours")
    assert theirs.keys() == ours.keys() and len(ours) == 4 * len(PROMPTS) - 2
    for key, response in ours.items():
        assert theirs[key].token_ids == response.token_ids, key
        assert (theirs[key].log.num_accepted, theirs[key].log.cut) == (response.log.num_accepted, response.log.cut), key
    assert sum(sum(response.log.num_accepted) for response in ours.values()) > 40  # there was something to compare
    assert any(ours[LONGEST, 0, ("chain", 7)].log.num_accepted[-5:])
    assert any(response.log.cut for response in ours.values())
    assert "lossless: every response equals autoregressive decoding" in said


def test_the_report_is_of_the_same_kind(finished: tuple[Path, list[str], str]) -> None:
    root, _, _ = finished
    theirs, ours = (json.loads((root / name / "report.json").read_text()) for name in ("vllm", "ours"))
    assert theirs["run"]["engine"].startswith("vllm ") and ours["run"]["engine"].startswith("dflash-kit")
    timed = {"ms_per_round", "tokens_per_s", "speedup"}
    for entry, other in zip(theirs["results"], ours["results"], strict=True):
        assert entry.keys() == other.keys()
        assert all(entry[name] == other[name] for name in entry.keys() - timed)
        assert entry["tokens_per_s"] > 0 and entry["ms_per_round"].keys() == {"total"}
    assert theirs["results"][1]["speedup"] == pytest.approx(
        theirs["results"][1]["tokens_per_s"] / theirs["results"][0]["tokens_per_s"]
    )


def test_a_finished_run_is_not_decoded_again(
    finished: tuple[Path, list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    root, theirs, _ = finished
    before = (root / "vllm" / "results.jsonl").read_bytes()
    assert run_cli(main, theirs) == 0
    assert "starting" not in capsys.readouterr().out
    assert (root / "vllm" / "results.jsonl").read_bytes() == before
    other = [*(option for option in theirs if "--engine" not in option)]
    assert run_cli(main, other) == 2 and "holds results with engine = vllm" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_drafter_with_sliding_and_full_layers_decodes_on_a_gpu(tmp_path: Path) -> None:
    make_trained(tmp_path, PROMPTS)
    options = [f"--ckpt={tmp_path / 'drafter'}", f"--benchmarks={tmp_path / 'prompts.jsonl'}", "--methods=ar,chain"]
    options += [f"--max_new_tokens={LIMIT_TOKENS}", "--engine_args.gpu_memory_utilization=0.3", "--engine=vllm"]
    done = run_command("decode/eval.py", *options, f"--out={tmp_path / 'vllm'}")
    assert done.returncode == 0, done.stderr  # greedy output was judged in bfloat16
    report = json.loads((tmp_path / "vllm" / "report.json").read_text())
    assert report["results"][1]["acceptance_length_pooled"] > 1.2
