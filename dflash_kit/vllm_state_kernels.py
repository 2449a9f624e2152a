"""A faster way of storing a step's hidden states in vLLM's paged cache on GPUs.

vLLM 0.26 writes them by advanced indexing, whose kernel moves single numbers: 1.1 ms for 8,192 tokens with five taps of 4,096
numbers on an H200, where the memory would need 0.2. That is half a percent of an 8B target's prefill, in the model's own stream.

Shape legend: T tokens, N blocks of the cache, S tokens per block, L captured layers, D hidden size.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

BLOCK = 4096
"""Numbers that a program copies."""


@triton.jit
def _store_kernel(states, slots, cache, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots + token), 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(states + token * width + columns, mask=inside)
    tl.store(cache + slot * width + columns, values, mask=inside)


def store_states(states_TLD: Tensor, cache_NSLD: Tensor, slot_mapping_T: Tensor) -> None:
    """As vLLM's ``basic_cache``: write each token's states into its slot of the cache; padding (-1) goes to slot 0.

    Args:
        states_TLD: contiguous, on a GPU.
        cache_NSLD: of the same dtype, contiguous.
        slot_mapping_T: int64; may be longer than the states.
    """
    num_tokens, width = len(states_TLD), states_TLD.shape[1] * states_TLD.shape[2]
    if num_tokens:
        _store_kernel[(num_tokens, -(-width // BLOCK))](
            states_TLD, slot_mapping_T, cache_NSLD, width, BLOCK=BLOCK, num_warps=8
        )  # fmt: skip


def use_store_states() -> None:
    """Have this process's vLLM store states so, wherever tensors lie as ``store_states`` needs them."""
    from vllm.model_executor.models import extract_hidden_states

    stock = getattr(extract_hidden_states, "basic_cache", None)
    if stock is None or getattr(stock, "is_faster", False):
        return

    def store(to_cache: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        if (
            to_cache.is_cuda
            and to_cache.dtype == kv_cache.dtype
            and to_cache.is_contiguous()
            and kv_cache.is_contiguous()
            and not torch.compiler.is_compiling()
        ):
            store_states(to_cache, kv_cache, slot_mapping)
        else:
            stock(to_cache, kv_cache, slot_mapping)

    store.is_faster = True  # type: ignore[attr-defined]
    extract_hidden_states.basic_cache = store
