"""The decoding loop. Autoregressive, chain and DDTree decoding are the same loop over different trees.

A round: draft one block, build a tree of its tokens, let the target verify the tree in one pass, walk down
while the target agrees, commit the path. The empty tree makes it autoregressive decoding, a tree without
branches the chain.

On a CPU everything runs in float32: there bfloat16 products are many times slower, and only in float32 is
decoding token for token the same whatever the tree.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kit.acceptance import CHAIN, DDTREE_AUTO, RoundLog
from dflash_kit.drafter import DraftCache, Drafter
from dflash_kit.errors import KitError
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import Tree, build_tree, chain_tree, empty_tree

from .auto_budget import AutoBudget, CostTable, ladder, measure_costs
from .float32_pass import PlainLogits, plain_logits
from .sampling import GREEDY, Sampling, choose_tokens
from .target_runner import TargetRunner
from .walk import Walk, walk

STAGES = ("draft", "build", "verify", "walk", "commit")
ROW_STAGES = ("verify", "walk")
"""Stages that grow with the tree; the others take as long whatever it is."""


@dataclass(frozen=True, slots=True)
class Method:
    """How to draft: "ar" with budget 0, "chain" with budget B - 1, "ddtree" with any budget, or "ddtree-auto" up to one."""

    name: str
    budget: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefilled prompt, from which any method can decode until the next prefill."""

    num_tokens: int
    max_new_tokens: int
    """What was asked for, or what is left of the context."""
    logits: Tensor
    """(V,) behind the last token."""
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One response: its tokens (EOS included) and how its rounds went."""

    token_ids: list[int]
    log: RoundLog


class Engine:
    """Decodes one prompt at a time.

    Args:
        target: the frozen target behind its runner.
        drafter: None for autoregressive decoding only.
        ends: the target's embedding and head; needed with a drafter.
        eos_token_ids: tokens that end a response.
        max_context: tokens of prompt and response together, at most.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        ends: TargetEnds | None,
        *,
        eos_token_ids: Collection[int],
        max_context: int,
    ) -> None:
        self.target, self.drafter, self.ends = target, drafter, ends
        self.eos_token_ids, self.max_context = frozenset(eos_token_ids), max_context
        self._draft_cache: DraftCache | None = None
        self._prefix: Prefix | None = None
        self.auto_budget = AutoBudget()

    def prefill(self, prompt_ids: list[int], max_new_tokens: int, max_budget: int, prompt_id: str = "") -> Prefix:
        """Run the target and the drafter's context pass over a prompt.

        Args:
            prompt_ids: the whole prompt, template included.
            max_new_tokens: tokens to decode at most; cut to what the context has left.
            max_budget: largest tree that will be verified.
            prompt_id: for the message.

        Raises:
            KitError: the prompt fills the context, or the target's logits behind it are not finite.
        """
        num_tokens = len(prompt_ids)
        require_context(num_tokens, self.max_context, prompt_id)
        max_new_tokens = min(max_new_tokens, self.max_context - num_tokens)
        start_s = self.now_s()
        self.target.reserve(num_tokens + max_new_tokens + max_budget + 1)
        logits, taps = self.target.prefill(torch.tensor(prompt_ids, device=self.target.device))
        require_finite(logits, prompt_id)
        if self.drafter is not None:
            capacity = num_tokens + max_new_tokens
            if self._draft_cache is None or self._draft_cache.positions.numel() < capacity:
                self._draft_cache = self.drafter.new_cache(capacity)
            self._draft_cache.length = 0
            self._extend(taps)
        self._prefix = Prefix(num_tokens, max_new_tokens, logits, self.now_s() - start_s)
        return self._prefix

    def decode(
        self,
        prefix: Prefix,
        method: Method,
        *,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        prompt_id: str = "",
        on_round: Callable[[int], None] | None = None,
    ) -> Generation:
        """Decode one response by one method, from the last prefill.

        Args:
            prefix: what ``prefill`` returned last.
            method: how to draft.
            sampling: how the target's tokens are drawn.
            generator: source of samples, on the target's device.
            prompt_id: kept in the log.
            on_round: called with the tokens that a round added.
        """
        assert prefix is self._prefix, "another prompt was prefilled since"
        self.target.rewind(prefix.num_tokens)
        if self._draft_cache is not None:
            self._draft_cache.length = prefix.num_tokens
        tokens = choose_tokens(prefix.logits[None], sampling, generator)
        num_accepted: list[int] = []
        is_auto = method.name == DDTREE_AUTO
        if is_auto:
            self.auto_budget.prepare(
                (sampling, method.budget),
                prefix.num_tokens,
                lambda: self._measure_costs(tokens[-1], method.budget, sampling),
            )
        cut, clock, start_s = None, StageClock(self.now_s), self.now_s()
        while tokens[-1] not in self.eos_token_ids and len(tokens) < prefix.max_new_tokens:
            limit = prefix.max_new_tokens - len(tokens)
            done = self._round(tokens[-1], method, limit, sampling, generator, clock)
            tokens += done.tokens
            num_accepted.append(done.num_accepted)
            cut = done.cut
            if on_round is not None:
                on_round(len(done.tokens))
        log = RoundLog(
            prompt_id=prompt_id,
            num_accepted=tuple(num_accepted),
            cut=cut,
            stage_s=clock.seconds,
            decode_s=self.now_s() - start_s,
            budgets=tuple(self.auto_budget.chosen) if is_auto else (),
        )
        assert log.new_tokens == len(tokens), "rounds and tokens disagree: a bug of the engine"
        return Generation(tokens, log)

    def plain_logits(self, token_ids: list[int], num_last: int) -> PlainLogits:
        """What the target says without us, see ``float32_pass``; what was prefilled stays."""
        return plain_logits(self.target.model, token_ids, num_last)

    @torch.no_grad()
    def _round(
        self,
        anchor: int,
        method: Method,
        limit: int,
        sampling: Sampling,
        generator: torch.Generator | None,
        clock: "StageClock",
    ) -> Walk:
        is_auto, before_s = method.name == DDTREE_AUTO, dict(clock.seconds)
        with clock("draft"):
            draft_logits = self._draft(anchor) if method.budget else None
        with clock("build"):
            tree = (
                self.auto_budget.tree(draft_logits)
                if is_auto and draft_logits is not None
                else _tree(draft_logits, method)
            )
        with clock("verify"):
            logits = self.target.verify(anchor, tree)
        with clock("walk"):
            chosen = choose_tokens(logits, sampling, generator)
            done = walk(tree, chosen, eos_token_ids=self.eos_token_ids, limit=limit)
        with clock("commit"):
            taps = self.target.commit(done.rows)
            if method.budget:
                self._extend(taps)
        if is_auto:
            stage_s = {stage: clock.seconds[stage] - before_s[stage] for stage in STAGES}
            verify_s = sum(stage_s[stage] for stage in ROW_STAGES)
            self.auto_budget.observe(len(tree), sum(stage_s.values()) - verify_s, verify_s)
        return done

    @torch.no_grad()
    def _measure_costs(self, anchor: int, cap: int, sampling: Sampling) -> CostTable:
        """Time a draft and verifications behind the committed tokens; nothing is committed."""
        assert self.drafter is not None
        logits, tree = torch.empty(0), empty_tree()

        def draft() -> None:
            nonlocal logits
            logits = self._draft(anchor)

        def build(size: int) -> None:
            nonlocal tree
            tree = build_tree(logits, size)

        def verify(size: int) -> None:
            chosen = choose_tokens(self.target.verify(anchor, tree), sampling)
            walk(tree, chosen, eos_token_ids=(), limit=size + 1)

        return measure_costs(
            draft,
            verify,
            prepare=build,
            most_tokens=self.drafter.config.num_draft_tokens + 1,
            context_tokens=self.target.num_committed,
            sizes=ladder(cap),
            now_s=self.now_s,
        )

    def _draft(self, anchor: int) -> Tensor:
        """Draft logits (M, V) of the block behind the committed tokens; slot 0 (the anchor) predicts none."""
        assert self.drafter is not None
        assert self.ends is not None
        assert self._draft_cache is not None
        assert self._draft_cache.length == self.target.num_committed
        config = self.drafter.config
        block_ids = torch.full((1, config.block_size), config.mask_token_id, device=self.target.device)
        block_ids[0, 0] = anchor
        embedded = self.ends.embed(block_ids).to(self.drafter.fc.weight.dtype)
        hidden = self.drafter.draft(self._draft_cache, embedded)
        return self.ends.logits(hidden[0, 1:].to(self.ends.head.dtype))

    def _extend(self, taps: Tensor | None) -> None:
        """Add the context of newly committed tokens to the drafter's cache."""
        assert self.drafter is not None
        assert self._draft_cache is not None
        assert taps is not None, "the target runner was built without the drafter's tap layers"
        start = self._draft_cache.length
        new_positions = torch.arange(start, start + taps.shape[1], device=taps.device)
        self.drafter.extend(self._draft_cache, taps.to(self.drafter.fc.weight.dtype), new_positions)

    @property
    def draft_cache(self) -> DraftCache | None:
        """The drafter's context of the last prefill and what was decoded from it."""
        return self._draft_cache

    def now_s(self) -> float:
        """Seconds of a clock, behind everything that the device was asked to do."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def require_context(num_tokens: int, max_context: int, prompt_id: str) -> None:
    """Refuse a prompt that is empty or leaves no room for an answer.

    Raises:
        KitError: naming prompt, length and limit.
    """
    if not 0 < num_tokens < max_context:
        raise KitError(
            f"prompt {prompt_id} has {num_tokens} tokens; 1 to {max_context - 1} fit the target's context of "
            f"{max_context} with room for an answer"
        )


def require_finite(logits: Tensor, prompt_id: str) -> None:
    """Refuse a target whose logits (V,) hold NaN: every draft would agree with it. Minus infinity may mask tokens.

    Raises:
        KitError: naming the prompt.
    """
    if not bool(logits.max().isfinite()):  # NaN is the largest of all
        where = f" behind prompt {prompt_id}" if prompt_id else ""
        raise KitError(
            f"the target's logits{where} are NaN or infinite; its weights are damaged, or its numbers "
            "overflow in this dtype: fetch the target again, or use --dtype float32"
        )


def _tree(draft_logits: Tensor | None, method: Method) -> Tree:
    if draft_logits is None:
        return empty_tree()
    assert method.name != DDTREE_AUTO, "its trees come from AutoBudget"
    return chain_tree(draft_logits) if method.name == CHAIN else build_tree(draft_logits, method.budget)


class StageClock:
    """Adds up seconds by stage."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._now_s = now_s

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start_s = self._now_s()
        yield
        self.seconds[stage] += self._now_s() - start_s
