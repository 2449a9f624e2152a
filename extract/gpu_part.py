"""The part of a GPU that an engine takes: all of it, or as much as the others on it leave.

vLLM measures how much memory is free while it starts, to give what is left to its caches. Beside engines that start at
the same time it would measure theirs, so that several on one GPU are told the size of their caches instead.
"""

from typing import Any

import torch

from dflash_kit.errors import KitError

from .capture import Job
from .estimate import count_weights

# What an engine takes beside weights, caches and what grows with a step: CUDA's context, libraries' workspaces, CUDA
# graphs, and our copies of states on their way to the host.
FIXED_BYTES = 2 << 30
# vLLM's own largest default of the tokens in a step.
MOST_BATCHED_TOKENS = 16384
# Of one token's probability of one answer: float32 logits, and values, places and sums that sampling makes of them.
LOGIT_BYTES = 32


def memory_arguments(job: Job) -> dict[str, Any]:
    """Arguments of vLLM's engine that say how much of the GPU it may take.

    Raises:
        KitError: nothing is left for caches, with what takes the room.
    """
    if job.workers_per_gpu == 1:
        return {"gpu_memory_utilization": job.gpu_memory_utilization}
    part = job.gpu_memory_utilization / job.workers_per_gpu
    if "kv_cache_memory_bytes" in job.engine_args:
        return {"gpu_memory_utilization": part}
    return {"gpu_memory_utilization": part, "kv_cache_memory_bytes": cache_bytes(job, _total_bytes())}


def cache_bytes(job: Job, total_bytes: int) -> int:
    """What is left for an engine's caches (the target's, and of hidden states) of its part of a GPU.

    Args:
        job: what the engine is to do.
        total_bytes: memory of the GPU.

    Raises:
        KitError: nothing is left.
    """
    part_bytes = int(total_bytes * job.gpu_memory_utilization / job.workers_per_gpu)
    weight_bytes = count_weights(job.spec.name, job.spec.revision) * _dtype(job).itemsize
    left_bytes = part_bytes - weight_bytes - reserve_bytes(job)
    if left_bytes <= 0:
        raise KitError(
            f"workers_per_gpu is {job.workers_per_gpu}: each may take {_gib(part_bytes)} of the GPU's {_gib(total_bytes)}, but the "
            f"target's weights take {_gib(weight_bytes)} and {_gib(reserve_bytes(job))} are reserved for its work; take fewer "
            "workers, lower max_num_seqs or max_num_batched_tokens, or set engine_args.kv_cache_memory_bytes"
        )
    return left_bytes


def reserve_bytes(job: Job) -> int:
    """Memory that is kept free of weights and caches, more rather than less than an engine needs for its work.

    Besides a fixed part: activations of a full step (eight vectors of the hidden size, three of the MLP's, and the
    captured states twice), and the logits of as many answers as are worked on at once, with what sampling makes of them.
    """
    spec = job.spec
    given = job.max_num_batched_tokens or job.engine_args.get("max_num_batched_tokens")
    num_tokens = max(given or MOST_BATCHED_TOKENS, job.max_num_seqs)
    vectors = (8 + 2 * len(job.captured_layer_ids)) * spec.hidden_size + 3 * spec.intermediate_size
    return FIXED_BYTES + num_tokens * vectors * _dtype(job).itemsize + job.max_num_seqs * spec.vocab_size * LOGIT_BYTES


def _dtype(job: Job) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, job.header.compute_dtype)
    return dtype


def _total_bytes() -> int:
    """Of the first visible GPU; vLLM asks without making a CUDA context, which would take half a GiB of it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
