"""What the measurements say: one cause, none, or that nothing is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_kit.acceptance import Acceptance

from .doctor_race import Measured

HEALTHY_LENGTH = 1.5
"""Chain acceptance below which a drafter is in a bad way: the published ones reach 3 to 8, faulty ones 1.0 to 1.5."""
RECORDED_SHARE = 1 / 3
"""Below this share of what its training measured, something happened on the way. Training measured on other prompts and whole
answers, whose later tokens are often easier: the bundled drafter has 0.40 of that on the first 64 tokens of six prompts."""
EXPECTED_SHARE = 0.6
"""Below this share of it, a healthy verdict says how to compare like with like."""
LEAST_GAIN = 0.05
"""Share of the configured acceptance length that a cause must bring; less is noise of which alternative happens to be best."""

LEFT_OUT = "left out early"
"""Verdict on what was behind on the first tokens."""

Status = Literal["healthy", "cause", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict."""

    status: Status
    text: str
    """One sentence."""
    advice: str
    best: Measured | None
    """The alternative with the largest gain on whole answers; the cause, if there is one."""


def diagnose(
    configured: Acceptance, measured: Sequence[Measured], *, recorded: float | None, mismatches: Sequence[str]
) -> Diagnosis:
    """Judge a race.

    Args:
        configured: acceptance as configured, on whole answers.
        measured: all hypotheses.
        recorded: the chain's acceptance length that training measured, where the checkpoint says so.
        mismatches: ways in which the target is not the one of the training.
    """
    length = configured.acceptance_length_pooled or 0.0
    best = max((m for m in measured if m.is_whole), key=lambda m: m.length, default=None)
    floor = max(HEALTHY_LENGTH, RECORDED_SHARE * (recorded or 0.0))
    if best is not None and is_certain(best, length):
        return _cause(best, length, floor)
    if length >= floor:
        return _healthy(length, recorded, best)
    if mismatches:
        text = f"no way to run the drafter explains a τ of {length:.2f}, but {mismatches[0]}"
        advice = "give the target that it was trained for with --target, or train on answers of this one"
        return Diagnosis(status="cause", text=text, advice=advice, best=best)
    return _without_cause(length, recorded, best)


def is_certain(measured: Measured, configured_length: float) -> bool:
    """Whether an alternative is better beyond chance, and by more than a trifle."""
    gain = measured.gain
    if gain is None or gain.difference_ci99 is None:
        return False
    return gain.difference_ci99[0] > 0 and gain.difference >= LEAST_GAIN * configured_length


def verdict_of(measured: Measured, diagnosis: Diagnosis, configured_length: float) -> str:
    """One alternative, in two words."""
    if measured.gain is None:
        return "no rounds"
    if not measured.is_whole:
        return LEFT_OUT
    if is_certain(measured, configured_length):
        return "explains it" if measured is diagnosis.best else "better, too"
    return "worse" if measured.gain.difference < 0 else "no better" if measured.gain.difference == 0 else "not certain"


def _cause(best: Measured, length: float, floor: float) -> Diagnosis:
    assert best.gain is not None
    assert best.gain.difference_ci99 is not None
    low, high = best.gain.difference_ci99
    text = (
        f"{best.hypothesis.family}: {best.hypothesis.name} explains it: τ {length:.2f} → {best.length:.2f} "
        f"(gain {best.gain.difference:.2f}, 99 % interval {low:.2f} to {high:.2f})"
    )
    if best.length < floor:
        text += f"; that is still below {floor:.2f}, so it is not all: mend it and ask again"
    return Diagnosis(status="cause", text=text, advice=best.hypothesis.advice, best=best)


def _healthy(length: float, recorded: float | None, best: Measured | None) -> Diagnosis:
    text, advice = f"healthy: τ is {length:.2f} as configured, and no alternative is better", "nothing to do"
    if best is not None and best.gain is not None and best.gain.difference >= LEAST_GAIN * length:
        text += f" beyond chance (best: {best.hypothesis.name}, τ {best.length:.2f})"
        advice = "nothing is certain; more prompts (--limit) tell whether that alternative is"
    if recorded is not None and length < EXPECTED_SHARE * recorded:
        text += f"; training measured {recorded:.2f}, on other prompts and whole answers"
        advice += ", or --replay answers to the training's own kind of prompts to compare"
    return Diagnosis(status="healthy", text=text, advice=advice, best=best)


def _without_cause(length: float, recorded: float | None, best: Measured | None) -> Diagnosis:
    text = f"τ is only {length:.2f}, and no single alternative explains it"
    if best is not None and best.gain is not None and best.gain.difference > 0:
        text += f" (best: {best.hypothesis.name}, τ {best.length:.2f}, within chance or below {LEAST_GAIN:.0%})"
    if recorded is not None and length >= EXPECTED_SHARE * recorded:
        advice = (
            f"its training measured {recorded:.2f}, so the drafter itself is weak: train on more answers, for longer"
        )
    else:
        advice = (
            "two faults at once, damaged weights, or a drafter that has learnt little: measure it on rows of its training "
            "(--replay), and more prompts here (--limit)"
        )
    return Diagnosis(status="bad", text=text, advice=advice, best=best)
