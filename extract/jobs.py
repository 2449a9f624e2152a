"""What an engine is given to do, whether this host can do it, and how long it takes at least."""

import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec

from . import spool
from .capture import Job
from .estimate import count_active_weights, least_time_s, measure_rates
from .places import Place
from .plan import Plan
from .screen import Screen
from .settings import ExtractConfig


def make_job(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader, plan: Plan | None, place: Place) -> Job:
    """The job; without a plan for samples as long as the target's context.

    Engines make room for one token more than the longest sample has: an answer that ends with the context does not need it.
    """
    context = spec.max_position_embeddings
    return Job(
        spec=spec,
        header=header,
        folder=place.folder,
        share=config.shares[0],
        max_shard_bytes=config.max_shard_bytes,
        max_num_seqs=num_seqs(config),
        longest_tokens=context if plan is None else min(plan.longest_tokens, context - 1),
        prefix_caching=config.prefix_caching,
        tensor_parallel_size=config.tensor_parallel_size,
        workers_per_gpu=config.workers_per_gpu,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=config.max_num_batched_tokens,
        engine_args=config.engine_args,
        skip_errors=config.skip_errors,
        verbose=config.verbose,
        spool_bytes=0 if plan is None else spool.room_of(config, plan, header),
        keep_first=spool.kept_name(config.shares[0]) if config.parity and config.shares[0].rank == 0 else None,
    )


def num_seqs(config: ExtractConfig) -> int:
    """Conversations that the engine works on at once."""
    default = 256 if torch.cuda.is_available() else (64 if config.engine == "vllm" else 16)
    return config.max_num_seqs or default


def require_parallelism(config: ExtractConfig, spec: TargetSpec) -> None:
    """Refuse a ``tensor_parallel_size`` or ``workers_per_gpu`` that the target's heads or this host's GPUs do not allow.

    Raises:
        KitError: with the sizes that fit.
    """
    if config.workers_per_gpu > 1 and not torch.cuda.is_available():
        raise KitError(
            f"workers_per_gpu is {config.workers_per_gpu}, but no GPU is visible here; leave it out (num_workers alone "
            "starts processes on a CPU, each with a slice of the cores)"
        )
    size = config.tensor_parallel_size if config.engine == "vllm" else 1
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in sizes:
        raise KitError(
            f"tensor_parallel_size {size} does not divide the target's {heads} attention heads ({kv_heads} of keys and "
            f"values); allowed: {', '.join(map(str, sizes))}"
        )
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        raise KitError(f"tensor_parallel_size {size} needs as many GPUs; {torch.cuda.device_count()} are visible here")


def estimate(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader, plan: Plan, screen: Screen) -> float | None:
    """Say and return how many seconds the plan takes at least; None where that cannot be known."""
    dtype = getattr(torch, header.compute_dtype)
    # Besides the states' own pass, answers of transformers take one before it.
    answered = [s for s in plan.samples if s.loss_spans is None] if config.engine == "transformers" else []
    num_tokens = plan.max_tokens + sum(len(s.token_ids) + s.max_new_tokens for s in answered)
    try:
        num_weights, rates = count_active_weights(spec.name, spec.revision), measure_rates(dtype)
    except (KitError, torch.OutOfMemoryError) as error:
        screen.say(f"time     unknown: {error}")
        return None
    least_s = least_time_s(
        num_weights,
        rates,
        num_tokens=num_tokens,
        num_answer_tokens=sum(sample.max_new_tokens for sample in plan.samples),
        num_seqs=min(num_seqs(config), max(1, len(plan.samples))),
        bytes_per_weight=dtype.itemsize,
        num_devices=config.num_devices if torch.cuda.is_available() else 1,
    )
    screen.time(least_s, num_weights, rates)
    return float(f"{least_s:.3g}")
