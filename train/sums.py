"""The sums of one step: collected on the device row by row, exchanged between the processes once."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from .parallel import Parallel
from .transfer import read_later


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStep:
    """A step that the device was given to do; its numbers may still be on their way."""

    numbers: Callable[[], list[float]]
    """Waits for the loss, hits and trials over all processes, then tokens, cut tokens and operations, then the norm."""
    counts: list[float]
    """Tokens, cut tokens and operations where the device was not told: one process knows its own."""
    num_slots: int
    weight_sum: float
    has_norm: bool
    """Whether the norm is among the numbers; the device itself skipped the step where it is not finite."""
    grad_norm: float | None
    """The norm where it was read before."""
    applied: bool
    """Whether the step was done, where that was known before."""
    stop_asked: bool
    unreadable: tuple[tuple[str, str], ...]

    def result(self) -> StepResult:
        """Wait for the numbers."""
        numbers, n = self.numbers(), self.num_slots
        norm = numbers.pop() if self.has_norm else self.grad_norm
        numbers += self.counts
        return StepResult(
            loss_sum=numbers[0],
            weight_sum=self.weight_sum,
            correct=numbers[1 : n + 1],
            counted=numbers[n + 1 : 2 * n + 1],
            tokens=int(numbers[-3]),
            cut_tokens=int(numbers[-2]),
            flops=numbers[-1],
            grad_norm=norm,
            applied=isfinite(norm) if self.has_norm and norm is not None else self.applied,
            stop_asked=self.stop_asked,
            unreadable=self.unreadable,
        )


class StepSums:
    """This process's sums of a step; they stay on the device until the step is over.

    Args:
        num_slots: B - 1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.losses: list[Tensor] = []
        self.correct: list[Tensor] = []
        self.counted: list[Tensor] = []
        self.tokens = self.cut_tokens = 0
        self.flops = 0.0

    def add(self, numerator: Tensor, correct: Tensor, depths: Tensor) -> None:
        """Take in one packed row.

        Args:
            numerator: () weighted sum of its slot losses.
            correct: (S,) whether each slot was right.
            depths: (S,) int64, the slot's place in its block, from 1.
        """
        # ``bincount`` would wait for the device, which has the backward pass still to get.
        hits = correct.double()
        found = hits.new_zeros(2, self.num_slots + 1).index_add_(1, depths, torch.stack([hits, torch.ones_like(hits)]))
        self.losses.append(numerator.double())
        self.correct.append(found[0, 1:])
        self.counted.append(found[1, 1:])

    def send(
        self,
        parallel: Parallel,
        weight_sum: float,
        *,
        grad_norm: Tensor | float | None,
        applied: bool,
        stop_asked: bool,
        unreadable: tuple[tuple[str, str], ...] = (),
    ) -> PendingStep:
        """Exchange the sums; all processes call it.

        Args:
            parallel: the processes.
            weight_sum: of the step.
            grad_norm: on the device where it was not read; the step was skipped by the device where it is not finite.
            applied: whether the step was done, where ``grad_norm`` is no tensor.
            stop_asked: whether a process was asked to stop.
            unreadable: conversations left out.
        """
        if self.losses:
            sums = torch.cat([torch.stack(self.losses).sum()[None], *map(_total, (self.correct, self.counted))])
        else:
            sums = torch.zeros(2 * self.num_slots + 1, dtype=torch.float64, device=parallel.device)
        counts = [float(self.tokens), float(self.cut_tokens), self.flops]
        if parallel.joined:
            sums = parallel.sum_there(
                torch.cat([sums, torch.tensor(counts, dtype=sums.dtype).to(sums.device, non_blocking=True)])
            )
            counts = []
        has_norm = isinstance(grad_norm, Tensor)
        if isinstance(grad_norm, Tensor):
            sums = torch.cat([sums, grad_norm.detach().to(sums).reshape(1)])
        return PendingStep(
            numbers=read_later(sums),
            counts=counts,
            num_slots=self.num_slots,
            weight_sum=weight_sum,
            has_norm=has_norm,
            grad_norm=None if isinstance(grad_norm, Tensor) else grad_norm,
            applied=applied,
            stop_asked=stop_asked,
            unreadable=unreadable,
        )


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
