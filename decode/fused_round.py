"""Whole rounds as one CUDA graph each: draft, build, verify, walk, commit, extend; the host reads one small buffer.

A round leaves the state as the next one needs it: target and drafter caches hold every token before the anchor, the
anchor's token stands in the drafter's slots and in the tree's root row, ``length`` is the anchor's position.

A round may be one of several prompts, each with its own anchor, tree and length; `fused_batch` has them.

Shape legend: N prompts, B block size, R rows of a prompt, P walk length, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_kit.errors import KitError

from .cuda_graphs import capture
from .device_tree import PREORDER_ROWS, TreeBuffers, TreeBuilder, WalkBuffers, walk
from .fused_drafter import FusedDrafter
from .fused_target import LONG_CONTEXT_TOKENS, FusedTarget, padded_rows
from .row_sampler import RowSampler
from .sampling import GREEDY, Sampling


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the rounds of several prompts stand, whatever their number and method.

    Attributes:
        anchors: (N,) int64, written and read by every round.
        active: (N,) int32; where it is 0 a round is for nothing, and ``length`` stays.
    """

    anchors: Tensor
    active: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """What somebody else drafts for a round of one prompt.

    Attributes:
        tree: in buffers of at least as many rows as the round's.
        anchor: (1,) int64 that it stands on; the round puts the next one there.
    """

    tree: TreeBuffers
    anchor: Tensor


class FusedRound:
    """Rounds of one method: autoregressive (budget 0, no drafter needed), chain, or a tree of ``budget`` nodes.

    Args:
        budget: nodes of a tree; 0 decodes token by token; None drafts the chain.
        sampling: how the target's token behind a row is chosen; drawn by the device's default generator above temperature 0.
        drafted: the round takes the best ``budget`` nodes of this tree, and drafts none itself.
        lanes: of the prompts of ``target``, where there may be several.
        pool: memory that its graphs share with those of others, of `cuda_graphs.shared_pool`.
    """

    def __init__(
        self,
        target: FusedTarget,
        drafter: FusedDrafter | None,
        budget: int | None,
        sampling: Sampling = GREEDY,
        drafted: Drafted | None = None,
        lanes: Lanes | None = None,
        pool: Any = None,
    ) -> None:
        assert lanes is not None or target.num_prompts == 1, "several prompts need lanes"
        if budget != 0 and drafter is None:
            raise KitError(f"a round with budget {budget} needs a drafter; only budget 0 decodes without one")
        self.target, self.drafter, self.budget, self.drafted = target, drafter, budget, drafted
        self.depth = drafter.config.num_draft_tokens if drafter is not None and budget != 0 else 0
        nodes = self.depth if budget is None else budget
        self.step = target.new_pass(padded_rows(nodes + 1))
        self.tree = self.step.tree
        self.sampler = None if sampling.is_greedy else RowSampler(sampling, self.step.logits)
        self.walked = WalkBuffers.allocate(self.depth, target.device, target.num_prompts)
        self.anchor = drafted.anchor if drafted else torch.zeros(1, dtype=torch.long, device=target.device)
        self._active: Tensor | None = None
        if lanes is not None:
            self.anchor, self._active = lanes.anchors, lanes.active
        self._first_rows = self.tree.num_rows * torch.arange(target.num_prompts, device=target.device)[:, None]
        self.builder: TreeBuilder | None = None
        if self.depth and drafted is None:
            if target.gains_by_preorder and self.tree.num_rows > PREORDER_ROWS and budget is not None:
                self.tree.number_in_preorder()
            self.builder = TreeBuilder(self.depth, target.head.shape[0], max(nodes, 1), self.tree)
        if budget is None:
            self.tree.set_chain()
        by_context = target.splits_by_context or self.builder is not None
        self._graphs = RoundGraphs(target, self._work, self.anchor, by_context=by_context, pool=pool)
        self._unread: deque[Telling] = deque()
        self.held = 0
        """Committed tokens, as the host counts them: those of rounds that it has read."""

    @torch.no_grad()
    def start(self, input_ids: Tensor) -> int:
        """Prefill target and drafter with a prompt (T,); returns the first token, which is the first anchor."""
        extend = None
        if self.drafter is not None:
            drafter = self.drafter

            def extend(taps: Tensor, _start: int) -> None:
                drafter.extend(taps)

        _, choice = self.target.prefill(input_ids, extend)
        self.anchor.copy_(choice)
        self.held = input_ids.numel()
        self._unread.clear()
        return int(choice)

    @torch.no_grad()
    def resume_at(self, num_tokens: int, anchor: Tensor) -> None:
        """Go back to a prefilled prompt of ``num_tokens``, whatever was decoded since: nothing before them has changed.

        Args:
            num_tokens: tokens that are committed, in the target's and the drafter's caches.
            anchor: (1,) int64, the token behind them.
        """
        self.target.rewind(num_tokens)
        self.anchor.copy_(anchor)
        self.held = num_tokens
        self._unread.clear()

    @torch.no_grad()
    def advance(self, *, ahead: bool = False) -> list[int]:
        """One round: the accepted tokens and the bonus token. The only host synchronisation is reading them.

        Args:
            ahead: start the next round before this one is read, so that the device does not wait for the host; the next
                call reads it. Where the response has ended meanwhile it is for nothing, and ``resume_at`` forgets it.
        """
        while len(self._unread) < 1 + ahead:
            self.launch()
            self._unread.append(Telling(self.walked.told))
        said = self._unread.popleft().read()[0]
        self.held += said[0] + 1
        return said[1 : said[0] + 2]

    @torch.no_grad()
    def launch(self) -> None:
        """One round without reading its result."""
        self._graphs.launch(self.held)

    @torch.no_grad()
    def make_ready(self, held: int) -> None:
        """Capture the graph of a round behind ``held`` tokens, unless it is there."""
        self._graphs.capture(held)

    def _work(self) -> None:
        for stage in self.stages().values():
            stage()

    def stages(self) -> dict[str, Callable[[], None]]:
        """The parts of a round, in order, by name; the benchmark times them one by one."""
        parts: dict[str, Callable[[], None]] = {}
        if self.drafted is not None:
            parts["take"] = self._take
        elif self.depth:
            parts["draft"] = self._draft
            parts["build"] = self._build
        parts["verify"] = self._verify
        parts["commit"] = self._commit
        return parts

    def _draft(self) -> None:
        assert self.drafter is not None
        self.drafter.anchor.copy_(self.anchor)
        self.drafter.draft()

    def _build(self) -> None:
        assert self.drafter is not None and self.builder is not None
        logits = self.drafter.draft_logits
        if self.budget is None:
            self.builder.build_chain(logits)
        else:
            self.builder.build(logits)

    def _take(self) -> None:
        assert self.drafted is not None and self.budget is not None
        self.tree.take_best(self.drafted.tree, self.budget)

    def _verify(self) -> None:
        self.tree.node_tokens[:, 0].copy_(self.anchor)
        self.target.run(self.step)
        if self.sampler is not None:
            self.sampler.draw(self.step.logits, self.step.choices)

    def _commit(self) -> None:
        walk(self.tree, self.step.choices, self.walked, self.anchor, self.depth)
        self.target.keep(self.step, self.walked.path, self.walked.num_accepted)
        if self.drafter is not None:
            count = self.drafter.config.block_size if self.depth else 1
            self.drafter.extend(self.step.taps.index_select(0, self._path_rows(count)))
        moved = self.walked.num_accepted + 1
        self.target.length += moved if self._active is None else moved * self._active

    def _path_rows(self, count: int) -> Tensor:
        """(N * count,) int64 rows of the pass: the first ``count`` of each prompt's path."""
        path = self.walked.path.view(self.target.num_prompts, -1)[:, :count].long()
        return path[0] if len(path) == 1 else (path + self._first_rows).flatten()


