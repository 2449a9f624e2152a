"""The training loop: read ``train`` from top to bottom, then ``begin_step``.

Every process runs the same steps. What one of them finds out alone (a damaged shard, a request to stop) travels with
the sums that are exchanged anyway, so that they always stop together.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from dflash_kit.errors import KitError

from .bad_steps import require_applied
from .batches import PackedRow
from .job import Job
from .outcome import finish, record_replay, save
from .progress import Meter, Reporter, step_line
from .rates import matrix_rate
from .schedule import Horizon, learning_rate
from .settling import Settler
from .state import load_state
from .step import begin_step
from .stopping import StopRequest
from .sums import StepResult
from .tracking import Tracker
from .trainer import Trainer


def train(trainer: Trainer, argv: list[str] | None) -> int:
    """Train to the end, or to a SIGTERM; returns the exit status.

    Raises:
        KitError: too many bad steps in a row, a damaged shard, a full disk.
    """
    job, config, parallel = trainer.job, trainer.job.config, trainer.parallel
    counters = trainer.counters
    feed = trainer.feed
    tracker = Tracker(config, trainer.folder)
    parallel.on_main(lambda: tracker.start(counters.step))
    reporter = Reporter(
        trainer.folder.metrics, active=parallel.is_main, max_steps=job.max_steps or None, tracker=tracker
    )
    # Only the main process prints; a rate that all measured at once on shared cores would be none.
    peak = matrix_rate(parallel.device, parallel.compute_dtype) * parallel.world_size if parallel.is_main else None
    meter = Meter(job.drafter.num_draft_tokens, peak)
    if counters.step:
        reporter.say(f"resumed at step {counters.step}" + (f" of {job.max_steps}" if job.spool is None else ""))
    with reporter, StopRequest() as stop:
        if job.origin is not None and counters.step == 0:
            with meter.paused():
                record_replay(trainer, reporter, argv)
        steps = Settler(trainer, reporter, meter, lambda lr, result: _log(trainer, reporter, meter, lr, result))
        for future in _timed(feed.steps(counters.step, job.max_steps), meter):
            if future is None:  # a spool, whose extractor is behind
                steps.settle()
                if _wait(trainer, reporter, meter, argv, stop_asked=stop.asked):
                    return 0
                continue
            t0 = time.perf_counter()
            rows, error = _take(future)
            meter.data_wait_s += time.perf_counter() - t0
            lr = rate_at(job, feed.horizon(steps.num_begun))
            try:
                pending = begin_step(trainer, rows, lr, error=error, stop_asked=stop.asked)
            except KitError:  # in all processes, which all have the step before still to take in
                steps.settle()
                raise
            steps.add(pending, rows, lr)
            step = steps.num_begun
            last, stops = feed.is_last(step), pending.stop_asked
            due = step % config.save_every_steps == 0 or feed.wants_save(step)
            replays = last or (config.replay.every_steps > 0 and step % config.replay.every_steps == 0)
            if not (last or stops or due or replays):
                continue
            steps.settle()
            if last:
                require_applied(counters)
            with meter.paused():
                if replays:
                    record_replay(trainer, reporter, argv)
                if last or stops or due:
                    save(trainer, argv)
            if stops and not last:
                reporter.say(f"stopped at step {counters.step} as asked; the same command goes on from there")
                return 0
        steps.settle()
        require_applied(counters)
        if job.spool is not None:
            with meter.paused():
                _close(trainer, reporter, argv)
        finish(trainer, reporter, argv)
    return 0


def rate_at(job: Job, horizon: Horizon) -> float:
    """Learning rate of a step that is to be done."""
    optim = job.config.optim
    return learning_rate(
        horizon.done,
        max_steps=horizon.total,
        peak=optim.lr,
        warmup_fraction=optim.warmup_fraction,
        final_fraction=optim.final_fraction,
        kind=optim.schedule,
        decay_fraction=optim.decay_share,
    )


def resume(trainer: Trainer) -> None:
    """Go on from the latest saved state, if there is one; all processes call it."""
    parallel, folder = trainer.parallel, trainer.folder
    steps = parallel.on_main(folder.steps)
    if steps:
        trainer.counters = load_state(folder, steps[-1], parallel, trainer.drafter, trainer.optimizer, trainer.average)
        trainer.feed.resume(trainer.counters)
    parallel.on_main(lambda: folder.cut_metrics(trainer.counters.step if steps else -1))


def _timed(steps: Iterator[Future[list[PackedRow]] | None], meter: Meter) -> Iterator[Future[list[PackedRow]] | None]:
    """The same; the time until each is there counts as waiting for data."""
    while True:
        t0 = time.perf_counter()
        try:
            future = next(steps)
        except StopIteration:
            return
        finally:
            meter.data_wait_s += time.perf_counter() - t0
        yield future


def _wait(trainer: Trainer, reporter: Reporter, meter: Meter, argv: list[str] | None, *, stop_asked: bool) -> bool:
    """While a spool has no further step: save where that makes room; returns whether to stop, in all processes."""
    step = trainer.counters.step
    if meter.is_wait_worth_a_line():
        reporter.say(f"{trainer.feed.words} ({step} steps done)")
    stops = trainer.parallel.sum([float(stop_asked)])[0] > 0
    is_saved = step == 0 or step in trainer.parallel.on_main(trainer.folder.steps)[-1:]
    if not is_saved and (stops or trainer.feed.wants_save(step)):
        with meter.paused():
            save(trainer, argv)
    if stops:
        reporter.say(f"stopped at step {step} as asked; the same command goes on from there")
    return stops


def _close(trainer: Trainer, reporter: Reporter, argv: list[str] | None) -> None:
    """Replay and save at the end of a spool, where it was not known to be the end before."""
    step = trainer.counters.step
    if trainer.validation is not None and trainer.counters.last_replay.get("step") != step:
        record_replay(trainer, reporter, argv)
    if step not in trainer.parallel.on_main(trainer.folder.steps)[-1:]:
        save(trainer, argv)
    trainer.feed.release(step)


def _take(future: Future[list[PackedRow]]) -> tuple[list[PackedRow], KitError | None]:
    try:
        return future.result(), None
    except KitError as error:
        return [], error


def _log(trainer: Trainer, reporter: Reporter, meter: Meter, lr: float, result: StepResult) -> None:
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if trainer.flex else None
    values = {
        **meter.values(),
        "step": trainer.counters.step,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "skipped_steps": trainer.counters.skipped_steps,
        "unreadable_rows": trainer.counters.unreadable_rows,
        "peak_gib": peak_gib,
    }
    horizon = trainer.feed.horizon(trainer.counters.step)
    is_exact = trainer.job.spool is None
    reporter.say(step_line(values, trainer.job.max_steps if is_exact else f"~{horizon.steps or '?'}"))
    trainer.parallel.on_main(lambda: reporter.record("train", trainer.counters.step, values))
    meter.reset()
