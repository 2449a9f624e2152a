"""Greedy decoding in half precision: what rounding explains passes and is reported, anything else fails."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import tiny_drafter
from test_hybrid import FAMILIES as HYBRIDS

from decode.cli import main
from decode.conversation import Conversation
from decode.divergence import (
    MAX_ROUNDING_STEPS,
    NOISE_FACTOR,
    Divergence,
    first_difference,
    measure_divergence,
    rounding_noise,
    rounding_step,
)
from decode.float32_pass import PlainLogits, plain_logits
from decode.report import build_report, divergence_lines, write_report
from decode.results import PromptResult, Response
from decode.sampling import choose_tokens
from decode.verdict import judge
from dflash_kit.acceptance import RoundLog
from dflash_kit.errors import run_cli
from dflash_kit.target import load_target, load_tokenizer
from helpers import make_tiny_target

BF16_STEP = 2.0**-7
PROMPTS = [
    {"id": "one", "prompt": "What is 2 + 3?"},
    {"id": "talk", "turns": ["Name a colour.", "And another?"]},
    {"id": "three", "prompt": "Say hello."},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, an untrained drafter, and prompts."""
    root = tmp_path_factory.mktemp("divergence")
    target = make_tiny_target(root / "target")
    drafter, _ = tiny_drafter(target)
    drafter.save_pretrained(root / "drafter", dtype=torch.bfloat16, provenance={"target": str(target)})
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return root


@pytest.fixture
def bf16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags refuse it for its slowness; a tiny target does not mind."""
    monkeypatch.setattr("decode.cli.choose_device", lambda config: ("cpu", "bfloat16"))


def evaluate(made: Path, out: Path, *more: str) -> int:
    return run_cli(
        main,
        [
            f"--ckpt={made / 'drafter'}",
            f"--benchmarks={made / 'prompts.jsonl'}",
            f"--out={out}",
            "--methods=ar,chain",
            *more,
        ],
    )


def read_results(out: Path) -> list[PromptResult]:
    return [PromptResult.from_dict(json.loads(line)) for line in (out / "results.jsonl").read_text().splitlines()[1:]]


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("engine", ["portable", "fused"])
def test_flipped_ties_pass_and_are_reported(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    assert evaluate(made, tmp_path, "--max_new_tokens=100", f"--engine={engine}") == 0
    printed = " ".join(capsys.readouterr().out.split())
    results = read_results(tmp_path)
    found = [divergence for result in results for divergence in result.divergences]
    assert found, "no tie flipped in 400 tokens: choose other prompts"
    chain = json.loads((tmp_path / "report.json").read_text())["results"][1]
    assert chain["differing_tokens"] > 0
    assert chain["diverging_responses"] == len(found)
    worst = chain["largest_gap"]
    assert worst["steps"] == max(divergence.steps for divergence in found) <= MAX_ROUNDING_STEPS
    assert f"chain: {len(found)} of 4 responses leave the autoregressive one" in printed
    assert "every first difference is within" in printed
    assert f"{worst['token']} instead of {worst['ar_token']}" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("bf16_on_cpu", "torch_rules")
def test_a_target_that_rounding_moves_far_is_judged_by_that(made: Path, tmp_path: Path) -> None:
    """A random hybrid with experts: recurrence and routing amplify, in transformers' own passes as in ours."""
    target = make_tiny_target(tmp_path / "target", model_type="qwen3_5_moe_text", **HYBRIDS["qwen3_5_moe_text"])
    drafter, _ = tiny_drafter(target)
    drafter.save_pretrained(tmp_path / "drafter", dtype=torch.bfloat16, provenance={"target": str(target)})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    assert evaluate(tmp_path, tmp_path / "out", "--max_new_tokens=100", "--engine=portable") == 0
    found = [divergence for result in read_results(tmp_path / "out") for divergence in result.divergences]
    assert found, "no tie flipped: choose other prompts"
    said = plain_logits(load_target(target, dtype=torch.bfloat16), list(range(100)), 64)
    noise_steps = rounding_noise(said.own, said.read_float32(), torch.bfloat16)
    assert NOISE_FACTOR * noise_steps > 2 * MAX_ROUNDING_STEPS


