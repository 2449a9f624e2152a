"""Acceptance without the target: hop through recorded responses as live greedy decoding would.

For a response that the target itself said greedily, the recorded continuation is what verification would
answer. So every anchor of a row is drafted in parallel from the recorded taps, and the tree of the largest
budget tells for every budget at once how far the continuation stays inside: the tree of budget b is a prefix
of it, and holds exactly the nodes with an index below b. Then each method hops from anchor to anchor by
num_accepted + 1.

Deep slots are only given logits where they can matter. Once the best path of m depths scores below the last
piece of the true path that is in the tree, no deeper node comes before that piece, and its index is final.

Sampled responses replay, too: their rounds have the distribution of live rounds at that temperature.

Shape legend: T tokens with states, N anchors of a chunk, B block size, M = B - 1 depths, K ranks, D hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .acceptance import CHAIN, DDTREE, Acceptance, RoundLog, summarise
from .drafter import Drafter, KeyValue
from .drafter_config import DrafterConfig
from .masks import BlockLayout
from .shards import Row
from .target_ends import TargetEnds
from .tree import path_indices, top_log_probs

ANCHORS_PER_CHUNK = 32

Method = tuple[str, int]
"""Name and budget: ("chain", B - 1) or ("ddtree", budget)."""


def replay(
    drafter: Drafter,
    ends: TargetEnds,
    rows: Iterable[Row],
    budgets: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
    anchors_per_chunk: int = ANCHORS_PER_CHUNK,
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
        anchors_per_chunk: anchors drafted together; more takes more memory.
        on_row: called after each row, to show progress.
    """
    logs: dict[Method, list[RoundLog]] = {method: [] for method in methods(drafter.config, budgets)}
    for row in rows:
        found = replay_row(
            drafter,
            ends,
            row,
            budgets,
            eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens,
            anchors_per_chunk=anchors_per_chunk,
        )
        for method, responses in found.items():
            logs[method].extend(responses)
        if on_row is not None:
            on_row(row)
    return {method: summarise(logs[method], drafter.config.num_draft_tokens) for method in logs}


@torch.no_grad()
def replay_row(
    drafter: Drafter,
    ends: TargetEnds,
    row: Row,
    budgets: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
    anchors_per_chunk: int = ANCHORS_PER_CHUNK,
) -> dict[Method, list[RoundLog]]:
    """Rounds of the chain and of DDTree at every budget, one log for each response in the row.

    Args: as for ``replay``. The first anchor of a response is its first token.
    """
    if any(budget < 1 for budget in budgets):
        raise ValueError(f"budgets are {list(budgets)}; each must be at least 1")
    tokens = row.token_ids()
    wanted = methods(drafter.config, budgets)
    logs: dict[Method, list[RoundLog]] = {method: [] for method in wanted}
    spans = [_cut(tokens, span, eos_token_ids, max_new_tokens) for span in response_spans(row.token_mask())]
    context = _context(drafter, row) if any(end - first > 1 for first, end in spans) else []
    for first, end in spans:
        reaches: list[_Reach] = []
        for start in range(first, end - 1, anchors_per_chunk):
            anchors = torch.arange(start, min(start + anchors_per_chunk, end - 1))
            hidden = _draft(drafter, ends, tokens, anchors, context)
            truths = [tokens[a + 1 : min(end, a + drafter.config.block_size)].tolist() for a in anchors.tolist()]
            reaches += _reaches(ends, hidden, truths, max(budgets, default=0))
        ended = "eos" if int(tokens[end - 1]) in eos_token_ids else "length"
        for method in wanted:
            logs[method].append(_hop(row.id, [reach.num_accepted(method) for reach in reaches], ended))
    return logs


def methods(config: DrafterConfig, budgets: Sequence[int]) -> list[Method]:
    """What one pass answers: the chain, and DDTree at each budget."""
    return [(CHAIN, config.num_draft_tokens), *((DDTREE, budget) for budget in budgets)]


def response_spans(token_mask: Tensor) -> Iterator[tuple[int, int]]:
    """First token and end (exclusive) of every run of response tokens."""
    flags = torch.cat([torch.zeros(1, dtype=torch.bool), token_mask.cpu(), torch.zeros(1, dtype=torch.bool)])
    edges = (flags[1:] != flags[:-1]).nonzero().flatten().tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


