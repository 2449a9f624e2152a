"""What vLLM's processes find in their environment: how they are started, how fast they are, and how much they say."""

import logging
import os
import platform
import sys
from pathlib import Path

from .launcher import core_slices

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM ends its workers by signal, whereupon Python remarks on their shared memory; what torch will change one day is
    # for vLLM's authors.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker,ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def prepare_environment(num_ranks: int = 1, *, verbose: bool = False) -> None:
    """Set what vLLM reads from the environment of its processes, where the user has not; before they start.

    Args:
        num_ranks: processes that share the target.
        verbose: let vLLM, torch and Python say what they like; else errors alone are said, all of them on stderr.
    """
    # Without engine processes the states of the last step would wait for a step that never comes.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for results
    if not verbose:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        # vLLM sets its loggers up after some of its imports have remarked on what is not installed.
        if os.environ["VLLM_LOGGING_LEVEL"] == QUIET["VLLM_LOGGING_LEVEL"]:
            logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for name, value in cpu_environment(num_ranks).items():
            os.environ.setdefault(name, value)


def cpu_environment(num_ranks: int = 1) -> dict[str, str]:
    """Settings under which the CPU build is fast: every core, and Intel's OpenMP where it is installed.

    Args:
        num_ranks: processes that share the target; each gets a slice of the cores and of the cache.
    """
    cores = [",".join(map(str, part)) for part in core_slices(num_ranks)]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cache_gib = max(1, min(4, memory_bytes // 4 >> 30) // num_ranks)
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if platform.machine() == "x86_64" and openmp.exists():
        settings["LD_PRELOAD"] = str(openmp)  # takes effect in the engine's processes, which are started afresh
    return settings
