"""Runs extract/dump.py with vLLM's processes forked off, not started afresh, which saves each from importing everything.

    python tests/forked_vllm.py ARGUMENT…

On CPUs vLLM starts them afresh whatever VLLM_WORKER_MULTIPROC_METHOD says. Other tests start the engine as users do.
"""

import multiprocessing
import sys
from pathlib import Path

REPO = Path(__file__).parent.parent


def fork_engines() -> None:
    """Let vLLM fork in this process, and import beforehand what its processes need."""
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    from dflash_kit.errors import run_cli
    from dflash_kit.vllm_environment import prepare_environment

    prepare_environment()
    fork_engines()
    sys.exit(run_cli("extract.cli", sys.argv[1:]))
