"""The least time that an extraction can take, for a plan: from the target's size and what this machine reaches.

A token costs two operations for each weight of the matrices that it passes, at the rate of a plain matrix product; a step of
an answer cannot be faster than reading these weights once, which as many answers share as the engine works on at once.
Attention, the engine's own work, its start and the disk come on top.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from dflash_kit.errors import KitError
from dflash_kit.target import load_config

MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
NUM_TURNS = 5
ENOUGH_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one device reaches."""

    flops_per_s: float
    """Operations per second of a matrix product in the target's type."""
    bytes_per_s: float
    """Bytes read per second."""


def count_active_weights(path: str, revision: str | None = None) -> int:
    """Weights of the matrices that one token passes, counted on a model without memory.

    Of experts those count that a token is routed to; the embedding (one row) and the head (of said tokens only) do not.

    Raises:
        KitError: transformers cannot build the model.
    """
    model = _bare_model(path, revision)
    config = model.config.get_text_config()
    ends = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = config.num_experts_per_tok / num_experts if num_experts else 1.0
    matrices = [
        (name, weight) for name, weight in model.named_parameters() if weight.ndim >= 2 and id(weight) not in ends
    ]
    return int(sum(weight.numel() * (share if ".experts." in name else 1.0) for name, weight in matrices))


def count_weights(path: str, revision: str | None = None) -> int:
    """All weights of a target, those that embeddings and head share once, counted on a model without memory.

    Of a target that sees images as well, the part that reads text.

    Raises:
        KitError: transformers cannot build the model.
    """
    return sum(weight.numel() for weight in _bare_model(path, revision).parameters())


def measure_rates(dtype: torch.dtype) -> Rates:
    """Measure this machine's device: a second or so, on a GPU the start of CUDA as well."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = MATRIX_SIZE[device]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    source = torch.ones(COPY_BYTES[device] // 4, dtype=torch.float32, device=device)
    product_s = _fastest_s(lambda: torch.mm(matrix, matrix, out=product))
    read_s = _fastest_s(lambda: source.sum())
    return Rates(flops_per_s=2 * size**3 / product_s, bytes_per_s=source.nbytes / read_s)


def least_time_s(
    num_weights: int,
    rates: Rates,
    *,
    num_tokens: int,
    num_answer_tokens: int,
    num_seqs: int,
    bytes_per_weight: int,
    num_devices: int = 1,
) -> float:
    """Seconds that the work takes at least on so many devices like the one that was measured.

    Args:
        num_weights: that one token passes.
        rates: of one device.
        num_tokens: tokens that are fed, those of answers included.
        num_answer_tokens: tokens that the target says.
        num_seqs: answers that share a step.
        bytes_per_weight: of the type in which the target computes.
        num_devices: devices that share the work evenly.
    """
    computing_s = num_tokens * 2 * num_weights / rates.flops_per_s
    reading_s = num_answer_tokens / num_seqs * num_weights * bytes_per_weight / rates.bytes_per_s
    return max(computing_s, reading_s) / num_devices


def _bare_model(path: str, revision: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    config = load_config(path, revision).get_text_config()
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as many kinds as there are architectures
        raise KitError(f"transformers cannot build this target ({error})") from error


def _fastest_s(work: Any) -> float:
    """Seconds of the fastest of some turns, each waited for; of few where one takes long (bfloat16 on most CPUs)."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    turns_s: list[float] = []
    while len(turns_s) < NUM_TURNS and sum(turns_s) < ENOUGH_S:
        synchronize()
        t0 = time.perf_counter()
        work()
        synchronize()
        turns_s.append(time.perf_counter() - t0)
    return min(turns_s)
