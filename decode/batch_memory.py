"""What a batch takes of the device's memory, asked before anything is decoded.

The estimate covers what grows with the batch: keys and values of target and drafter in every slot, recurrent states, and the
passing tensors of one round (logits, draft logits, one layer's repeated keys and values, masks).
"""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError

from .batch_cache import round_up
from .target_masks import LINEAR

GIB = 1 << 30
WHAT_HELPS = "lower batch_size, max_new_tokens or the largest of budgets"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMemory:
    """Bytes that a batch needs."""

    caches: int
    passing: int

    @property
    def total(self) -> int:
        """Everything."""
        return self.caches + self.passing


def batch_memory(
    text_config: Any,
    drafter: DrafterConfig,
    *,
    batch_size: int,
    num_tokens: int,
    num_rows: int,
    element_bytes: int,
) -> BatchMemory:
    """Bytes for a batch.

    Args:
        text_config: the target's text configuration.
        drafter: the drafter's.
        batch_size: responses at once.
        num_tokens: prompt, response and rows of one verification, of the longest.
        num_rows: rows of a verification.
        element_bytes: of the dtype.
    """
    capacity = round_up(num_tokens)
    kinds = getattr(text_config, "layer_types", None) or [""] * text_config.num_hidden_layers
    num_linear = list(kinds).count(LINEAR)
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    num_groups = getattr(text_config, "num_key_value_heads", None) or heads
    per_token = (len(kinds) - num_linear) * num_groups * head_dim
    per_token += drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
    caches = 2 * batch_size * capacity * per_token * element_bytes
    if num_linear:
        state = text_config.linear_num_value_heads * text_config.linear_key_head_dim * text_config.linear_value_head_dim
        caches += 4 * batch_size * num_linear * state
    # Logits, and one layer's keys and values repeated for each query head, masks. Draft logits also in float32.
    passing = num_rows * text_config.vocab_size + 2 * heads * head_dim * capacity + num_rows * capacity
    passing = batch_size * passing * element_bytes
    passing += batch_size * drafter.num_draft_tokens * text_config.vocab_size * (element_bytes + 4)
    return BatchMemory(caches=caches, passing=passing)


def require_batch_fits(
    model: Any, drafter: DrafterConfig, *, batch_size: int, longest_prompt: int, max_new_tokens: int, max_budget: int
) -> None:
    """Refuse a batch whose first turns need more memory than is free. Later turns may need more.

    Args:
        model: the loaded target.
        drafter: the drafter's configuration.
        batch_size: responses at once.
        longest_prompt: tokens.
        max_new_tokens: of a response.
        max_budget: nodes of the largest tree.

    Raises:
        KitError: with what it would take, what is free, and a batch size that fits if one does.
    """
    free = free_device_bytes(model.device)

    def needed(size: int) -> BatchMemory:
        return batch_memory(
            model.config.get_text_config(),
            drafter,
            batch_size=size,
            num_tokens=longest_prompt + max_new_tokens + max_budget + 1,
            num_rows=max_budget + 1,
            element_bytes=model.dtype.itemsize,
        )

    if (memory := needed(batch_size)).total <= free:
        return
    fitting = int(free // needed(1).total)
    hint = f"{fitting} would fit" if fitting else "not even one prompt fits"
    raise KitError(
        f"batch_size {batch_size} needs about {memory.total / GIB:.3g} GiB on {model.device.type} beside the weights "
        f"({memory.caches / GIB:.3g} of caches for prompts of {longest_prompt} tokens and max_new_tokens {max_new_tokens}, "
        f"{memory.passing / GIB:.3g} for the rows of budget {max_budget}), and {free / GIB:.3g} GiB are free: "
        f"{WHAT_HELPS} ({hint})"
    )


def describe_batch(
    text_config: Any,
    drafter: DrafterConfig,
    *,
    batch_size: int,
    longest_prompt: int,
    max_new_tokens: int,
    max_budget: int,
    element_bytes: int,
) -> str:
    """What ``require_batch_fits`` will ask for, in words; no weights are read."""
    memory = batch_memory(
        text_config,
        drafter,
        batch_size=batch_size,
        num_tokens=longest_prompt + max_new_tokens + max_budget + 1,
        num_rows=max_budget + 1,
        element_bytes=element_bytes,
    )
    return (
        f"{batch_size} prompts at a time: about {memory.caches / GIB:.3g} GiB of caches and "
        f"{memory.passing / GIB:.3g} GiB within a round, beside the weights"
    )


def free_device_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate: on a CPU it raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