@pytest.mark.usefixtures("bf16_on_cpu")
def test_a_clearly_wrong_token_fails(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault: behind the anchor of every tree, the target's least likely token is taken."""

    def choose_wrongly(logits: torch.Tensor, *rest: Any) -> list[int]:
        chosen = choose_tokens(logits, *rest)
        return [int(logits[0].argmin()), *chosen[1:]] if len(chosen) > 1 else chosen

    monkeypatch.setattr("decode.engine.choose_tokens", choose_wrongly)
    assert evaluate(made, tmp_path, "--max_new_tokens=6") == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    results = read_results(tmp_path)
    found = {result.prompt_id: result.divergences for result in results}
    assert [len(found[name]) for name in ("one", "talk", "three")] == [1, 1, 1]  # a second turn is another prompt
    result = max(results, key=lambda result: result.divergences[0].severity)
    worst = result.divergences[0]
    assert len(error) == 1
    for words in (
        f"prompt {result.prompt_id} of",
        f"turn {worst.turn}, token 1:",
        f"chain took {worst.token} where autoregressive decoding took {worst.ar_token}",
        f"{worst.gap:.4g} apart",
        f"at most {worst.allowed_steps * worst.rounding_step:.4g} (",
        "2 more such responses",
    ):
        assert words in error[0]
    turns = next(row.get("turns") or [row["prompt"]] for row in PROMPTS if row["id"] == result.prompt_id)
    prompt = Conversation(load_tokenizer(made / "target"), tuple(turns), "x", enable_thinking=False).ask(0)
    model = load_target(made / "target", dtype=torch.bfloat16)
    logits = model(torch.tensor([prompt + list(result.responses[0].token_ids[:1])])).logits[0, -1].float()
    assert worst.ar_token == int(logits.argmax())
    assert worst.gap == pytest.approx(float(logits.max() - logits[worst.token]), abs=4 * worst.rounding_step)
    assert worst.gap > 20 * worst.rounding_step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [0.3, 1.0, 24.125, -31.0])
def test_rounding_step_is_the_distance_to_the_next_number(dtype: torch.dtype, largest: float) -> None:
    value = torch.tensor(abs(largest), dtype=dtype)
    after = torch.nextafter(value, torch.tensor(torch.inf, dtype=dtype))
    logits = torch.tensor([0.1, -torch.inf, value.item() * (1 if largest > 0 else -1)])
    assert rounding_step(logits, dtype) == float(after) - float(value)


def test_first_difference() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def measured(token: int, ours: tuple[int, ...] = (), noise_steps: float = 0.0) -> Divergence:
    """At position 1, where the logits are 1.5, 1.5 - 8 steps, 1.5 - 9 steps of bfloat16; rounding moved the first one before."""
    logits = torch.tensor([1.5, 1.5 - 8 * BF16_STEP, 1.5 - 9 * BF16_STEP]).expand(3, 3)
    own = logits.clone()
    own[0, 0] += noise_steps * BF16_STEP
    ours = ours or (2, token)
    return measure_divergence(
        PlainLogits(own, read_float32=lambda: logits),
        torch.bfloat16,
        turn=0,
        method=("chain", 3),
        position=1,
        ours=ours,
        baseline=(2, 0, 1),
    )


def make_result(prompt_id: str, divergence: Divergence | None) -> PromptResult:
    log = RoundLog(prompt_id=prompt_id, num_accepted=(0,))
    responses = tuple(Response(turn=0, method=method, log=log) for method in (("ar", 0), ("chain", 3)))
    return PromptResult(
        benchmark="bench",
        prompt_id=prompt_id,
        responses=responses,
        differing_tokens={"chain": 2},
        divergences=() if divergence is None else (divergence,),
    )


def test_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    near, far = measured(1), measured(2)
    assert (near.steps, far.steps) == (8.0, 9.0)
    assert judge([make_result("a", near)], "bfloat16") == 0
    assert judge([make_result("a", near), make_result("b", far)], "bfloat16") == 1
    assert "prompt b of bench, turn 0, token 1: chain took 2" in capsys.readouterr().err
    assert judge([make_result("a", near)], "float32") == 1, "in float32 any difference fails"


