"""Acceptance without the target: hop through recorded responses as live greedy decoding would.

For a response that the target itself said greedily, the recorded continuation is what verification would
answer. The tree of the largest budget tells for every budget at once how far the continuation stays inside: the tree
of budget b is a prefix of it, and holds exactly the nodes with an index below b. So each method hops from anchor to
anchor by num_accepted + 1, and an anchor at which several methods arrive is drafted once. Anchors of several rows are
drafted together.

Sampled responses replay, too: their rounds have the distribution of live rounds at that temperature.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .acceptance import CHAIN, DDTREE, Acceptance, RoundLog, summarise
from .drafter import Drafter
from .drafter_config import DrafterConfig
from .replay_device import replay_on_device
from .replay_draft import RowContext, draft_blocks
from .replay_reach import Method, find_reaches
from .replay_walk import RowWalk, response_spans
from .shards import Row
from .target_ends import TargetEnds

__all__ = ["Method", "methods", "replay", "replay_row", "replay_rows", "response_spans"]

ANCHORS_PER_CHUNK = 32
ROWS_AT_ONCE = 16


def replay(
    drafter: Drafter,
    ends: TargetEnds,
    rows: Iterable[Row],
    budgets: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
    anchors_per_chunk: int | None = None,
    rows_at_once: int | None = None,
    on_device: bool | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> dict[Method, Acceptance]:
    """Acceptance of the chain and of DDTree at every budget, over many rows.

    Args:
        drafter: the drafter, on any device.
        ends: the target's embedding and head, on the same device.
        rows: conversations with taps, best those that the target generated greedily.
        budgets: tree budgets, each at least 1; may be empty.
        eos_token_ids: where a response ends; also tells an end by EOS from one by length.
        max_new_tokens: end every response there, None keeps the recorded end.
        anchors_per_chunk: anchors drafted together; more takes more memory. None: what suits the device.
        rows_at_once: rows whose keys and values are held at once; with few, fewer anchors are drafted together. None: likewise.
        on_device: count in operations of fixed shapes, which suits GPUs, instead of as few as will do; the rounds are the same.
            None: where ``ends`` are on a GPU.
        on_row: called after each row, in their order, to show progress.
    """
    logs: dict[Method, list[RoundLog]] = {method: [] for method in methods(drafter.config, budgets)}
    for row, found in replay_rows(
        drafter,
        ends,
        rows,
        budgets,
        eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
        anchors_per_chunk=anchors_per_chunk,
        rows_at_once=rows_at_once,
        on_device=on_device,
    ):
        for method, responses in found.items():
            logs[method].extend(responses)
        if on_row is not None:
            on_row(row)
    return {method: summarise(logs[method], drafter.config.num_draft_tokens) for method in logs}


def replay_row(
    drafter: Drafter,
    ends: TargetEnds,
    row: Row,
    budgets: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
    anchors_per_chunk: int | None = None,
    on_device: bool | None = None,
) -> dict[Method, list[RoundLog]]:
    """Rounds of the chain and of DDTree at every budget, one log for each response in the row.

    Args: as for ``replay``; many rows are faster through ``replay_rows``.
    """
    ((_, found),) = replay_rows(
        drafter,
        ends,
        [row],
        budgets,
        eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
        anchors_per_chunk=anchors_per_chunk,
        on_device=on_device,
    )
    return found


def replay_rows(
    drafter: Drafter,
    ends: TargetEnds,
    rows: Iterable[Row],
    budgets: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
    anchors_per_chunk: int | None = None,
    rows_at_once: int | None = None,
    on_device: bool | None = None,
) -> Iterator[tuple[Row, dict[Method, list[RoundLog]]]]:
    """Each row and its rounds by method, one log for each response in it; rows in their order, taken as they are needed.

    Args: as for ``replay``. The first anchor of a response is its first token.
    """
    if any(budget < 1 for budget in budgets):
        raise ValueError(f"budgets are {list(budgets)}; each must be at least 1")
    wanted = methods(drafter.config, budgets)
    if on_device is None:
        on_device = ends.head.device.type != "cpu"
    if on_device:
        yield from replay_on_device(
            drafter,
            ends,
            rows,
            wanted,
            eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens,
            anchors_per_chunk=anchors_per_chunk,
            rows_at_once=rows_at_once,
        )
        return
    anchors_per_chunk, rows_at_once = anchors_per_chunk or ANCHORS_PER_CHUNK, rows_at_once or ROWS_AT_ONCE
    coming = (RowWalk(row, wanted, eos_token_ids, max_new_tokens) for row in rows)
    walks: list[RowWalk] = []
    is_more = True
    while is_more or walks:
        while is_more and sum(not walk.is_done for walk in walks) < rows_at_once:
            walk = next(coming, None)
            is_more = walk is not None
            walks += [walk] if walk is not None else []
        _hop_on(drafter, ends, [walk for walk in walks if not walk.is_done], max(budgets, default=0), anchors_per_chunk)
        while walks and walks[0].is_done:
            walk = walks.pop(0)
            yield walk.row, walk.logs()


def looks_ahead(device: torch.device) -> bool:
    """Whether to draft at anchors that no method has come to yet, where few have: on a GPU that costs little."""
    return device.type != "cpu"


def methods(config: DrafterConfig, budgets: Sequence[int]) -> list[Method]:
    """What one pass answers: the chain, and DDTree at each budget."""
    return [(CHAIN, config.num_draft_tokens), *((DDTREE, budget) for budget in budgets)]


@torch.no_grad()
def _hop_on(drafter: Drafter, ends: TargetEnds, walks: list[RowWalk], budget: int, anchors_per_chunk: int) -> None:
    """Draft at the anchors where the methods of these rows stand, and hop as far as is known then."""
    todo = [(walk, anchor) for walk in walks for anchor in walk.anchors()]
    spare = anchors_per_chunk - len(todo)
    if spare > 0 and walks and looks_ahead(ends.head.device):
        todo += [(walk, anchor) for walk in walks for anchor in walk.anchors_ahead(-(-spare // len(walks)))]
    for start in range(0, len(todo), anchors_per_chunk):
        chunk = todo[start : start + anchors_per_chunk]
        for walk in {id(walk): walk for walk, _ in chunk}.values():
            walk.context = walk.context or RowContext.of(drafter, walk.row, walk.num_context)
        hidden = draft_blocks(drafter, ends, [(walk.context, anchor) for walk, anchor in chunk if walk.context])
        truths = torch.stack([walk.truth(anchor, drafter.config.num_draft_tokens) for walk, anchor in chunk])
        for (walk, anchor), reach in zip(chunk, find_reaches(ends, hidden, truths, budget), strict=True):
            walk.reaches[anchor] = reach
    for walk in walks:
        walk.hop()
