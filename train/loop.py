"""The training loop: read ``train`` from top to bottom, then ``train_step``.

Every process runs the same steps. What one of them finds out alone (a damaged shard, a request to stop) travels with
the sums that are exchanged anyway, so that they always stop together.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from math import isfinite

import torch
from torch import nn

from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.target_ends import TargetEnds

from .average import WeightAverage
from .batches import PackedRow
from .clipping import can_fuse, clipped_step
from .counters import Counters
from .distill import slot_distillation
from .feed import Feed
from .job import Job
from .losses import Objective, slot_cross_entropy
from .optimizer import set_rate
from .outcome import finish, record_replay, save
from .parallel import Parallel
from .progress import Meter, Reporter, step_line
from .schedule import Horizon, learning_rate
from .sharding import gathered
from .state import RunFolder, load_state
from .stopping import StopRequest
from .sums import StepResult, StepSums
from .tracking import Tracker
from .validation import Validation


@dataclass(kw_only=True, slots=True)
class Trainer:
    """The moving parts of a run."""

    job: Job
    parallel: Parallel
    ends: TargetEnds
    drafter: Drafter
    """The bare drafter; ``model`` is what accelerate made of it."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    """What replay and checkpoints use instead of the weights, where it is kept."""
    feed: Feed
    validation: Validation | None
    folder: RunFolder
    counters: Counters

    @property
    def flex(self) -> bool:
        """FlexAttention on GPUs; on CPUs it has no backward pass."""
        return self.parallel.device.type == "cuda"


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
    meter = Meter(job.drafter.num_draft_tokens)
    if counters.step:
        reporter.say(f"resumed at step {counters.step}" + (f" of {job.max_steps}" if job.spool is None else ""))
    with reporter, StopRequest() as stop:
        if job.origin is not None and counters.step == 0:
            with meter.paused():
                record_replay(trainer, reporter, argv)
        for future in _timed(feed.steps(counters.step, job.max_steps), meter):
            if future is None:  # a spool, whose extractor is behind
                if _wait(trainer, reporter, meter, argv, stop_asked=stop.asked):
                    return 0
                continue
            t0 = time.perf_counter()
            rows, error = _take(future)
            meter.data_wait_s += time.perf_counter() - t0
            lr = rate_at(job, feed.horizon(counters.step))
            result = train_step(trainer, rows, lr, error=error, stop_asked=stop.asked)
            _count(counters, result)
            if result.applied and trainer.average is not None:
                trainer.average.update(trainer.drafter, counters.step - counters.skipped_steps)
            _measure(meter, result)
            max_steps = feed.horizon(counters.step).steps
            reporter.advance(counters.step, result.loss_sum / max(result.weight_sum, 1e-9), max_steps)
            last = feed.is_last(counters.step)
            if last or counters.step % config.log_every_steps == 0:
                _log(trainer, reporter, meter, lr, result)
            _give_up_when_hopeless(trainer, rows)
            if last:
                _require_applied(counters)
            every = config.replay.every_steps
            with meter.paused():
                if last or (every and counters.step % every == 0):
                    record_replay(trainer, reporter, argv)
                due = counters.step % config.save_every_steps == 0 or feed.wants_save(counters.step)
                if last or result.stop_asked or due:
                    save(trainer, argv)
            if result.stop_asked and not last:
                reporter.say(f"stopped at step {counters.step} as asked; the same command goes on from there")
                return 0
        _require_applied(counters)
        if job.spool is not None:
            with meter.paused():
                _close(trainer, reporter, argv)
        finish(trainer, reporter, argv)
    return 0


def train_step(
    trainer: Trainer, rows: list[PackedRow], lr: float, *, error: KitError | None = None, stop_asked: bool = False
) -> StepResult:
    """One optimizer step over the packed rows of all processes, normalised by their global weight.

    Args:
        trainer: the run.
        rows: this process's packed rows, one per micro-step.
        lr: learning rate of the step.
        error: what went wrong when they were read.
        stop_asked: whether this process was asked to stop.

    Raises:
        KitError: ``error``, here or in another process.
    """
    parallel, objective = trainer.parallel, trainer.job.objective
    local_weight = sum(float(objective.denominator(row.weights)) for row in rows)
    weight_sum, num_errors, stops = parallel.sum([local_weight, float(error is not None), float(stop_asked)])
    if error is not None:
        raise error
    if num_errors:
        raise KitError("another process could not read its rows; see its message")
    set_rate(trainer.optimizer, lr)
    sums = StepSums(trainer.job.drafter.num_draft_tokens)
    grad_norm, applied = None, False
    if weight_sum > 0:
        # Backends average over processes and accelerate over micro-steps; the weighted sum is wanted.
        scale = parallel.world_size * parallel.num_micro_steps / weight_sum
        for i, row in enumerate(rows):
            with parallel.accumulate(trainer.model, last=i == len(rows) - 1):
                numerator = forward_loss(trainer, row, sums)
                parallel.accelerator.backward(numerator * scale)
        grad_norm, applied = _apply(trainer)
    sums.tokens = sum(row.num_tokens for row in rows)
    sums.cut_tokens = sum(row.num_cut_tokens for row in rows)
    return sums.result(parallel, weight_sum, grad_norm=grad_norm, applied=applied, stop_asked=stops > 0)


def forward_loss(trainer: Trainer, row: PackedRow, sums: StepSums) -> torch.Tensor:
    """Weighted sum of one packed row's slot losses."""
    job, ends = trainer.job, trainer.ends
    row = row.to(trainer.parallel.device, ends.head.dtype)
    layout = row.layout
    hidden = trainer.model(
        noise_embeddings(row, ends, job.drafter.mask_token_id),
        row.features[None],
        torch.cat([layout.positions, layout.slot_positions])[None],
        trainer.drafter.layer_masks(layout, flex=trainer.flex),
    )
    losses, correct = slot_losses(hidden[0, row.slots], ends, row, job.objective)
    numerator = job.objective.numerator(losses, row.weights, row.slots, layout.block_size)
    sums.add(numerator.detach(), correct, row.depths)
    return numerator


