"""The engine for NVIDIA GPUs: decoding of one prompt at a time, each round a CUDA graph and a small read (with auto two or three).

A round starts before the one before it has been read, so that the GPU never waits for the host (not with auto, where the host
chooses); at the end of a response one round is for nothing.

It answers to the same calls as the portable ``engine.Engine`` and gives the same rounds (at a temperature above 0, rounds
of the same distribution); what it cannot do (targets that ``fused_target`` does not compute, very wide blocks) stays with that one.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from dflash_kit.acceptance import CHAIN, DDTREE_AUTO, RoundLog
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError

from .auto_budget import AutoBudget
from .auto_round import AutoRound
from .engine import Generation, Method, Prefix, require_context, require_finite
from .float32_pass import PlainLogits, plain_logits
from .fused_drafter import FusedDrafter
from .fused_round import FusedRound
from .fused_target import FusedTarget, check_supported, padded_rows
from .hybrid_layers import check_hybrid, is_hybrid
from .hybrid_target import HybridTarget
from .row_sampler import seed_device
from .sampling import GREEDY, Sampling, choose_tokens

MAX_BLOCK_SIZE = 16
MAX_BUDGET = 1024
CACHE_SHARE = 0.5
"""Of the GPU's free memory that the caches may take."""


def reason_against(model: Any, drafter: Drafter, methods: Collection[tuple[str, int]]) -> str | None:
    """Why the fused engine cannot do this job; None when it can."""
    if drafter.config.block_size > MAX_BLOCK_SIZE:
        return f"the block size is {drafter.config.block_size}, above {MAX_BLOCK_SIZE}"
    if max(budget for _, budget in methods) > MAX_BUDGET:
        return f"a budget is above {MAX_BUDGET}"
    if model.dtype == torch.float32 and model.device.type == "cuda":
        return "its kernels take minutes to compile for float32"
    try:
        check_hybrid(model) if is_hybrid(model) else check_supported(model)
    except KitError as error:
        return str(error)
    return None


class FusedEngine:
    """See the module.

    Args:
        model: loaded causal language model, frozen; its projections are fused in place.
        drafter: in the model's dtype and on its device; fused in place likewise.
        eos_token_ids: tokens that end a response.
        max_context: tokens of prompt and response together, at most; less if the GPU's memory holds less.
        max_budget: largest tree that will be verified.

    Raises:
        KitError: an architecture that this path does not compute.
    """

    def __init__(
        self, model: Any, drafter: Drafter, *, eos_token_ids: Collection[int], max_context: int, max_budget: int
    ) -> None:
        self._model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_context = min(max_context, tokens_that_fit(model, drafter))
        rows = padded_rows(max(max_budget, drafter.config.num_draft_tokens) + 1)
        kind = HybridTarget if is_hybrid(model) else FusedTarget
        self.target = kind(model, drafter.config.target_layer_ids, self.max_context, rows)
        self.drafter = FusedDrafter(drafter, self.target)
        self.auto_budget = AutoBudget()
        self._rounds: dict[tuple[Method, Sampling], FusedRound | AutoRound] = {}
        self._first: Tensor | None = None

    @torch.no_grad()
    def prefill(self, prompt_ids: list[int], max_new_tokens: int, max_budget: int, prompt_id: str = "") -> Prefix:
        """Run the target and the drafter's context pass over a prompt; see ``Engine.prefill``."""
        require_context(len(prompt_ids), self.max_context, prompt_id)
        start_s = self._now_s()
        ids = torch.tensor(prompt_ids, device=self.target.device)
        logits, choice = self.target.prefill(ids, lambda taps, _start: self.drafter.extend(taps))
        require_finite(logits, prompt_id)
        self._first = choice.clone()
        limit = min(max_new_tokens, self.max_context - len(prompt_ids))
        return Prefix(len(prompt_ids), limit, logits.clone(), self._now_s() - start_s)

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
        """Decode one response by one method, from the last prefill; see ``Engine.decode``.

        Of ``generator`` the seed alone counts: it becomes that of the device's own generator, by which graphs draw.
        """
        assert self._first is not None, "nothing was prefilled"
        round_ = self._round(method, sampling)
        anchor = self._first
        if not sampling.is_greedy:
            if generator is not None:
                seed_device(self.target.device, generator.initial_seed())
            anchor = torch.tensor(choose_tokens(prefix.logits[None], sampling), device=self.target.device)
        round_.resume_at(prefix.num_tokens, anchor)
        for held in (prefix.num_tokens, prefix.num_tokens + prefix.max_new_tokens):
            round_.make_ready(held)
        tokens, num_accepted, cut = [int(anchor)], [], None
        start_s = self._now_s()
        while tokens[-1] not in self.eos_token_ids and len(tokens) < prefix.max_new_tokens:
            said = round_.advance(ahead=len(tokens) + 1 < prefix.max_new_tokens)
            accepted, cut = cut_accepted(said[:-1], self.eos_token_ids, prefix.max_new_tokens - len(tokens))
            added = accepted if cut else said
            tokens += added
            num_accepted.append(len(accepted))
            if on_round is not None:
                on_round(len(added))
        decode_s = self._now_s() - start_s
        log = RoundLog(
            prompt_id=prompt_id,
            num_accepted=tuple(num_accepted),
            cut=cut,
            stage_s={"round": decode_s},
            decode_s=decode_s,
            budgets=tuple(self.auto_budget.chosen) if method.name == DDTREE_AUTO else (),
        )
        assert log.new_tokens == len(tokens), "rounds and tokens disagree: a bug of the engine"
        return Generation(tokens, log)

    def plain_logits(self, token_ids: list[int], num_last: int) -> PlainLogits:
        """What the target says without us, see ``float32_pass``; what was prefilled stays."""
        return plain_logits(self._model, token_ids, num_last)

    def _round(self, method: Method, sampling: Sampling) -> FusedRound | AutoRound:
        key = method, sampling
        if key not in self._rounds:
            budget = None if method.name == CHAIN else method.budget
            self._rounds[key] = (
                AutoRound(self.target, self.drafter, method.budget, sampling, self.auto_budget, self._now_s)
                if method.name == DDTREE_AUTO
                else FusedRound(self.target, self.drafter if method.budget else None, budget, sampling)
            )
        return self._rounds[key]

    def _now_s(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def cut_accepted(accepted: list[int], eos_token_ids: Collection[int], limit: int) -> tuple[list[int], str | None]:
    """Accepted tokens of a round up to where the response ends, and why it ends inside them; see ``walk.walk``."""
    for i, token in enumerate(accepted, start=1):
        if token in eos_token_ids:
            return accepted[:i], "eos"
        if i == limit:
            return accepted[:i], "length"
    return accepted, None


def tokens_that_fit(model: Any, drafter: Drafter) -> int:
    """Context tokens whose keys and values fit into a share of the GPU's free memory; no limit on a CPU."""
    weight = model.get_input_embeddings().weight
    if not weight.is_cuda:
        return 1 << 30
    config, draft = model.config.get_text_config(), drafter.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = config.num_hidden_layers * config.num_key_value_heads * head_dim
    values += draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim
    free_bytes, _ = torch.cuda.mem_get_info(weight.device)
    return int(CACHE_SHARE * free_bytes) // (2 * values * weight.element_size())
