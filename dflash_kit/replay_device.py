"""Replay whose arithmetic all happens on the device: many rows together, one answer to the host for every few thousand anchors."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence

import torch

from .acceptance import DDTREE, RoundLog
from .drafter import Drafter
from .reach_counter import ReachCounter
from .replay_accepted import AcceptedCounter
from .replay_blocks import PackedContexts
from .replay_fleet import Fleet
from .replay_reach import Method
from .shards import Row
from .target_ends import TargetEnds

ANCHORS_PER_CHUNK = (512, 4096)
"""Fewest and most, by memory. A pass costs some 15 ms of launches on an H200, whether of 120 anchors or of 240 (SmolLM2, budget 256)."""
MEMORY_SHARE = 1 / 8
"""Of the device's free memory that the anchors of a pass may take."""
ROWS_AT_ONCE = 256
TOKENS_AT_ONCE = 1 << 17
"""Tokens of the rows that are walked together: 2.7 GB of keys and values for five layers with 8 heads of 128 in bfloat16."""


def replay_on_device(
    drafter: Drafter,
    ends: TargetEnds,
    rows: Iterable[Row],
    methods: Sequence[Method],
    *,
    eos_token_ids: Sequence[int],
    max_new_tokens: int | None,
    anchors_per_chunk: int | None,
    rows_at_once: int | None,
) -> Iterator[tuple[Row, dict[Method, list[RoundLog]]]]:
    """As ``replay_rows``; rows come out when those that were taken together are done.

    Anchors at which no method has come to stand yet are drafted, too, while less than half of ``anchors_per_chunk`` would
    be: there a pass is launches more than arithmetic, and saves later ones.
    """
    counter = counter_for(ends, [budget for name, budget in methods if name == DDTREE])
    anchors_per_chunk = anchors_per_chunk or anchors_that_fit(drafter, counter.budget, _free_bytes(ends.head.device))
    for some in _together(rows, rows_at_once or ROWS_AT_ONCE):
        fleet = Fleet(some, methods, eos_token_ids, max_new_tokens)
        contexts = PackedContexts(drafter, ends, some, fleet.context_lengths())
        while not fleet.is_done:
            anchors = fleet.next_anchors(anchors_per_chunk // 2)[:anchors_per_chunk]
            rows_of = fleet.starts.searchsorted(anchors, side="right") - 1
            hidden = contexts.draft(rows_of, anchors - fleet.starts[rows_of], fleet.tokens[anchors])
            truths = fleet.truths(anchors, drafter.config.num_draft_tokens)
            fleet.hop(anchors, counter.count(hidden, torch.from_numpy(truths)).numpy())
        yield from zip(some, fleet.logs(), strict=True)


def counter_for(ends: TargetEnds, budgets: Sequence[int]) -> AcceptedCounter:
    """Kernels on GPUs."""
    kind = ReachCounter if ends.head.is_cuda and importlib.util.find_spec("triton") else AcceptedCounter
    return kind(ends, budgets)


def anchors_that_fit(drafter: Drafter, budget: int, free_bytes: int) -> int:
    """How many anchors to draft together, by what each takes: its block's states, and the scores that its walk reads and writes."""
    config = drafter.config
    states = 3 * config.block_size * config.hidden_size * drafter.fc.weight.element_size()
    scores = 4 * config.num_draft_tokens * budget + 16 * budget
    fewest, most = ANCHORS_PER_CHUNK
    return max(fewest, min(most, int(MEMORY_SHARE * free_bytes / (states + scores))))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _together(rows: Iterable[Row], rows_at_once: int) -> Iterator[list[Row]]:
    """Rows in groups whose contexts fit; each has one at least."""
    group: list[Row] = []
    num_tokens = 0
    for row in rows:
        if group and (len(group) == rows_at_once or num_tokens + len(row.input_ids) > TOKENS_AT_ONCE):
            yield group
            group, num_tokens = [], 0
        group.append(row)
        num_tokens += len(row.input_ids)
    if group:
        yield group
