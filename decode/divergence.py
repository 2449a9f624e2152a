"""Where greedy output leaves autoregressive decoding, and whether rounding explains it.

Autoregressive decoding and a method judge the same prefix in passes of different shapes. Sums then round differently, and
two tokens whose logits nearly tie may change places. So at the first token that differs, one plain prefill of prompt and
common prefix says how far apart the two tokens really are.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Method = tuple[str, int]

MAX_ROUNDING_STEPS = 8.0
"""Largest gap that counts as rounding, in steps of the dtype at the logit that is largest in magnitude.

Rounded logits alone would explain one step, but every layer adds error. Measured on a CPU in bfloat16: passes of one row and
of a whole prompt change the margin between SmolLM2-135M's (30 layers) two likeliest tokens by 0.6 steps on average, 2 at the
99th percentile and 4 at most (326 positions of GSM8K prompts; float16: 0.6, 2, 2 over 96), and gaps at first differences reach
2 steps, there and with 6 random targets of 6 layers. So twice the largest change, which leaves room for deeper targets. A cache
that commits the wrong rows of a tree, planted there, was 0 to 82 steps off at first differences, in 6 of 10 responses of 24
tokens above 8: a fault shows over many responses, not in every one.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first token of one response that autoregressive decoding of the same prompt did not take."""

    turn: int
    method: Method
    position: int
    """Of the token in the response; 0 is the first one."""
    ar_token: int | None
    """What autoregressive decoding took; None where its response had ended."""
    token: int | None
    """What the method took; None where its response had ended."""
    gap: float | None
    """Distance of the two logits behind prompt and common prefix; None where one response ends without an end token."""
    rounding_step: float
    """Of the dtype at the magnitude of the logit there that is largest in magnitude."""

    @property
    def steps(self) -> float | None:
        """The gap in rounding steps."""
        return None if self.gap is None else self.gap / self.rounding_step

    @property
    def is_rounding(self) -> bool:
        """Whether passes in half precision may well differ by as much."""
        return self.steps is not None and self.steps <= MAX_ROUNDING_STEPS

    @property
    def severity(self) -> float:
        """Steps for comparing: a response that merely stops is worse than any gap."""
        return math.inf if self.steps is None else self.steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        name, budget = self.method
        return asdict(self) | {"method": name, "budget": budget}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Divergence":
        """What ``to_dict`` wrote."""
        others = {name: value for name, value in values.items() if name not in ("method", "budget")}
        found = cls(method=(values["method"], values["budget"]), **others)
        numbers = (found.position, found.rounding_step, 0.0 if found.gap is None else found.gap)
        if not all(isinstance(number, int | float) for number in numbers) or not found.rounding_step > 0:
            raise TypeError(f"position, rounding step and gap are {numbers}")
        return found


def first_difference(ours: tuple[int, ...], baseline: tuple[int, ...]) -> int | None:
    """Index of the first token in which two responses differ, a missing one included; None where they are equal."""
    if ours == baseline:
        return None
    shorter = min(len(ours), len(baseline))
    return next((i for i in range(shorter) if ours[i] != baseline[i]), shorter)


def measure_divergence(
    logits: Tensor,
    dtype: torch.dtype,
    *,
    turn: int,
    method: Method,
    position: int,
    ours: tuple[int, ...],
    baseline: tuple[int, ...],
) -> Divergence:
    """Compare the two tokens at ``position``.

    Args:
        logits: (V,) behind prompt and common prefix, from one plain prefill.
        dtype: that the target computes in; some models return its logits widened.
        turn: of the conversation.
        method: name and budget.
        position: where the responses first differ.
        ours: the method's response.
        baseline: the autoregressive response to the same prompt.
    """
    token = ours[position] if position < len(ours) else None
    ar_token = baseline[position] if position < len(baseline) else None
    values = logits.float()
    gap = None if token is None or ar_token is None else abs(float(values[ar_token] - values[token]))
    return Divergence(
        turn=turn,
        method=method,
        position=position,
        ar_token=ar_token,
        token=token,
        gap=gap,
        rounding_step=rounding_step(values, dtype),
    )


def rounding_step(logits: Tensor, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of a dtype at the finite logit that is largest in magnitude."""
    info = torch.finfo(dtype)
    largest = float(logits[logits.isfinite()].abs().max())
    return info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))
