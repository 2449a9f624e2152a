"""The learning rate as a pure function of the step, so that a resumed run cannot bend it."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """How far a run is, in the unit in which its end is known: steps, or rows of a spool."""

    done: int
    total: int
    steps: int | None
    """Optimizer steps of the whole run; an estimate for a spool, None where there is none yet."""


def learning_rate(
    step: int,
    *,
    max_steps: int,
    peak: float,
    warmup_fraction: float,
    final_fraction: float,
    kind: Literal["cosine", "linear", "wsd"] = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Linear warm-up from near zero, then down to ``peak * final_fraction`` exactly at ``max_steps``.

    Args:
        step: from 0; a run takes steps 0 to ``max_steps - 1``.
        max_steps: optimizer steps of the whole run.
        peak: highest rate, of the first step after the warm-up.
        warmup_fraction: share of the steps that warm up.
        final_fraction: rate at the end as a share of ``peak``.
        kind: cosine and linear go down right behind the warm-up; wsd stays at the peak first, then goes down linearly.
        decay_fraction: share of the steps in which wsd goes down (at least one step).
    """
    warmup = round(max_steps * warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    start = warmup
    if kind == "wsd":
        start = max(warmup, max_steps - max(round(max_steps * decay_fraction), 1))
    progress = min(max(step - start, 0) / max(max_steps - start, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return peak * (final_fraction + (1 - final_fraction) * left)
