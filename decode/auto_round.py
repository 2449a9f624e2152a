"""Rounds of the fused engine whose tree is as large as pays, chosen each round: the budget "auto".

Two graphs and two reads a round. The first drafts, builds the largest tree, and says how many tokens its best 1, 2, 3 …
nodes are expected to give; the host chooses by measured costs (`auto_budget`). The second verifies and commits that many
nodes: a graph for each size of a ladder, since a graph's shapes are fixed. The best n nodes of a tree are the tree of n.

Shape legend: R rows of the largest tree (root + nodes, padded).
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .auto_budget import AutoBudget, CostTable, ladder, measure_costs
from .device_tree import TreeBuffers, TreeBuilder
from .fused_drafter import FusedDrafter
from .fused_round import Drafted, FusedRound, RoundGraphs, untouched
from .fused_target import FusedTarget, padded_rows
from .sampling import Sampling

SMALL_ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Anchor and nodes of the small trees that are measured: rows come in eights there."""


class AutoRound:
    """Used as ``FusedRound`` is.

    Args:
        cap: largest tree.
        sampling: how the target's token behind a row is chosen.
        choices: measures costs and chooses by them.
        now_s: clock; it must wait for the device.
    """

    def __init__(
        self,
        target: FusedTarget,
        drafter: FusedDrafter,
        cap: int,
        sampling: Sampling,
        choices: AutoBudget,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target, self.drafter, self.cap, self.sampling = target, drafter, cap, sampling
        self.choices, self._now_s = choices, now_s
        self.anchor = torch.zeros(1, dtype=torch.long, device=target.device)
        self.largest = TreeBuffers.allocate(padded_rows(cap + 1), target.device)
        self.builder = TreeBuilder(drafter.config.num_draft_tokens, target.head.shape[0], cap, self.largest)
        self._rows = torch.arange(self.largest.num_rows, device=target.device)
        self._expected = torch.zeros(self.largest.num_rows + 1, dtype=torch.float64, device=target.device)
        """Number of nodes, then the tokens of a round that verifies the first 0, 1, 2 … of them."""
        self._drafting = RoundGraphs(target, self._draft, self.anchor)
        self._rounds: dict[int, FusedRound] = {}
        self._held = 0

    @torch.no_grad()
    def resume_at(self, num_tokens: int, anchor: Tensor) -> None:
        """Go back to a prefilled prompt, as ``FusedRound.resume_at``; measures costs where the context is of a new size."""
        self.target.rewind(num_tokens)
        self.anchor.copy_(anchor)
        self._held = num_tokens
        self.choices.prepare((self.sampling, self.cap), num_tokens, self._measure)

    @torch.no_grad()
    def advance(self) -> list[int]:
        """One round: the accepted tokens and the bonus token. Captures of graphs stay out of what rounds cost."""
        self._drafting.capture(self._held)
        start_s = time.perf_counter()
        self._drafting.launch(self._held)
        told = self._expected.cpu().numpy()
        num_nodes = self.choices.choose(told[1 : int(told[0]) + 2])
        chosen_s = time.perf_counter()
        round_ = self._round(num_nodes)
        round_.make_ready()
        begun_s = time.perf_counter()
        said = round_.advance()
        self.choices.observe(num_nodes, chosen_s - start_s, time.perf_counter() - begun_s)
        self._held += len(said)
        return said

    def _draft(self) -> None:
        self.drafter.anchor.copy_(self.anchor)
        self.drafter.draft()
        self.builder.build(self.drafter.logits[1:])
        count = self.largest.num_nodes
        is_node = (self._rows >= 1) & (self._rows <= count)
        gains = torch.where(is_node, self.builder.log_probs.exp(), 0.0)
        self._expected[:1].copy_(count)
        torch.cumsum(gains, 0, out=self._expected[1:])
        self._expected[1:] += 1

    def _round(self, num_nodes: int) -> FusedRound:
        """Verification and commit of so many nodes, ready to go on from here."""
        if num_nodes not in self._rounds:
            drafted = Drafted(self.largest, self.anchor)
            self._rounds[num_nodes] = FusedRound(self.target, self.drafter, num_nodes, self.sampling, drafted)
        self._rounds[num_nodes].held = self._held
        return self._rounds[num_nodes]

    def _measure(self) -> CostTable:
        """Time drafts and verifications behind the committed tokens; nothing is committed."""

        def draft() -> None:
            self._drafting.launch(self._held)

        def verify(size: int) -> None:
            self._round(size).advance()
            self.target.length.fill_(self._held)

        def make_ready(largest: int) -> None:
            for size in sizes:
                if size <= largest:
                    self._round(size).make_ready()

        sizes = ladder(self.cap, SMALL_ROWS)
        with untouched(self.target, self.anchor):
            self._drafting.capture(self._held)
            return measure_costs(
                draft,
                verify,
                most_tokens=self.drafter.config.block_size,
                context_tokens=self._held,
                sizes=sizes,
                make_ready=make_ready,
                now_s=self._now_s,
            )
