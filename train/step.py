"""One optimizer step: forward, loss, backward, clipped update; read ``train_step`` from top to bottom."""

from math import isfinite

import torch

from dflash_kit.errors import KitError
from dflash_kit.target_ends import TargetEnds

from .batches import PackedRow
from .clipping import can_fuse, clipped_step
from .distill import slot_distillation
from .losses import Objective, slot_cross_entropy
from .optimizer import set_rate
from .sharding import gathered
from .sums import PendingStep, StepResult, StepSums
from .trainer import Trainer


def train_step(
    trainer: Trainer, rows: list[PackedRow], lr: float, *, error: KitError | None = None, stop_asked: bool = False
) -> StepResult:
    """``begin_step``, and wait for its numbers."""
    return begin_step(trainer, rows, lr, error=error, stop_asked=stop_asked).result()


def begin_step(
    trainer: Trainer, rows: list[PackedRow], lr: float, *, error: KitError | None = None, stop_asked: bool = False
) -> PendingStep:
    """One optimizer step over the packed rows of all processes, normalised by their global weight.

    One process with AdamW never waits for a GPU in here.

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
    unreadable = [found for row in rows for found in row.unreadable]
    weight_sum, num_errors, stops, num_unreadable = parallel.sum(
        [local_weight, float(error is not None), float(stop_asked), float(len(unreadable))]
    )
    if error is not None:
        raise error
    if num_errors:
        raise KitError("another process could not read its rows; see its message")
    if num_unreadable:
        unreadable = [found for part in parallel.gather(unreadable) for found in part]
    set_rate(trainer.optimizer, lr)
    sums = StepSums(trainer.job.drafter.num_draft_tokens)
    grad_norm: torch.Tensor | float | None = None
    applied = False
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
    if weight_sum > 0:  # else nothing was computed
        sums.flops = sum(row.flops for row in rows)
    return sums.send(
        parallel,
        weight_sum,
        grad_norm=grad_norm,
        applied=applied,
        stop_asked=stops > 0,
        unreadable=tuple(unreadable),
    )


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
    numerator = job.objective.numerator(
        losses, row.weights, row.slots, layout.block_size, num_blocks=layout.anchors.numel()
    )
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


def _apply(trainer: Trainer) -> tuple[torch.Tensor | float, bool]:
    """Clip and step unless the gradient is not finite.

    Returns:
        The gradient's norm, the same in every process, and whether the step was done; where the norm is a tensor, the
        device decides that by itself.
    """
    parallel, optimizer, clip = trainer.parallel, trainer.optimizer, trainer.job.config.optim.clip
    parameters = list(trainer.model.parameters())
    if parallel.holds_whole_weights and can_fuse(optimizer):
        norm_there = clipped_step(optimizer, parameters, clip)
        optimizer.zero_grad(set_to_none=True)
        return norm_there, False
    norm = float(gathered(parallel.accelerator.clip_grad_norm_(parameters, clip)))
    if parallel.is_deepspeed:  # its engine has clipped, checked and stepped in the last backward pass
        return norm, not optimizer.step_was_skipped
    if isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, isfinite(norm)
