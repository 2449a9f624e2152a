"""The acceptance that the drafter would reach on held-out rows, replayed without the target."""

from collections.abc import Iterator, Sequence

import torch

from dflash_kit.acceptance import Acceptance, RoundLog, summarise
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.replay import Method, methods, replay_rows
from dflash_kit.shards import Row, Shards
from dflash_kit.target_ends import TargetEnds

from .average import WeightAverage
from .parallel import Parallel


class Validation:
    """Replays the same rows whenever it is asked.

    Args:
        shards: where the rows are.
        rows: their indices.
        ends: the target's embedding and head.
        budgets: tree budgets.
        eos_token_ids: where a response ends.
    """

    def __init__(
        self,
        shards: Shards,
        rows: Sequence[int],
        ends: TargetEnds,
        budgets: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self.shards, self.rows, self.ends = shards, list(rows), ends
        self.budgets, self.eos_token_ids = sorted(set(budgets)), tuple(eos_token_ids)
        self.skip_unreadable = False
        """Leave out rows that cannot be read."""
        self.unreadable: tuple[str, ...] = ()
        """What was wrong with the rows that the last ``measure`` left out, in all processes."""

    def measure(self, drafter: Drafter, parallel: Parallel) -> dict[Method, Acceptance]:
        """Acceptance by method; the rows are shared out over the processes, which all get the result.

        Args:
            drafter: a copy with whole weights, in the dtype and on the device of ``ends``.
            parallel: the processes.

        Raises:
            KitError: a row cannot be read, here or in another process, which would wait for this one otherwise.
        """
        logs: dict[Method, list[RoundLog]] = {method: [] for method in methods(drafter.config, self.budgets)}
        errors: list[str] = []
        rows = self._readable(self.rows[parallel.rank :: parallel.world_size], errors)
        for _, found in replay_rows(drafter, self.ends, rows, self.budgets, eos_token_ids=self.eos_token_ids):
            for method, responses in found.items():
                logs[method].extend(responses)
        gathered = parallel.gather((logs, errors))
        everyone = [part for part, _ in gathered]
        self.unreadable = tuple(text for _, texts in gathered for text in texts)
        if self.unreadable and not self.skip_unreadable:
            raise KitError(f"{self.unreadable[0]} (a row that is held out for replay)")
        num_draft_tokens = drafter.config.num_draft_tokens
        return {
            method: summarise([log for part in everyone for log in part[method]], num_draft_tokens) for method in logs
        }

    def _readable(self, indices: Sequence[int], errors: list[str]) -> Iterator[Row]:
        """Rows that can be read; the others leave a message."""
        for index in indices:
            try:
                row = self.shards[index]
            except KitError as error:
                errors.append(str(error))
                continue
            yield row


def whole_drafter(
    drafter: Drafter, parallel: Parallel, ends: TargetEnds, average: WeightAverage | None = None
) -> Drafter:
    """A copy of the drafter in training with whole weights, for replay and for saving; all processes call it.

    Where an average of the weights is kept, the copy has that instead of the weights.
    """
    with torch.device("meta"):
        copy = Drafter(drafter.config)
    weights = parallel.full_weights(drafter) if average is None else average.copies()
    copy.load_state_dict(weights, assign=True)
    return copy.to(device=ends.head.device, dtype=ends.head.dtype).eval().requires_grad_(False)
