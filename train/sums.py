"""The sums of one step: collected on the device row by row, exchanged between the processes once."""

from dataclasses import dataclass

import torch

from .parallel import Parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Sums of one step over all processes."""

    loss_sum: float
    weight_sum: float
    correct: list[float]
    """Hits of slots 1 … B - 1."""
    counted: list[float]
    """Trials of slots 1 … B - 1."""
    tokens: int
    cut_tokens: int
    flops: float
    """Floating-point operations that the step's arithmetic needs."""
    grad_norm: float | None
    """None where the step had nothing to learn from."""
    applied: bool
    """False where the step was skipped: a non-finite loss or gradient, or no supervised token."""
    stop_asked: bool
    unreadable: tuple[tuple[str, str], ...] = ()
    """Id and what is wrong, of each conversation that was left out because it cannot be read."""


class StepSums:
    """This process's sums of a step; they stay on the device until the step is over.

    Args:
        num_slots: B - 1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.losses: list[torch.Tensor] = []
        self.correct: list[torch.Tensor] = []
        self.counted: list[torch.Tensor] = []
        self.tokens = self.cut_tokens = 0
        self.flops = 0.0

    def add(self, numerator: torch.Tensor, correct: torch.Tensor, depths: torch.Tensor) -> None:
        """Take in one packed row.

        Args:
            numerator: () weighted sum of its slot losses.
            correct: (S,) whether each slot was right.
            depths: (S,) int64, the slot's place in its block, from 1.
        """
        self.losses.append(numerator.double())
        self.correct.append(torch.bincount(depths, correct.double(), minlength=self.num_slots + 1)[1:])
        self.counted.append(torch.bincount(depths, minlength=self.num_slots + 1)[1:].double())

    def result(
        self,
        parallel: Parallel,
        weight_sum: float,
        *,
        grad_norm: float | None,
        applied: bool,
        stop_asked: bool,
        unreadable: tuple[tuple[str, str], ...] = (),
    ) -> StepResult:
        """Exchange the sums; all processes call it."""
        n = self.num_slots
        mine = [0.0] * (2 * n + 1)
        if self.losses:
            loss = torch.stack(self.losses).sum()[None]
            mine = torch.cat([loss, torch.stack(self.correct).sum(0), torch.stack(self.counted).sum(0)]).tolist()
        total = parallel.sum([*mine, float(self.tokens), float(self.cut_tokens), self.flops])
        return StepResult(
            loss_sum=total[0],
            weight_sum=weight_sum,
            correct=total[1 : n + 1],
            counted=total[n + 1 : 2 * n + 1],
            tokens=int(total[-3]),
            cut_tokens=int(total[-2]),
            flops=total[-1],
            grad_norm=grad_norm,
            applied=applied,
            stop_asked=stop_asked,
            unreadable=unreadable,
        )
