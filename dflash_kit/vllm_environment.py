"""What vLLM's processes find in their environment: how they are started, how fast they are, and how much they say."""

import difflib
import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import KitError

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM ends its workers by signal, whereupon Python remarks on their shared memory; what torch will change one day is
    # for vLLM's authors.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker,ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

EXTRACTION = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""The runner of an engine that extracts. 0.26 takes this one by itself, since its other one has no ``extract_hidden_states``; later
versions have it there, too, where neither our connector nor ``skip_draft_tokens`` has run."""


def prepare_environment(num_ranks: int = 1, *, verbose: bool = False, dtype: str = "auto") -> None:
    """Set what vLLM reads from the environment of its processes, where the user has not; before they start.

    Args:
        num_ranks: processes that share the target.
        verbose: let vLLM, torch and Python say what they like; else errors alone are said, all of them on stderr.
        dtype: of the target.
    """
    if dtype == "float32":  # vLLM's attention by Triton multiplies in TF32 otherwise
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
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


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes that start meanwhile, where the user has not set them."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in settings.items() if name not in before})
    try:
        yield
    finally:
        for name in settings.keys() - before.keys():
            os.environ.pop(name, None)


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


def core_slices(num_workers: int) -> list[list[int]]:
    """CPU cores for each process where the target runs on them: two that share cores hinder each other."""
    cores = sorted(os.sched_getaffinity(0))
    if num_workers > len(cores):
        return [[cores[i % len(cores)]] for i in range(num_workers)]
    ends = [i * len(cores) // num_workers for i in range(num_workers + 1)]
    return [cores[start:end] for start, end in pairwise(ends)]


def check_engine_args(extra: Mapping[str, Any], own: Iterable[str], known: list[str], setter: str) -> None:
    """Refuse arguments that vLLM does not know, and those that are not the user's to choose.

    Args:
        extra: what the user gave.
        own: names that the caller sets.
        known: names of vLLM's ``EngineArgs``.
        setter: what sets ``own``, for the message.

    Raises:
        KitError: naming the argument, and the nearest one that vLLM knows.
    """
    for name in extra:
        if name in own:
            raise KitError(f"engine_args.{name} is set by {setter} itself; use its own option, or leave it out")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise KitError(f"vLLM's engine has no argument {name!r}{hint}")
