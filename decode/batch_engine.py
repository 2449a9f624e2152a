"""Decoding of several responses at once: one draft, one verification and one commit a round for all of them.

Each response gets the tokens and rounds that it would get alone, up to the rounding of sums of other shapes: its tree, its
walk and its random stream are its own. A response that ends makes room for the next that waits; when none waits, the
batch shrinks. Prompts are prefilled one at a time, by the engine for one prompt.
"""

from collections import deque
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from dflash_kit.drafter import Drafter
from dflash_kit.target_ends import TargetEnds

from .batch_drafter import BatchDrafter
from .batch_response import BatchResponse, Request
from .batch_target import BatchTarget
from .engine import STAGES, Engine, Generation, Method, StageClock
from .forest import build_trees
from .sampling import GREEDY, Sampling, choose_tokens
from .target_runner import TargetRunner
from .walk import walk


class BatchEngine:
    """Decodes up to ``batch_size`` responses at a time.

    Args:
        target: the frozen target behind its runner.
        drafter: None for autoregressive decoding only.
        ends: the target's embedding and head; needed with a drafter.
        eos_token_ids: tokens that end a response.
        max_context: tokens of prompt and response together, at most.
        batch_size: responses at once, at most.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        ends: TargetEnds | None,
        *,
        eos_token_ids: Collection[int],
        max_context: int,
        batch_size: int,
    ) -> None:
        self.batch_size, self.eos_token_ids = batch_size, frozenset(eos_token_ids)
        # Prefills prompts; using it leaves what is being decoded as it is.
        self.single = Engine(target, drafter, ends, eos_token_ids=eos_token_ids, max_context=max_context)
        self.target = BatchTarget(target, batch_size)
        self._drafter: BatchDrafter | None = None
        if drafter is not None:
            assert ends is not None
            self._drafter = BatchDrafter(drafter, ends, batch_size)

    def decode(
        self, waiting: deque[Request], method: Method, sampling: Sampling = GREEDY
    ) -> Iterator[tuple[Request, Generation]]:
        """Decode everything that waits by one method, and hand out each response as it ends.

        Args:
            waiting: requests in their order; taken off as slots become free. More may be added meanwhile, at either end.
            method: how to draft.
            sampling: how the target's tokens are drawn.

        Raises:
            KitError: as ``Engine.prefill`` does.
        """
        self._clear()
        active: list[BatchResponse] = []
        while waiting or active:
            while waiting and len(active) < self.batch_size:
                response = self._admit(waiting.popleft(), method, sampling)
                if response.has_ended(self.eos_token_ids):
                    self._release(len(active), method)
                    yield response.request, response.generation(STAGES)
                else:
                    active.append(response)
            if not active:
                continue
            self._round(active, method, sampling)
            for slot in reversed(range(len(active))):
                if active[slot].has_ended(self.eos_token_ids):
                    response, last = active[slot], active.pop()
                    if last is not response:
                        active[slot] = last
                    self._release(slot, method)
                    yield response.request, response.generation(STAGES)

    def _admit(self, request: Request, method: Method, sampling: Sampling) -> BatchResponse:
        """Prefill a prompt into the next slot and choose the first token."""
        num_tokens = len(request.prompt_ids)
        prefix = self.single.prefill(request.prompt_ids, 1, 0, request.name)
        limit = min(request.max_new_tokens, self.single.max_context - num_tokens)
        capacity = num_tokens + limit + method.budget + 1
        self.target.admit(capacity)
        if method.budget:
            assert self._drafter is not None and self.single.draft_cache is not None
            self._drafter.admit(self.single.draft_cache, capacity)
        return BatchResponse(request, limit, choose_tokens(prefix.logits[None], sampling, request.generator))

    def _clear(self) -> None:
        """Free what a run that was broken off has left."""
        for part in (self.target, self._drafter):
            while part is not None and part.lengths:
                part.release(len(part.lengths) - 1)

    def _release(self, slot: int, method: Method) -> None:
        self.target.release(slot)
        if method.budget:
            assert self._drafter is not None
            self._drafter.release(slot)

    @torch.no_grad()
    def _round(self, active: list[BatchResponse], method: Method, sampling: Sampling) -> None:
        now_s = self.single.now_s
        clock, start_s = StageClock(now_s), now_s()
        anchors = [response.tokens[-1] for response in active]
        with clock("draft"):
            draft_logits = self._draft(anchors) if method.budget else None
        with clock("build"):
            trees = build_trees(draft_logits, method, len(active))
        with clock("verify"):
            logits = self.target.verify(anchors, trees)
        with clock("walk"):
            chosen = self._choose(logits, [1 + len(tree) for tree in trees], active, sampling)
            walks = [
                walk(tree, said, eos_token_ids=self.eos_token_ids, limit=response.max_new_tokens - len(response.tokens))
                for tree, said, response in zip(trees, chosen, active, strict=True)
            ]
        with clock("commit"):
            taps = self.target.commit([done.rows for done in walks])
            if method.budget:
                assert self._drafter is not None
                assert taps is not None, "the target runner was built without the drafter's tap layers"
                self._drafter.extend(taps, [len(done.rows) for done in walks])
        round_s = now_s() - start_s
        for response, done in zip(active, walks, strict=True):
            response.add(done.tokens, done.num_accepted, done.cut)
            response.charge(round_s, clock.seconds, len(active))

    def _draft(self, anchors: list[int]) -> Tensor:
        """Draft logits (A, M, V) behind the committed tokens of each response."""
        assert self._drafter is not None
        assert self._drafter.lengths == self.target.lengths
        return self._drafter.draft(anchors)

    @staticmethod
    def _choose(
        logits: Tensor, num_rows: list[int], active: list[BatchResponse], sampling: Sampling
    ) -> list[list[int]]:
        """The target's token behind every row of each tree, drawn from the response's own stream."""
        if sampling.is_greedy:
            return [row[:count] for row, count in zip(logits.argmax(dim=-1).tolist(), num_rows, strict=True)]
        return [
            choose_tokens(row[:count], sampling, response.request.generator)
            for row, count, response in zip(logits, num_rows, active, strict=True)
        ]
