"""Capturing work as a CUDA graph, and timing it."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def shared_pool(device: torch.device) -> Any:
    """Memory for what several graphs make and drop, of which one runs at a time; None on a CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(work: Callable[[], object], pool: Any = None) -> Any:
    """A CUDA graph of ``work``, after two warm-up runs that compile its kernels; ``work`` must be repeatable.

    Args:
        pool: of ``shared_pool``; None: memory of its own.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def graph_us(works: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Microseconds of one of ``works``, captured one after another in one graph: the median over replays of it.

    Works on weights of their own keep each other's out of the cache, as layers do.
    """

    def every() -> None:
        for work in works:
            work()

    graph, found = capture(every), []
    graph.replay()
    for _ in range(repeats):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        found.append(begun.elapsed_time(ended))
    return 1e3 * statistics.median(found) / len(works)
