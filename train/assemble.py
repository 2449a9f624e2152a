"""Builds the moving parts of a run, or says what they would be."""

import torch

from dflash_kit.config import save_config
from dflash_kit.drafter import Drafter
from dflash_kit.errors import require_free_bytes
from dflash_kit.target_ends import TargetEnds

from .average import WeightAverage
from .counters import Counters
from .estimate import state_bytes
from .feed import Feed
from .job import Job
from .optimizer import make_optimizer
from .parallel import Parallel
from .spool_feed import spool_feed
from .state import RunFolder
from .trainer import Trainer
from .validation import Validation


def assemble(job: Job, parallel: Parallel, folder: RunFolder) -> Trainer:
    """Load the target's ends, initialise the drafter or load the one to start from, hand it to accelerate.

    All processes call it.

    Raises:
        KitError: the state folder belongs to another run, the drafter to start from or the target's head is incomplete,
            or the disk is too full.
    """
    is_new = not parallel.on_main(folder.steps)
    config, device = job.config, parallel.device
    # Read before anything is written: a damaged checkpoint or target must not leave a run behind.
    start = job.origin.weights() if job.origin is not None and is_new else None
    ends = TargetEnds.from_pretrained(
        job.spec.name,
        dtype=parallel.compute_dtype,
        device=device,
        revision=job.spec.revision,
        with_final_norm=job.objective.needs_target,
    )

    def begin() -> None:
        folder.begin(job.fingerprint())
        save_config(job.config, folder.state / "train.yaml")
        if is_new:
            require_free_bytes(
                folder.state,
                state_bytes(job) * (job.config.keep_last + 1),
                f"trainer state (keep_last {config.keep_last})",
            )

    parallel.on_main(begin)
    on_gpu = device.type == "cuda"
    torch.manual_seed(config.seed)
    with device:
        drafter = Drafter(job.drafter)
    if start is not None:
        drafter.load_state_dict(start)
    if on_gpu:  # fuses norms, rotary embedding and SwiGLU
        drafter.compile_training()
    optimizer = make_optimizer(drafter, config.optim)
    model, wrapped = parallel.accelerator.prepare(drafter, optimizer)
    model.train()
    feed: Feed
    eval_shards, eval_rows = job.eval_shards, job.eval_rows
    if job.spool is not None:
        feed, held_out = spool_feed(job, job.spool, parallel, folder, fixed_shapes=on_gpu)
        if held_out is not None:
            eval_shards, eval_rows = held_out, tuple(range(len(held_out)))
    else:
        feed = Feed(
            job.plan,
            job.packer.for_gpu() if on_gpu else job.packer,
            rank=parallel.rank,
            world_size=parallel.world_size,
            last_row=job.last_row,
            prefetch=config.data.prefetch,
            fixed_shapes=on_gpu,
            num_threads=config.data.prefetch + 1 if on_gpu else 1,
        )
    validation = None
    if eval_rows:
        validation = Validation(eval_shards, eval_rows, ends, config.replay.budgets, job.spec.eos_token_ids)
        validation.skip_unreadable = config.data.skip_unreadable
    return Trainer(
        job=job,
        parallel=parallel,
        ends=ends,
        drafter=drafter,
        model=model,
        optimizer=wrapped,
        average=WeightAverage(drafter, config.optim.ema_decay) if config.optim.ema_decay else None,
        feed=feed,
        validation=validation,
        folder=folder,
        counters=Counters(),
    )
