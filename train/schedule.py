"""The learning rate as a pure function of the step, so that a resumed run cannot bend it."""

import math


def learning_rate(step: int, *, max_steps: int, peak: float, warmup_fraction: float, final_fraction: float) -> float:
    """Linear warm-up from near zero, then cosine down to ``peak * final_fraction`` exactly at ``max_steps``.

    Args:
        step: from 0; a run takes steps 0 to ``max_steps - 1``.
        max_steps: optimizer steps of the whole run.
        peak: highest rate, of the first step after the warm-up.
        warmup_fraction: share of the steps that warm up.
        final_fraction: rate at the end as a share of ``peak``.
    """
    warmup = round(max_steps * warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(max_steps - warmup, 1)
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
