"""The training command: ``python train/run.py``, ``accelerate launch train/run.py`` or ``dflash-train``."""

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING

import torch

from dflash_kit.config import parse_config
from dflash_kit.errors import KitError

from .settings import (
    DataSettings,
    DrafterSettings,
    LossSettings,
    OptimSettings,
    ReplaySettings,
    TrainConfig,
)

if TYPE_CHECKING:
    from .job import Job
    from .parallel import Parallel
    from .state import RunFolder

__all__ = [
    "DataSettings",
    "DrafterSettings",
    "LossSettings",
    "OptimSettings",
    "ReplaySettings",
    "TrainConfig",
    "main",
]

DESCRIPTION = "Train a DFlash drafter from shards. Run again after an interruption, the same command goes on."


def main(argv: list[str] | None = None) -> int:
    """Parse, build and train; returns the exit status."""
    config = parse_config("train", TrainConfig, argv, description=DESCRIPTION)
    _quieten()
    # Imported late, here and below: --help and refused flags need neither accelerate nor DeepSpeed.
    from .job import prepare
    from .parallel import Parallel
    from .state import RunFolder
    from .tracking import require_tracker

    require_tracker(config.report_to)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    folder = RunFolder(config.out)
    job = prepare(config)
    if folder.is_finished(job.fingerprint()) and not config.dry_run:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{folder.out} is finished already; nothing to do")
        return 0
    parallel = Parallel(
        rows_per_step=config.data.rows_per_step, clip=config.optim.clip, compute_dtype=config.compute_dtype
    )
    status, refusal = 0, None
    try:
        status = _run(job, parallel, folder, sys.argv if argv is None else argv)
    except KitError as error:
        refusal = str(error)
    # Not in a `finally`: the traceback would still hold the model, see `Parallel.close`.
    parallel.close()
    if refusal is not None:
        raise KitError(refusal)
    return status


def _run(job: "Job", parallel: "Parallel", folder: "RunFolder", argv: list[str]) -> int:
    from .assemble import assemble
    from .estimate import Machine
    from .loop import resume, train
    from .memory import is_out_of_memory, too_large
    from .optimizer import require_possible
    from .plan import estimate_lines, plan_lines
    from .rates import measure_rates

    require_possible(job.config.optim, parallel.zero_stage, fsdp=parallel.is_fsdp)
    machine = Machine(
        num_processes=parallel.world_size,
        on_gpu=parallel.device.type == "cuda",
        bf16=parallel.compute_dtype == torch.bfloat16,
    )
    lines = [*plan_lines(job, machine), f"running      {parallel.description}"]
    if job.config.dry_run:
        lines += estimate_lines(job, machine, measure_rates(parallel.device, parallel.compute_dtype))
    if parallel.is_main:
        print("\n".join(lines), flush=True)
    if job.config.dry_run:
        return 0
    try:
        parallel.on_main(folder.lock)
        trainer = assemble(job, parallel, folder)
        try:
            resume(trainer)
            return train(trainer, argv)
        finally:
            trainer.feed.close()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise too_large(error, job, machine, parallel.zero_stage, folder) from error
        raise
    finally:
        folder.release()


def _quieten() -> None:
    """DeepSpeed and accelerate chat on stdout; errors still come through."""
    for name in ("DeepSpeed", "accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
