"""What drafting can reach on recorded answers when the target's own distributions are known: oracle and bound.

*Oracle chain.* Each slot drafts the target's likeliest token given the true prefix; a round accepts until the first token that is
not the likeliest. Greedy answers are always the likeliest tokens, so at temperature 0 every round accepts a whole block and the
acceptance length is the block size: only sampled answers have a ceiling of their own.

*Bound of trees.* The tree of b nodes that accepts most in expectation holds the b likeliest paths under the target's joint
distribution of the next tokens. It cannot be listed (that needs the target behind every node), but the conditionals along the recorded
answer tell nodes that stand before the answer's own: at each depth k up to d, every token whose path is likelier than the
answer's first d tokens. If these and the answer's own d nodes are more than b, the tree cannot hold the answer to depth d. Paths that
have left the answer earlier are not counted, so the real tree may hold less: this is an upper bound for each round. It is one for
whole answers, too: where a round from an anchor ends at most does not decrease with the anchor, so by induction the bound is never
behind after n rounds. It bounds the tree that is best round by round; a drafter that knows the sample beforehand is no drafter.

Shape legend: L answer tokens, M = B - 1 depths, K kept ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_kit.acceptance import RoundLog, summarise
from dflash_kit.replay import response_spans
from dflash_kit.shards import Row
from dflash_kit.target_ends import TargetEnds

CHUNK_TOKENS = 128
RANK_STEPS = (1, 2, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One answer."""

    top_1: list[int]
    """Accepted by each round of the oracle chain."""
    bounds: dict[str, list[int]]
    """Accepted at most by each round of the best tree, by budget."""
    ranks_below: dict[str, int]
    """Tokens of the answer among the target's 1, 2, 4, … likeliest."""
    num_tokens: int
    surprise: float
    """Sum of -log p over the answer's tokens, nats."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ceiling:
        return cls(**values)

    @staticmethod
    def sum_up(ceilings: Sequence[Ceiling], prompt_ids: Sequence[str], num_draft_tokens: int) -> dict[str, Any]:
        """Acceptance of oracle and bounds over many answers, and the shares of ranks."""

        def acceptance(rounds: list[list[int]]) -> dict[str, Any]:
            logs = [RoundLog(prompt_id=i, num_accepted=tuple(r)) for i, r in zip(prompt_ids, rounds, strict=True)]
            # What ended a round is not kept here, so new tokens (one more for each cut round) would be off.
            return {k: v for k, v in summarise(logs, num_draft_tokens).to_dict().items() if k != "new_tokens"}

        num_tokens = sum(c.num_tokens for c in ceilings)
        shares = {k: sum(c.ranks_below[k] for c in ceilings) / num_tokens for k in ceilings[0].ranks_below}
        return {
            "oracle chain": acceptance([c.top_1 for c in ceilings]),
            **{f"bound of DDTree-{b}": acceptance([c.bounds[b] for c in ceilings]) for b in ceilings[0].bounds},
            "answers": {
                "tokens": num_tokens,
                "top_1_agreement": round(shares["1"], 4),
                "share_of_tokens_among_the_likeliest": {k: round(v, 4) for k, v in shares.items()},
                "nats_per_token": round(sum(c.surprise for c in ceilings) / num_tokens, 4),
            },
        }


class Oracle:
    """Looks at recorded answers with the target's distributions.

    Args:
        ends: the target's head and final norm.
        temperature: that the answers were sampled at; 0 is looked at as 1 (ranks are the same).
        num_draft_tokens: depths of a round.
        budgets: of the bounds.
    """

    def __init__(self, ends: TargetEnds, temperature: float, num_draft_tokens: int, budgets: Sequence[int]) -> None:
        self.ends, self.temperature, self.num_draft_tokens = ends, temperature or 1.0, num_draft_tokens
        self.budgets = list(budgets)

    @torch.no_grad()
    def look(self, row: Row) -> Ceiling:
        """Oracle and bounds on the first answer of a row, whose last hidden states are stored."""
        first, end = next(iter(response_spans(row.token_mask())))
        said = row.token_ids()[first:end].long()
        assert row.last_hidden is not None, "extract with --last_hidden true"
        ranks, own, top = self._distributions(row.last_hidden[first - 1 : end - 1], said)
        # Round by round, anchors are answer tokens: token 0 comes from the prefill.
        run = [self._run(ranks[a + 1 : a + 1 + self.num_draft_tokens]) for a in range(len(said) - 1)]
        top_1 = hops(run)
        bounds = {}
        if self.budgets:
            least = least_counts(own, top, self.num_draft_tokens)
            for budget in self.budgets:
                bounds[str(budget)] = hops((least <= budget).sum(1).tolist())
        below = {str(step): int((ranks < step).sum()) for step in RANK_STEPS}
        return Ceiling(top_1, bounds, below, len(said), -float(own.sum()))

    @staticmethod
    def _run(ranks: Tensor) -> int:
        return int((ranks == 0).cumprod(0).sum())

    def _distributions(self, hidden: Tensor, said: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ranks (L,) and log-probabilities (L,) of what was said, and the K best log-probabilities (L, K)."""
        assert self.ends.final_norm is not None
        device, dtype, found = self.ends.head.device, self.ends.head.dtype, []
        num_kept = max(self.budgets, default=1) + 1
        for start in range(0, len(said), CHUNK_TOKENS):
            part = said[start : start + CHUNK_TOKENS].to(device)[:, None]
            states = hidden[start : start + CHUNK_TOKENS].to(device=device, dtype=dtype)
            log_probs = (self.ends.logits(self.ends.final_norm(states)).float() / self.temperature).log_softmax(-1)
            own = log_probs.gather(-1, part)
            ranks = (log_probs > own).sum(-1)
            top = log_probs.topk(min(num_kept, log_probs.shape[-1]), dim=-1).values
            found.append((ranks.cpu(), own[:, 0].double().cpu(), top.double().cpu()))
        ranks, own, top = (torch.cat(parts) for parts in zip(*found, strict=True))
        return ranks, own, top


def least_counts(own: Tensor, top: Tensor, num_depths: int) -> Tensor:
    """Nodes that stand at least in front of the answer's piece of depth d behind each anchor, that piece included.

    Args:
        own: (L,) log-probability of each answer token given those before.
        top: (L, K) best log-probabilities there, descending; more than K - 1 likelier tokens count as K.
        num_depths: M.

    Returns:
        (L - 1, M) int64, growing with depth; a huge number where the answer has ended.
    """
    num_tokens, huge = len(own), torch.iinfo(torch.int64).max
    sums = torch.cat([own.new_zeros(1), own.cumsum(0)])
    counts = torch.full((num_tokens - 1, num_depths), huge)
    for depth in range(1, min(num_depths, num_tokens - 1) + 1):
        anchors = torch.arange(num_tokens - depth)
        total = torch.zeros(len(anchors), dtype=torch.long)
        for k in range(1, depth + 1):
            tokens = anchors + k
            # log p of the answer from depth k to this one: what a sibling at depth k must exceed.
            least = own[tokens] if k == depth else sums[anchors + depth + 1] - sums[tokens]
            total += (top[tokens] > least[:, None] + (0.0 if k == depth else 1e-9)).sum(1)
            # The answer's own node at depth k is likelier than the piece, and so counted, but for the piece itself.
            total += k == depth
        counts[: len(anchors), depth - 1] = total
    return counts


def hops(accepted: Sequence[int]) -> list[int]:
    """The rounds of one answer; ``accepted`` of each token but the last."""
    at, rounds = 0, []
    while at < len(accepted):
        rounds.append(accepted[at])
        at += accepted[at] + 1
    return rounds
