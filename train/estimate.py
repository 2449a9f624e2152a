"""What a run will take, from shapes alone: parameters, tokens, steps, memory."""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig

from .job import Job
from .losses import CHUNK_BYTES
from .packing import fill_ratio, num_micro_steps, pack_epoch
from .settings import OptimSettings

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterBytes:
    """Sizes that follow from the drafter's shape."""

    parameters: int
    """Number of trainable values."""

    @property
    def checkpoint(self) -> int:
        """Bytes of a published drafter (bfloat16)."""
        return 2 * self.parameters

    @property
    def state_on_disk(self) -> int:
        """Bytes of a trainer state and its checkpoint: float32 weights, two moments, and bfloat16 weights."""
        return 12 * self.parameters + self.checkpoint

    def training(self, zero_stage: int, num_processes: int, *, bf16: bool) -> int:
        """Bytes of weights, gradients and optimizer state in each process.

        Plain mixed precision keeps float32 weights and gradients; DeepSpeed's keeps both in bfloat16 beside float32
        master weights. ZeRO 1 shards the optimizer state, 2 gradients too, 3 weights too.
        """
        value = 2 if bf16 and zero_stage else 4
        weights, gradients = value * self.parameters, value * self.parameters
        optimizer = (12 if bf16 and zero_stage else 8) * self.parameters
        shares = [1, 1, 1]
        for i in range(min(zero_stage, 3)):
            shares[i] = num_processes
        return optimizer // shares[0] + gradients // shares[1] + weights // shares[2]


def drafter_shape_bytes(config: DrafterConfig) -> DrafterBytes:
    """Count the parameters without allocating them."""
    with torch.device("meta"):
        drafter = Drafter(config)
    return DrafterBytes(parameters=sum(p.numel() for p in drafter.parameters()))


def average_bytes(job: Job) -> int:
    """Bytes of the float32 average of the weights, 0 where none is kept; each process holds it whole."""
    return 4 * drafter_shape_bytes(job.drafter).parameters if job.config.optim.ema_decay else 0


def state_bytes(job: Job) -> int:
    """Bytes on disk of one trainer state and its checkpoint."""
    return drafter_shape_bytes(job.drafter).state_on_disk + average_bytes(job)


def activation_bytes(job: Job, *, bf16: bool) -> int:
    """Rough bytes of one packed row's activations: kept tensors of every layer, dense masks on CPUs, a logit chunk."""
    config, data = job.drafter, job.config.data
    value = 2 if bf16 else 4
    slots, tokens = data.anchors * config.block_size, data.seq_len
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    per_slot = config.num_hidden_layers * (8 * config.hidden_size + attention + 4 * config.intermediate_size)
    groups = 2 * config.num_key_value_heads * config.head_dim
    per_token = config.num_taps * config.hidden_size + 3 * config.hidden_size + config.num_hidden_layers * groups
    masks = 0 if bf16 else 2 * slots * (tokens + slots)
    chunks = 2 * CHUNK_BYTES["cuda" if bf16 else "cpu"]
    return value * (slots * (per_slot + 3 * config.hidden_size) + tokens * per_token) + masks + chunks


def plan_lines(job: Job, *, num_processes: int, bf16: bool) -> list[str]:
    """What ``--dry_run`` prints."""
    data, config, drafter = job.config.data, job.config, job.drafter
    lengths = [job.plan.lengths[i] for i in range(len(job.plan.lengths))]
    packed = pack_epoch(lengths, data.seq_len, seed=config.seed, epoch=0)
    sizes = drafter_shape_bytes(drafter)
    micro = num_micro_steps(data.rows_per_step, num_processes)
    ends = 2 if job.spec.tie_word_embeddings else 4
    ends_bytes = ends // 2 * job.spec.vocab_size * job.spec.hidden_size * (2 if bf16 else 4)
    kinds = [f"{kind.split('_')[0]}{' causal' if causal else ''}" for kind, causal in _layers(drafter)]
    lines = [
        f"target       {job.spec.name} ({job.spec.num_layers} layers, hidden {job.spec.hidden_size}, "
        f"vocabulary {job.spec.vocab_size})",
        f"taps         layers {list(drafter.target_layer_ids)}",
        f"drafter      {sizes.parameters:,} parameters; layers: {', '.join(kinds)}; block {drafter.block_size}; "
        f"mask token {drafter.mask_token_id}",
        f"rows         {len(job.train_rows):,} to train on, {len(job.eval_rows):,} to replay, {sum(lengths):,} tokens",
        f"packing      {len(packed):,} rows of {data.seq_len} tokens an epoch, "
        f"{fill_ratio(lengths, packed, data.seq_len):.1%} filled, up to {data.anchors} blocks each",
        f"steps        {job.max_steps:,} of {data.rows_per_step} packed rows "
        f"({num_processes} processes x {micro} micro-steps)",
        f"loss         {config.loss.kind}, gamma {job.gamma:g}; {_optimizer_words(config.optim)}",
    ]
    if job.spool is not None:
        lines[3:6] = job.spool.lines(data.rows_per_step, num_processes, micro)
    if job.origin is not None:
        lines.insert(2, f"start        {job.origin.name} (weights sha256 {job.origin.weights_sha256[:16]}…)")
    if job.num_long_rows:
        lines.append(f"cut          {job.num_long_rows:,} conversations are longer than {data.seq_len} tokens")
    fixed = ends_bytes + activation_bytes(job, bf16=bf16) + average_bytes(job)
    for stage in (0, 1, 2, 3):
        total = sizes.training(stage, num_processes, bf16=bf16) + fixed
        lines.append(
            f"memory       {'no ZeRO' if stage == 0 else f'ZeRO {stage} '}: about {total / GIB:.2f} GiB a process"
        )
    lines.append(f"disk         {state_bytes(job) * (config.keep_last + 1) / GIB:.2f} GiB for trainer state")
    return lines


def _optimizer_words(optim: OptimSettings) -> str:
    words = [f"AdamW {optim.lr:g}", f"{optim.schedule} schedule", f"clip {optim.clip:g}"]
    if optim.kind == "muon":
        words.insert(0, f"Muon {optim.muon_peak:g}")
    if optim.ema_decay:
        words.append(f"average of weights {optim.ema_decay:g}")
    return ", ".join(words)


def _layers(config: DrafterConfig) -> Any:
    return zip(config.layer_types, config.layer_causal, strict=True)