class Telling:
    """A copy of a small matrix on its way to the host: it is that of now, whatever overwrites the tensor later."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if not tensor.is_cuda:
            self._copy = tensor.clone()
            return
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[list[int]]:
        """The numbers, once they have come."""
        if self._event is not None:
            self._event.synchronize()
        told: list[list[int]] = self._copy.tolist()
        return told


class RoundGraphs:
    """Work of a round: on a GPU one CUDA graph for short contexts and one for long ones, each captured when first needed.

    Args:
        work: repeatable but for ``target.carried()`` and ``anchor``.
        anchor: (N,) int64.
        by_context: whether it differs between short and long contexts.
        pool: see ``FusedRound``.
    """

    def __init__(
        self,
        target: FusedTarget,
        work: Callable[[], None],
        anchor: Tensor,
        *,
        by_context: bool = True,
        pool: Any = None,
    ) -> None:
        self._target, self._work, self._anchor = target, work, anchor
        self._by_context, self._pool = by_context, pool
        self._graphs: dict[bool, Any] = {}

    def launch(self, held: int) -> None:
        """Do the work behind ``held`` committed tokens."""
        if not self._target.embedding.is_cuda:
            self._work()
            return
        self.capture(held)
        self._graphs[self._is_long(held)].replay()

    def capture(self, held: int) -> None:
        """Capture the graph for so many committed tokens, unless it is there; nothing on a CPU."""
        is_long = self._is_long(held)
        if self._target.embedding.is_cuda and is_long not in self._graphs:
            before, self._target.long_context = self._target.long_context, is_long
            with untouched(self._target, self._anchor):
                self._graphs[is_long] = capture(self._work, self._pool)
            self._target.long_context = before  # passes without a graph read it

    def _is_long(self, held: int) -> bool:
        return self._by_context and held > LONG_CONTEXT_TOKENS


@contextmanager
def untouched(target: FusedTarget, anchor: Tensor) -> Iterator[None]:
    """Rounds inside leave no trace: state, anchor and random numbers go on from where they were.

    Cache slots behind the committed tokens do change; every round writes them before it reads them.
    """
    held = [(tensor, tensor.clone()) for tensor in (*target.carried(), anchor)]
    on_gpu = target.embedding.is_cuda
    numbers = torch.cuda.get_rng_state(target.device) if on_gpu else torch.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.set_rng_state(numbers, target.device) if on_gpu else torch.set_rng_state(numbers)
        for tensor, before in held:
            tensor.copy_(before)


def decode_greedy(
    round_: FusedRound, input_ids: Tensor, max_new_tokens: int, eos_token_ids: tuple[int, ...]
) -> list[int]:
    """Greedy continuation of a prompt, cut behind the first EOS or at ``max_new_tokens``."""
    said = [round_.start(input_ids)]
    while len(said) < max_new_tokens and not any(token in eos_token_ids for token in said):
        said += round_.advance()
    said = said[:max_new_tokens]
    ends = [i for i, token in enumerate(said) if token in eos_token_ids]
    return said[: ends[0] + 1] if ends else said
