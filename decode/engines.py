"""Which of our engines decodes: fused where it can, one prompt at a time or a batch."""

from typing import Any

import torch

from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.target import decoder_layers, load_target
from dflash_kit.target_ends import TargetEnds

from .batch_engine import BatchEngine
from .engine import Engine
from .feed_forward import has_experts
from .fused_batch import FusedBatchEngine
from .fused_engine import FusedEngine, reason_against
from .hybrid_layers import is_hybrid
from .inputs import Inputs
from .kept import forget, kept
from .results import Method
from .settings import EvalConfig
from .target_runner import TargetRunner


def open_engine(
    config: EvalConfig, inputs: Inputs, methods: list[Method], device: str, dtype: str, num_prompts: int
) -> Engine | BatchEngine | FusedEngine | FusedBatchEngine:
    """Load target and drafter, and choose what decodes with them.

    Raises:
        KitError: the fused engine is asked for and cannot do the job.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading weights; the evaluation shows its own
    torch_dtype = getattr(torch, dtype)
    drafter = Drafter.from_pretrained(config.ckpt, dtype=torch_dtype, device=device)
    model = kept(load_target, inputs.target, dtype=torch_dtype, device=device, revision=config.target_revision)
    eos_token_ids, max_context = inputs.spec.eos_token_ids, inputs.spec.max_position_embeddings
    reason = reason_against(model, drafter, methods)
    batch_size = min(config.batch_size, num_prompts)
    at_once = f", {config.batch_size} prompts at a time" if config.batch_size > 1 else ""
    if config.batch_size > 1 and is_hybrid(model) and not reason:
        reason = f"it decodes hybrid targets one prompt at a time, and batch_size is {config.batch_size}"
    if config.engine == "fused" and reason:
        raise KitError(f"the fused engine cannot be used: {reason}; use --engine portable")
    if config.engine == "auto" and not reason:
        reason = _untried(model)
    if config.engine == "fused" or (config.engine == "auto" and device == "cuda" and not reason):
        print(f"engine       fused{at_once}: rounds are CUDA graphs", flush=True)
        forget()  # its projections are about to be fused in place
        sizes: dict[str, Any] = {"eos_token_ids": eos_token_ids, "max_context": max_context}
        sizes["max_budget"] = max(budget for _, budget in methods)
        if config.batch_size > 1:
            return FusedBatchEngine(model, drafter, **sizes, batch_size=batch_size)
        return FusedEngine(model, drafter, **sizes)
    note = f" (not fused: {reason})" if device == "cuda" and reason else ""
    print(f"engine       portable{at_once}{note}", flush=True)
    parts = TargetRunner(model, drafter.config.target_layer_ids), drafter, TargetEnds.from_model(model)
    if config.batch_size > 1:
        return BatchEngine(*parts, eos_token_ids=eos_token_ids, max_context=max_context, batch_size=batch_size)
    return Engine(*parts, eos_token_ids=eos_token_ids, max_context=max_context)


def _untried(model: Any) -> str | None:
    """What the fused engine takes, but has done on a GPU in evaluations of tiny targets at most; None where there is nothing."""
    if is_hybrid(model):
        return "only tiny hybrid targets have been evaluated with it on a GPU yet; --engine fused takes them"
    if has_experts(decoder_layers(model)):
        return "only tiny targets with experts have been evaluated with it on a GPU yet; --engine fused takes them"
    return None