def test_what_rounding_does_to_the_target_widens_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert [measured(2, noise_steps=n).allowed_steps for n in (0, 2, -3)] == [8.0, 8.0, 3 * NOISE_FACTOR]
    assert judge([make_result("a", measured(2, noise_steps=2.25))], "bfloat16") == 0
    assert "at most 9 steps of bfloat16" in capsys.readouterr().out
    assert judge([make_result("a", measured(2, noise_steps=2.125))], "bfloat16") == 1
    assert "(8.5 steps)" in capsys.readouterr().err


def test_float32_decides_where_the_prefill_has_them_far_apart() -> None:
    exact = torch.tensor([[1.5, 1.5 - 2 * BF16_STEP]])
    near, far = (torch.tensor([[1.5, 1.5 - steps * BF16_STEP]]) for steps in (8, 20))
    where = {"turn": 0, "method": ("chain", 3), "position": 0, "ours": (1,), "baseline": (0,)}
    found = measure_divergence(PlainLogits(far, lambda: exact), torch.bfloat16, **where)
    assert (found.steps, found.noise_steps, found.is_rounding) == (2.0, 18.0, True)
    found = measure_divergence(PlainLogits(near, lambda: pytest.fail("not needed")), torch.bfloat16, **where)
    assert (found.steps, found.noise_steps) == (8.0, 0.0)


def test_noise_is_of_the_two_tokens_that_float32_thinks_likeliest() -> None:
    exact = torch.tensor([[3.0, 2.0, 1.0, -torch.inf], [0.5, 0.25, 0.0, -torch.inf]])
    own = exact + torch.tensor([[0.0, 0.0, 2.0, 0.0], [0.0, 0.125, 0.0, 0.0]])
    assert rounding_noise(own, exact, torch.bfloat16) == 0.125 / 2.0**-8
    assert rounding_noise(exact, exact, torch.bfloat16) == 0.0


def test_results_without_noise_load() -> None:
    values = measured(2).to_dict()
    del values["noise_steps"]
    assert Divergence.from_dict(values) == measured(2)


def test_a_response_that_merely_stops_fails(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = measured(1, ours=(2,))
    assert (stopped.token, stopped.gap, stopped.is_rounding) == (None, None, False)
    assert judge([make_result("a", stopped)], "bfloat16") == 1
    assert "chain ended where autoregressive decoding took 0" in capsys.readouterr().err


def test_results_of_earlier_versions_load_and_are_named_unjudged(capsys: pytest.CaptureFixture[str]) -> None:
    values = make_result("a", None).to_dict()
    del values["divergences"]
    assert judge([PromptResult.from_dict(values)], "bfloat16") == 0
    assert "warning: 1 " in capsys.readouterr().err


def test_divergences_survive_json_and_wrong_types_are_refused() -> None:
    result = make_result("a", measured(2))
    assert PromptResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    with pytest.raises(TypeError):
        Divergence.from_dict(measured(2).to_dict() | {"gap": "wide"})


def test_report_names_the_largest_gap(tmp_path: Path) -> None:
    results = [make_result("a", measured(1)), make_result("<b>", measured(2)), make_result("c", None)]
    report = build_report(
        results,
        methods=[("ar", 0), ("chain", 3)],
        num_draft_tokens=3,
        temperature=0.0,
        facts={"target": "t", "checkpoint": "c"},
    )
    ar, chain = report["results"]
    assert "largest_gap" not in ar
    assert chain["diverging_responses"] == 2
    assert chain["largest_gap"] == {
        "gap": 9 * BF16_STEP,
        "steps": 9.0,
        "prompt_id": "<b>",
        "turn": 0,
        "position": 1,
        "ar_token": 0,
        "token": 2,
    }
    (line,) = divergence_lines(report)
    assert "2 of 3 responses" in line
    write_report(tmp_path, report)
    assert "turn 0 of &lt;b&gt;: 2 instead of 0" in (tmp_path / "report.html").read_text()
    unmeasured = [replace(result, divergences=()) for result in results]
    assert (
        divergence_lines(
            build_report(unmeasured, methods=[("ar", 0), ("chain", 3)], num_draft_tokens=3, temperature=0.0, facts={})
        )
        == []
    )
