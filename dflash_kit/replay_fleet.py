"""The rounds of many recorded rows that are walked together: integers of all responses and methods in arrays.

All tokens of the rows stand one behind the other; a place is an index among them. Shape legend: L places, S responses, m methods.
"""

from collections.abc import Sequence

import numpy as np

from .acceptance import RoundLog
from .replay_reach import Method
from .replay_walk import response_ranges
from .shards import Row

UNKNOWN = -1


class Fleet:
    """Where each method stands in each response, and what is known of the anchors.

    Args:
        rows: the conversations.
        methods: what to replay.
        eos_token_ids: where a response ends.
        max_new_tokens: end every response there; None: where it was recorded to end.
    """

    def __init__(
        self, rows: Sequence[Row], methods: Sequence[Method], eos_token_ids: Sequence[int], max_new_tokens: int | None
    ) -> None:
        self.rows, self.methods, self.eos_token_ids = list(rows), list(methods), eos_token_ids
        tokens = [row.token_ids() for row in rows]
        self.starts = np.cumsum([0, *(len(said) for said in tokens)])
        """First place of each row, and the end."""
        self.tokens = np.concatenate([said.numpy() for said in tokens]).astype(np.int64)
        spans = [list(response_ranges(row, eos_token_ids, max_new_tokens)) for row in rows]
        self.num_responses = [len(found) for found in spans]
        self.row_of = np.repeat(np.arange(len(rows)), self.num_responses)
        ranges = np.array([span for found in spans for span in found], dtype=np.int64).reshape(-1, 2)
        self.firsts, self.lasts = (ranges + self.starts[self.row_of][:, None]).T
        """(S,) place of the first token and of the last, which is no anchor."""
        self.at = np.repeat(self.firsts[:, None], len(self.methods), axis=1)
        """(S, m) anchor of the next round; behind ``lasts`` when the response is complete."""
        self.accepted = np.full((len(self.tokens), len(self.methods)), UNKNOWN, dtype=np.int16)
        """(L, m) draft tokens that a round from there accepts."""

    @property
    def is_done(self) -> bool:
        return not (self.at < self.lasts[:, None]).any()

    def context_lengths(self) -> list[int]:
        """Tokens of each row in front of the last anchor that there can be, itself included."""
        lengths = np.zeros(len(self.rows), dtype=np.int64)
        np.maximum.at(lengths, self.row_of, self.lasts - self.starts[self.row_of])
        return [int(length) for length in lengths]

    def next_anchors(self, at_least: int) -> np.ndarray:
        """Places where a method stands, ascending; if they are few, those to which one may come next, too."""
        standing = np.unique(self.at[self.at < self.lasts[:, None]])
        spare = at_least - len(standing)
        if spare <= 0:
            return standing
        is_going = (self.at < self.lasts[:, None]).any(1)
        rearmost, lasts = self.at.min(1)[is_going], self.lasts[is_going]
        is_wanted = np.zeros(len(self.tokens), dtype=bool)
        is_wanted[standing] = True
        # Nearest first, over all responses; some of these are known already, hence more than are asked for.
        reach = 16 + 2 * spare // len(rearmost)
        ahead = (rearmost + np.arange(reach)[:, None]).ravel()
        ahead = ahead[ahead < np.tile(lasts, len(ahead) // len(lasts))]
        ahead = ahead[~is_wanted[ahead] & (self.accepted[ahead, 0] == UNKNOWN)]
        return np.sort(np.concatenate([standing, ahead[:spare]]))

    def truths(self, anchors: np.ndarray, num_draft_tokens: int) -> np.ndarray:
        """(N, M) int64 true tokens behind anchors (N,), -1 behind the end of their responses."""
        lasts = self.lasts[np.searchsorted(self.firsts, anchors, side="right") - 1]
        places = anchors[:, None] + np.arange(1, num_draft_tokens + 1)
        said = self.tokens[np.minimum(places, len(self.tokens) - 1)]
        return np.where(places <= lasts[:, None], said, -1)

    def hop(self, anchors: np.ndarray, accepted: np.ndarray) -> None:
        """Take in what rounds from anchors (N,) accept, (N, m), and let every method go on as long as its anchor is known."""
        self.accepted[anchors] = accepted
        columns = np.arange(len(self.methods))
        while True:
            found = self.accepted[np.minimum(self.at, self.lasts[:, None]), columns]
            may_hop = (self.at < self.lasts[:, None]) & (found != UNKNOWN)
            if not may_hop.any():
                return
            self.at += np.where(may_hop, found + 1, 0)

    def logs(self) -> list[dict[Method, list[RoundLog]]]:
        """The rounds by row and method, one log a response."""
        found: list[dict[Method, list[RoundLog]]] = [{method: [] for method in self.methods} for _ in self.rows]
        for row, first, last in zip(self.row_of.tolist(), self.firsts.tolist(), self.lasts.tolist(), strict=True):
            for method, accepted in zip(self.methods, self.accepted[first : last + 1].T.tolist(), strict=True):
                found[row][method].append(self._log(row, first, last, accepted))
        return found

    def _log(self, row: int, first: int, last: int, accepted: list[int]) -> RoundLog:
        at, num_accepted = 0, []
        while at < last - first:
            num_accepted.append(accepted[at])
            at += accepted[at] + 1
        ended = "eos" if int(self.tokens[last]) in self.eos_token_ids else "length"
        # The bonus token of a round that accepts the last token itself would stand behind the response.
        cut = ended if at > last - first else None
        return RoundLog(prompt_id=self.rows[row].id, num_accepted=tuple(num_accepted), cut=cut)
