"""How fast this machine is: measured in a fraction of a second, for MFU and for the estimates of a dry run."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
COPIED_BYTES = 64 << 20
REPEATS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of one process's device; what is None does not exist here."""

    matrix_flop_per_s: float
    memory_bytes_per_s: float
    """Host memory, read and written."""
    link_bytes_per_s: float | None = None
    """Between the host's memory and the device's."""
    exchange_bytes_per_s: float | None = None
    """What one process sends and receives in a sum over all processes."""


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of a few; MFU is a share of it."""
    return _matrix_rate(device, dtype, torch.get_num_threads())


@functools.cache
def _matrix_rate(device: torch.device, dtype: torch.dtype, _num_threads: int) -> float:
    size = MATRIX_SIZE[device.type]
    draws = torch.Generator(device).manual_seed(0)  # the run's own random state must not move
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=draws) for _ in range(2))
    return 2.0 * size**3 / _least_s(lambda: left @ right, device)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """All rates; every process of the group calls it."""
    host = torch.ones(COPIED_BYTES // 4)
    copy, there = torch.empty_like(host), torch.device("cpu")
    link = exchange = None
    if device.type == "cuda":
        host, there = host.pin_memory(), device
        link = COPIED_BYTES / _least_s(lambda: host.to(device, non_blocking=True), device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        part = torch.ones(COPIED_BYTES // 16, device=there)
        share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        exchange = share * part.nbytes / _least_s(lambda: dist.all_reduce(part), device)
    return Rates(
        matrix_flop_per_s=matrix_rate(device, dtype),
        memory_bytes_per_s=2 * COPIED_BYTES / _least_s(lambda: copy.copy_(host), torch.device("cpu")),
        link_bytes_per_s=link,
        exchange_bytes_per_s=exchange,
    )


def _least_s(action: Callable[[], Tensor | None], device: torch.device) -> float:
    """Seconds that it takes, the least of a few after one to warm up."""
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        t0 = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - t0)
    return max(min(times[1:]), 1e-9)
