"""A run that does not fit into memory: what it was estimated to need, and what to lower."""

import torch

from dflash_kit.errors import KitError

from .estimate import GIB, SHARDINGS, Machine, memory_bytes
from .job import Job
from .state import RunFolder

CPU_WORDS = ("can't allocate memory", "not enough memory")
"""What torch's CPU allocator says in its RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in host memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in CPU_WORDS)


def too_large(error: BaseException, job: Job, machine: Machine, zero_stage: int | None, folder: RunFolder) -> KitError:
    """The one line for it.

    Args:
        error: what the allocator raised.
        job: the run.
        machine: what it ran on.
        zero_stage: of DeepSpeed; None without.
        folder: of the run.
    """
    sharding = next(s for s in SHARDINGS if s.stage == (zero_stage or 0))
    found, data = memory_bytes(job, sharding, machine), job.config.data
    parts = ("activations", "weights", "gradients", "moments", "ends", "average")
    sizes = ", ".join(f"{name} {getattr(found, name) / GIB:.2f}" for name in parts if getattr(found, name))
    steps = folder.steps()
    saved = f"the state of step {steps[-1]} in {folder.state} is intact" if steps else "no state was saved yet"
    why = " ".join(str(error).split())[:160] or type(error).__name__
    return KitError(
        f"training does not fit into memory ({why}); by estimate a process needs {found.device / GIB:.2f} GiB ({sizes}): "
        f"lower data.anchors (now {data.anchors}) or data.seq_len ({data.seq_len}), whose activations shrink with them, or "
        f"share weights and moments out over more processes (configs/accelerate/zero2.yaml); {saved}"
    )
