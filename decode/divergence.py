"""Where greedy output leaves autoregressive decoding, and whether rounding explains it.

Autoregressive decoding and a method judge the same prefix in passes of different shapes. Sums then round differently, and
two tokens whose logits nearly tie may change places. So at the first token that differs, one plain prefill of prompt and
common prefix says how far apart the two tokens are. It rounds as well; where it has them too far apart, a second one that computes
in float32 decides: one of the two passes has erred by what it says. The difference of these two prefills is what rounding does to this
target, without any pass of ours.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .float32_pass import PlainLogits

Method = tuple[str, int]

MAX_ROUNDING_STEPS = 8.0
"""A gap that counts as rounding for every target, in steps of the dtype at the logit that is largest in magnitude.

Rounded logits alone would explain one step, but every layer adds error. On an H200 in bfloat16 (`benchmarks/rounding_h200_202612.json`,
3,200 tokens), passes of transformers and of ours, of 1 to 512 rows, move the margin between SmolLM2-135M's (30 layers) two likeliest tokens by 0.5
steps on average, 2 at the 99th percentile and 6 at most, all alike; gaps at first differences reach 4. A cache that commits the wrong
rows of a tree, planted on a CPU, was 0 to 82 steps off at first differences, in 6 of 10 responses of 24 tokens above 8: a fault shows
over many responses, not in every one.
"""
NOISE_FACTOR = 4.0
"""A gap also counts as rounding up to so many times the largest change of a margin that the target's own prefill shows beside float32 over the
last ``NOISE_TOKENS`` tokens. That change is about 2 steps for SmolLM2, so nothing is different there; in random hybrid targets, whose recurrence and
routing amplify, it is 16 to 150 (transformers alone, a CPU), and gaps reach 28.
"""
NOISE_TOKENS = 128


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
    noise_steps: float = 0.0
    """Largest change of a margin, in rounding steps, in the target's own prefill; 0 where float32 was not asked."""

    @property
    def steps(self) -> float | None:
        """The gap in rounding steps."""
        return None if self.gap is None else self.gap / self.rounding_step

    @property
    def allowed_steps(self) -> float:
        """Largest gap that rounding explains, in steps."""
        return max(MAX_ROUNDING_STEPS, NOISE_FACTOR * self.noise_steps)

    @property
    def is_rounding(self) -> bool:
        """Whether passes in half precision may well differ by as much."""
        return self.steps is not None and self.steps <= self.allowed_steps

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
        numbers = (found.position, found.rounding_step, found.noise_steps, 0.0 if found.gap is None else found.gap)
        if not all(isinstance(number, int | float) for number in numbers) or not found.rounding_step > 0:
            raise TypeError(f"position, rounding step, noise and gap are {numbers}")
        return found


def first_difference(ours: tuple[int, ...], baseline: tuple[int, ...]) -> int | None:
    """Index of the first token in which two responses differ, a missing one included; None where they are equal."""
    if ours == baseline:
        return None
    shorter = min(len(ours), len(baseline))
    return next((i for i in range(shorter) if ours[i] != baseline[i]), shorter)


def measure_divergence(
    said: PlainLogits,
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
        said: behind the last tokens of prompt and common prefix, from plain prefills.
        dtype: that the target computes in.
        turn: of the conversation.
        method: name and budget.
        position: where the responses first differ.
        ours: the method's response.
        baseline: the autoregressive response to the same prompt.
    """
    token = ours[position] if position < len(ours) else None
    ar_token = baseline[position] if position < len(baseline) else None
    values, gap, noise_steps = said.own[-1], None, 0.0
    if token is not None and ar_token is not None:
        gap = abs(float(values[ar_token] - values[token]))
        if gap > MAX_ROUNDING_STEPS * rounding_step(values, dtype):
            exact = said.read_float32()
            values, noise_steps = exact[-1], rounding_noise(said.own, exact, dtype)
            gap = abs(float(values[ar_token] - values[token]))
    return Divergence(
        turn=turn,
        method=method,
        position=position,
        ar_token=ar_token,
        token=token,
        gap=gap,
        rounding_step=rounding_step(values, dtype),
        noise_steps=noise_steps,
    )


def rounding_noise(own: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Largest change, in rounding steps, of the margin between the two tokens that are likeliest in ``exact``; logits (n, V) both."""
    likeliest = exact.topk(2).indices
    margin, exact_margin = (logits.gather(1, likeliest).diff()[:, 0] for logits in (own, exact))
    changes = (margin - exact_margin).abs().tolist()
    return max(change / rounding_step(logits, dtype) for change, logits in zip(changes, exact, strict=True))


def rounding_step(logits: Tensor, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of a dtype at the finite logit that is largest in magnitude."""
    info = torch.finfo(dtype)
    largest = float(logits[logits.isfinite()].abs().max())
    return info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))
