"""Steps that were skipped: which rows they had, and the end of a run in which nothing but such steps comes."""

import json
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from dflash_kit.errors import KitError

from .counters import Counters, writes
from .sums import StepResult

if TYPE_CHECKING:
    from .trainer import Trainer

NOT_FINITE, NOTHING_TO_LEARN = "non-finite loss or gradient", "no supervised token"
REMEDIES = {
    NOT_FINITE: "lower optim.lr or look at these rows",
    NOTHING_TO_LEARN: "a block needs two supervised tokens in a row, so raise data.seq_len if it cuts the responses off, "
    "or look at the loss masks of these rows",
}


def note_bad_step(trainer: "Trainer", own_ids: Sequence[str], result: StepResult) -> None:
    """Write down the conversations of a step that was skipped, this process's own among them; all processes call it.

    Raises:
        KitError: it is one too many in a row, or it cannot be written.
    """
    counters, folder, parallel = trainer.counters, trainer.folder, trainer.parallel
    reason = NOTHING_TO_LEARN if result.grad_norm is None else NOT_FINITE
    ids = [row_id for part in parallel.gather(list(own_ids)) for row_id in part]
    line = {"step": counters.step, "reason": reason, "loss": _mean_loss(result), "ids": ids}

    def write() -> None:
        with writes(folder.bad_steps), folder.bad_steps.open("a") as file:
            file.write(json.dumps(line) + "\n")

    parallel.on_main(write)
    limit = trainer.job.config.optim.max_bad_steps
    if counters.bad_in_a_row >= limit:
        saved = (
            f"the last saved state in {folder.state} is intact" if parallel.on_main(folder.steps) else "none was saved"
        )
        raise KitError(
            f"{limit} steps in a row (up to step {counters.step}) were skipped, the last one for: {reason}, in rows "
            f"{', '.join(ids[:8])}{' …' if len(ids) > 8 else ''} (all of them in {folder.bad_steps}); "
            f"{REMEDIES[reason]} ({saved})"
        )


def require_applied(counters: Counters) -> None:
    """Refuse to call a drafter trained that no step has changed; the counters are equal in every process."""
    if counters.skipped_steps == counters.step:
        raise KitError(
            f"none of the run's {counters.step} steps was applied: each had a non-finite loss or gradient (look for NaN in the "
            "shards' hidden states, or lower optim.lr), or no supervised token (rows that are cut before the response: raise "
            "data.seq_len), so there is no drafter to finish; mend that and choose another --out"
        )


def _mean_loss(result: StepResult) -> float | None:
    """None where there is none that JSON can hold."""
    loss = result.loss_sum / result.weight_sum if result.weight_sum else float("nan")
    return loss if isfinite(loss) else None