def slot_losses(
    hidden: torch.Tensor, ends: TargetEnds, row: PackedRow, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss (M,) float32 and hit (M,) of each weighted slot, from the drafter's hidden states (M, D)."""
    if not objective.needs_target:
        return slot_cross_entropy(hidden, ends, row.labels)
    assert row.last_hidden is not None
    states = row.last_hidden[row.label_places - 1]
    return slot_distillation(hidden, states, ends, row.labels, kind=objective.kind, share=objective.distill_weight)


def noise_embeddings(row: PackedRow, ends: TargetEnds, mask_token_id: int) -> torch.Tensor:
    """(1, N * B, D): the anchor's embedding in slot 0 of each block, the mask's in the others."""
    anchors = row.layout.anchors
    ids = torch.full((len(anchors), row.layout.block_size), mask_token_id, device=anchors.device)
    ids[:, 0] = row.token_ids[anchors]
    return ends.embed(ids.flatten())[None]


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


def _apply(trainer: Trainer) -> tuple[float, bool]:
    """Clip and step unless the gradient is not finite; its norm is the same in every process."""
    parallel, optimizer, clip = trainer.parallel, trainer.optimizer, trainer.job.config.optim.clip
    parameters = list(trainer.model.parameters())
    if parallel.holds_whole_weights and can_fuse(optimizer):
        norm = float(clipped_step(optimizer, parameters, clip))
        optimizer.zero_grad(set_to_none=True)
        return norm, isfinite(norm)
    norm = float(gathered(parallel.accelerator.clip_grad_norm_(parameters, clip)))
    if parallel.is_deepspeed:  # its engine has clipped, checked and stepped in the last backward pass
        return norm, not optimizer.step_was_skipped
    if isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, isfinite(norm)


def _take(future: Future[list[PackedRow]]) -> tuple[list[PackedRow], KitError | None]:
    try:
        return future.result(), None
    except KitError as error:
        return [], error


def _count(counters: Counters, result: StepResult) -> None:
    counters.step += 1
    counters.tokens += result.tokens
    counters.cut_tokens += result.cut_tokens
    counters.skipped_steps += not result.applied
    counters.bad_in_a_row = 0 if result.applied else counters.bad_in_a_row + 1


def _measure(meter: Meter, result: StepResult) -> None:
    meter.steps += 1
    meter.tokens += result.tokens
    if result.applied:
        meter.loss_sum += result.loss_sum
        meter.weight_sum += result.weight_sum
        meter.add_slots(result.correct, result.counted)


def _log(trainer: Trainer, reporter: Reporter, meter: Meter, lr: float, result: StepResult) -> None:
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if trainer.flex else None
    values = {
        **meter.values(),
        "step": trainer.counters.step,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "skipped_steps": trainer.counters.skipped_steps,
        "peak_gib": peak_gib,
    }
    horizon = trainer.feed.horizon(trainer.counters.step)
    is_exact = trainer.job.spool is None
    reporter.say(step_line(values, trainer.job.max_steps if is_exact else f"~{horizon.steps or '?'}"))
    reporter.record("train", trainer.counters.step, values)
    meter.reset()


def _give_up_when_hopeless(trainer: Trainer, rows: list[PackedRow]) -> None:
    """Stop after too many bad steps in a row; the counters are equal in every process."""
    counters, limit = trainer.counters, trainer.job.config.optim.max_bad_steps
    if counters.bad_in_a_row < limit:
        return
    ids = [row_id for row in rows for row_id in row.ids]
    everyone = [row_id for part in trainer.parallel.gather(ids) for row_id in part]
    raise KitError(
        f"{limit} steps in a row (up to step {counters.step}) had a non-finite loss or gradient, or no supervised "
        f"token; the last one had rows {', '.join(everyone[:8])}; lower optim.lr or look at these rows "
        f"(the last saved state in {trainer.folder.state} is intact)"
    )


def _require_applied(counters: Counters) -> None:
    """Refuse to call a drafter trained that no step has changed; the counters are equal in every process."""
    if counters.skipped_steps == counters.step:
        raise KitError(
            f"none of the run's {counters.step} steps was applied: each had a non-finite loss or gradient, or no "
            "supervised token, so there is no drafter to finish; look for NaN in the shards' hidden states, or lower "
            "optim.lr, and choose another --out"
        )
