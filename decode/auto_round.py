"""Rounds of the fused engine whose tree is as large as pays, chosen each round: the budget "auto".

Two graphs and two reads a round, or three. The first drafts, builds a tree, and says how many tokens its best 1, 2, 3 …
nodes are expected to give; the host chooses by measured costs (`auto_budget`), and has a larger tree built where that could
be worth more than it takes. The last verifies and commits the chosen nodes: a graph for each size of a ladder, since a
graph's shapes are fixed. The best n nodes of a tree are the tree of n.

Shape legend: R rows of the largest tree (root + nodes, padded).
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from .auto_budget import Array, AutoBudget, CostTable, ladder, measure_costs
from .cuda_graphs import shared_pool
from .device_tree import TreeBuffers, TreeBuilder
from .fused_drafter import FusedDrafter
from .fused_round import Drafted, FusedRound, RoundGraphs, untouched
from .fused_target import LONG_CONTEXT_TOKENS, FusedTarget, padded_rows
from .sampling import Sampling

ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Anchor and nodes of the small trees that are measured: the buckets of `padded_rows`, ever wider apart."""
FIRST_NODES = 127
"""Of the tree that every round builds: one of 1,024 takes up to five times as long."""


class AutoRound:
    """Rounds of one prompt at a time: ``resume_at``, ``make_ready`` and ``advance`` are those of ``FusedRound``.

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
        now_s: Callable[[], float],
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.choices, self._now_s = choices, now_s
        self.sizes = ladder(cap, ROWS)
        if len(self.sizes) > 2 and self.sizes[-1] == self.sizes[-2] + 1:
            self.sizes.pop()  # a power of two: one node more would take eight more rows
        num_rows, device = padded_rows(self.sizes[-1] + 1), target.device
        self.anchor = torch.zeros(1, dtype=torch.long, device=device)
        self.tree = TreeBuffers.allocate(num_rows, device)
        self._rows = torch.arange(num_rows, device=device)
        self._expected = torch.zeros(num_rows + 1, dtype=torch.float64, device=device)
        """Number of nodes, then the tokens of a round that verifies the first 0, 1, 2 … of them."""
        self._builders = [
            TreeBuilder(drafter.config.num_draft_tokens, target.head.shape[0], size, self.tree, is_scored=True)
            for size in sorted({min(self.sizes[-1], FIRST_NODES), self.sizes[-1]})
        ]
        self._pool = shared_pool(device)
        self._drafting = RoundGraphs(target, self._draft, self.anchor, pool=self._pool)
        self._growing = RoundGraphs(target, self._grow, self.anchor, by_context=False, pool=self._pool)
        self._rounds: dict[int, FusedRound] = {}
        self._grow_s = 0.0
        """Seconds of building the larger tree."""
        self._held = 0

    @torch.no_grad()
    def resume_at(self, num_tokens: int, anchor: Tensor) -> None:
        """Go back to a prefilled prompt; costs are measured where the context is of a new size."""
        self.target.rewind(num_tokens)
        self.anchor.copy_(anchor)
        self._held = num_tokens
        kind = self.sampling, self.sizes[-1], num_tokens > LONG_CONTEXT_TOKENS
        self.choices.prepare(kind, num_tokens, self._measure)

    @torch.no_grad()
    def make_ready(self, held: int) -> None:
        """Capture the graphs of a round behind ``held`` tokens, unless they are there."""
        self._drafting.capture(held)
        if self._may_grow():
            self._growing.capture(held)
        for size in self.choices.sizes():
            self._round(int(size)).make_ready(held)

    @torch.no_grad()
    def advance(self, *, ahead: bool = False) -> list[int]:
        """One round: the accepted tokens and the bonus token. None starts ``ahead``, since the host chooses each one's size."""
        start_s = self._now_s()
        self._drafting.launch(self._held)
        expected = self._read_expected()
        num_nodes, could_grow = self.choices.choose(expected, self._grow_s)
        fixed_s = self._now_s() - start_s  # what every size takes
        if could_grow and self._may_grow() and len(expected) > self._builders[0].budget:
            self._growing.launch(self._held)
            num_nodes, _ = self.choices.choose(self._read_expected())
        chosen_s = self._now_s()
        said = self._round(num_nodes).advance()
        self.choices.observe(num_nodes, fixed_s, self._now_s() - chosen_s)
        self._held += len(said)
        return said

    def _may_grow(self) -> bool:
        return len(self._builders) > 1 and self.choices.sizes()[-1] > self._builders[0].budget

    def _draft(self) -> None:
        self.drafter.anchor.copy_(self.anchor)
        self.drafter.draft()
        self._build(self._builders[0])

    def _grow(self) -> None:
        self._build(self._builders[-1])

    def _build(self, builder: TreeBuilder) -> None:
        builder.build(self.drafter.draft_logits)
        count = self.tree.num_nodes
        is_node = (self._rows >= 1) & (self._rows <= count)
        gains = torch.where(is_node, builder.path_log_probs.exp(), 0.0)
        self._expected[:1].copy_(count)
        torch.cumsum(gains, 0, out=self._expected[1:])
        self._expected[1:] += 1

    def _read_expected(self) -> Array:
        """(n + 1,) expected tokens of the tree that was built last; waits for it."""
        told: Array = self._expected.cpu().numpy()
        return told[1 : int(told[0]) + 2]

    def _round(self, num_nodes: int) -> FusedRound:
        """Verification and commit of so many nodes, which goes on from here."""
        if num_nodes not in self._rounds:
            drafted = Drafted(self.tree, self.anchor)
            self._rounds[num_nodes] = FusedRound(
                self.target, self.drafter, num_nodes, self.sampling, drafted, pool=self._pool
            )
        self._rounds[num_nodes].held = self._held
        return self._rounds[num_nodes]

    def _measure(self) -> CostTable:
        """Time drafts and verifications behind the committed tokens; nothing is committed."""
        seen, grow_s = set[int](), list[float]()

        def draft() -> None:
            self._drafting.launch(self._held)

        def verify(size: int) -> None:
            self._round(size).advance()
            self.target.length.fill_(self._held)

        def prepare(size: int) -> None:
            if size > self._builders[0].budget:
                start_s = self._now_s()
                self._growing.launch(self._held)
                self._read_expected()
                grow_s.append(self._now_s() - start_s)
            if size not in seen:
                seen.add(size)
                verify(size)  # a graph is captured then, and its first replay is slower

        with untouched(self.target, self.anchor):
            draft()
            table = measure_costs(
                draft,
                verify,
                prepare=prepare,
                most_tokens=self.drafter.config.block_size,
                context_tokens=self._held,
                sizes=self.sizes,
                now_s=self._now_s,
            )
        self._grow_s = min(grow_s, default=0.0)
        for size in seen - set(table.nodes):
            del self._rounds[size]  # it cannot pay
        gc.collect()  # a round refers to itself, and holds its graph's memory until then
        return table
