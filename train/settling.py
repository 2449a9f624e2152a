"""What becomes of a step's numbers: counters, bar, metrics, bad steps.

On a GPU the numbers of a step are read after the next one was begun, so that the device always has something to do: what
is waited for then is done already, and what the host does with it costs no time. Steps are taken in one by one, in order, and all
of them before anything is saved or replayed, so the counters of a saved state are those of its step.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .bad_steps import note_bad_step
from .batches import PackedRow
from .counters import Counters
from .progress import Meter, Reporter
from .sums import PendingStep, StepResult
from .trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunStep:
    """A step that was begun, and what its lines in the log need."""

    pending: PendingStep
    lr: float
    ids: list[str]
    """Conversations of this process's packed rows."""


class Settler:
    """Takes in the steps of a run.

    Args:
        trainer: the run.
        reporter: what the user sees.
        meter: sums of the interval.
        log: writes the interval's line, from the learning rate and the numbers of its last step.
    """

    def __init__(
        self, trainer: Trainer, reporter: Reporter, meter: Meter, log: Callable[[float, StepResult], None]
    ) -> None:
        self._trainer, self._reporter, self._meter, self._log = trainer, reporter, meter, log
        self._held: BegunStep | None = None
        self.num_begun = trainer.counters.step
        """Steps behind us once all that were begun are taken in."""

    def add(self, pending: PendingStep, rows: list[PackedRow], lr: float) -> None:
        """Take in the step before this one; this one, too, where a CPU did it or a line of the log is due, whose speed is then exact.

        Raises:
            KitError: too many bad steps in a row, or a file cannot be written.
        """
        self.settle()
        self._held = BegunStep(pending=pending, lr=lr, ids=[row_id for row in rows for row_id in row.ids])
        self.num_begun += 1
        if not self._trainer.reads_late or self.num_begun % self._trainer.job.config.log_every_steps == 0:
            self.settle()

    def settle(self) -> None:
        """Take in what was begun; all processes call it.

        Raises:
            KitError: see ``add``.
        """
        if self._held is None:
            return
        step, self._held = self._held, None
        trainer, reporter, counters = self._trainer, self._reporter, self._trainer.counters
        result = step.pending.result()
        count(counters, result)
        reporter.say_unreadable(result.unreadable, counters.unreadable_rows)
        if result.applied and trainer.average is not None:
            trainer.average.update(trainer.drafter, counters.step - counters.skipped_steps)
        measure(self._meter, result)
        max_steps = trainer.feed.horizon(counters.step).steps
        reporter.advance(counters.step, result.loss_sum / max(result.weight_sum, 1e-9), max_steps)
        if trainer.feed.is_last(counters.step) or counters.step % trainer.job.config.log_every_steps == 0:
            self._log(step.lr, result)
        if not result.applied:
            note_bad_step(trainer, step.ids, result)


def count(counters: Counters, result: StepResult) -> None:
    """Add a step to the run's counters."""
    counters.step += 1
    counters.tokens += result.tokens
    counters.cut_tokens += result.cut_tokens
    counters.unreadable_rows += len(result.unreadable)
    counters.skipped_steps += not result.applied
    counters.bad_in_a_row = 0 if result.applied else counters.bad_in_a_row + 1


def measure(meter: Meter, result: StepResult) -> None:
    """Add a step to the interval's sums."""
    meter.steps += 1
    meter.tokens += result.tokens
    meter.flops += result.flops
    if result.applied:
        meter.loss_sum += result.loss_sum
        meter.weight_sum += result.weight_sum
        meter.add_slots(result.correct, result.counted)