@dataclass(slots=True)
class _Reach:
    """How far the true continuation of one anchor stays inside the chain and inside the trees."""

    truth: list[int]
    """True tokens at depths 1, 2, …; at most M, fewer where the response ends."""
    log_probs: list[list[float]] = field(default_factory=list)
    """K best log-probabilities of each depth looked at so far."""
    ranks: list[int] = field(default_factory=list)
    """Rank of the true token at each depth looked at so far, -1 outside the K best."""
    indices: list[int] = field(default_factory=list)
    """Index of the true path's node at each depth, as far as it is in the largest tree."""

    @property
    def chain(self) -> int:
        """Leading depths at which the drafter's likeliest token is the true one."""
        return next((depth for depth, rank in enumerate(self.ranks) if rank != 0), len(self.ranks))

    def look(self, log_probs: list[list[float]], ranks: list[int], budget: int) -> None:
        """Take in further depths."""
        self.log_probs += log_probs
        self.ranks += ranks[: len(self.truth) - len(self.ranks)]
        if budget and self.ranks and self.ranks[0] >= 0:
            self.indices = path_indices(self.log_probs, self.ranks, budget)

    def is_final(self) -> bool:
        """Whether deeper slots can neither extend the true path nor put a node before one of its own."""
        looked = len(self.log_probs)
        alive = len(self.indices)
        if looked < len(self.truth) and looked in (self.chain, alive):
            return False
        # Sums from the root down in double precision, as the tree builder adds them.
        own, best = 0.0, 0.0
        for depth in range(alive):
            own += self.log_probs[depth][self.ranks[depth]]
        for row in self.log_probs:
            best += row[0]
        return alive == 0 or best < own

    def num_accepted(self, method: Method) -> int:
        """Draft tokens that a round from this anchor accepts."""
        name, budget = method
        return self.chain if name == CHAIN else sum(index < budget for index in self.indices)


def _context(drafter: Drafter, row: Row) -> list[KeyValue]:
    """Context keys and values of the whole row, for every drafter layer."""
    weight = drafter.fc.weight
    features = row.hidden_states[None].to(device=weight.device, dtype=weight.dtype)
    return drafter.context(features, torch.arange(features.shape[1], device=weight.device))


def _draft(drafter: Drafter, ends: TargetEnds, tokens: Tensor, anchors: Tensor, context: list[KeyValue]) -> Tensor:
    """Hidden states (N, M, D) of the masked slots of one block at each anchor."""
    device, block_size = context[0][0].device, drafter.config.block_size
    num_context = int(anchors[-1]) + 1  # keys behind the last anchor are hidden from every block
    block_ids = torch.full((len(anchors), block_size), drafter.config.mask_token_id)
    block_ids[:, 0] = tokens[anchors]
    layout = BlockLayout(
        positions=torch.arange(num_context, device=device),
        documents=torch.zeros(num_context, dtype=torch.long, device=device),
        anchors=anchors.to(device),
        used=torch.ones(len(anchors), dtype=torch.bool, device=device),
        block_size=block_size,
    )
    hidden = drafter.blocks(
        ends.embed(block_ids.to(device).flatten()[None]).to(context[0][0].dtype),
        layout.slot_positions,
        [(keys[:, :, :num_context], values[:, :, :num_context]) for keys, values in context],
        drafter.layer_masks(layout, flex=False),
    )
    return hidden.unflatten(1, (len(anchors), block_size))[0, :, 1:]


def _reaches(ends: TargetEnds, hidden: Tensor, truths: list[list[int]], budget: int) -> list[_Reach]:
    """Follow the true continuation of N anchors through the largest tree, as few depths down as will do."""
    reaches = [_Reach(truth) for truth in truths]
    still_open = list(range(len(reaches)))
    done, num_depths = 0, hidden.shape[1]
    while still_open and done < num_depths:
        upto = min(num_depths, 2 * done + 1)
        logits = ends.logits(hidden[still_open, done:upto])
        log_probs, token_ids = top_log_probs(logits, max(budget, 1))
        ranks = _true_ranks(token_ids, [reaches[i].truth[done:upto] for i in still_open])
        for i, rows, row_ranks in zip(still_open, log_probs.tolist(), ranks, strict=True):
            reaches[i].look(rows, row_ranks, budget)
        still_open = [i for i in still_open if not reaches[i].is_final()]
        done = upto
    return reaches


def _true_ranks(token_ids: Tensor, truths: list[list[int]]) -> list[list[int]]:
    """Rank of each true token among the best ones (N, m, K), -1 where it is not among them."""
    num_depths = token_ids.shape[1]
    padded = torch.tensor([truth + [-1] * (num_depths - len(truth)) for truth in truths])
    hits = token_ids == padded.to(token_ids.device)[..., None]
    return torch.where(hits.any(-1), hits.int().argmax(-1), -1).tolist()


def _hop(prompt_id: str, accepted: list[int], ended: str) -> RoundLog:
    """The rounds of one response; ``accepted`` holds num_accepted for each of its tokens but the last."""
    rounds: list[int] = []
    at, last = 0, len(accepted)
    while at < last:
        rounds.append(accepted[at])
        at += accepted[at] + 1
    # The bonus token of a round that accepts the last token itself would stand behind the response.
    return RoundLog(prompt_id=prompt_id, num_accepted=tuple(rounds), cut=ended if at > last else None)


def _cut(
    tokens: Tensor, span: tuple[int, int], eos_token_ids: Sequence[int], max_new_tokens: int | None
) -> tuple[int, int]:
    """The part of a response that live decoding would say: up to its first EOS, or to the limit."""
    first, end = span
    if max_new_tokens is not None:
        end = min(end, first + max_new_tokens)
    stops = torch.isin(tokens[first:end], torch.tensor(list(eos_token_ids), dtype=tokens.dtype)).nonzero()
    return (first, first + int(stops[0]) + 1) if len(stops) else (first, end)
