"""Bytes that a run will take, from shapes alone: memory of each process by part, and disk."""

from dataclasses import dataclass

import torch

from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig

from .job import Job
from .losses import CHUNK_BYTES

GIB = 2**30
OFFLOAD_BUCKET = 500_000_000
"""Gradients that DeepSpeed's ZeRO 2 holds on the device on their way to host memory (its ``reduce_bucket_size``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What training would run on."""

    num_processes: int
    on_gpu: bool
    bf16: bool
    """Whether it computes in bfloat16, with float32 master weights."""

    @property
    def value_bytes(self) -> int:
        """Bytes of a value that is computed with."""
        return 2 if self.bf16 else 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """One way of sharing out what training keeps."""

    name: str
    stage: int
    """ZeRO stage; 0: each process keeps all."""
    offloads: bool = False
    """Whether the optimizer's state lies in host memory."""


SHARDINGS = (
    Sharding(name="no ZeRO, DDP", stage=0),
    Sharding(name="ZeRO 1", stage=1),
    Sharding(name="ZeRO 2", stage=2),
    Sharding(name="ZeRO 3, FSDP2", stage=3),
    Sharding(name="ZeRO 2 offload", stage=2, offloads=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBytes:
    """Bytes of one process, by part."""

    weights: int
    """The drafter's weights, with the float32 master weights of mixed precision."""
    gradients: int
    moments: int
    """The optimizer's two moments."""
    activations: int
    """What one packed row keeps for its backward pass, and a chunk of logits."""
    ends: int
    """The target's embedding and head."""
    average: int
    """The average of the weights, where one is kept."""
    host: int = 0
    """What lies in host memory instead of the device's."""

    @property
    def device(self) -> int:
        """All of it but the host's."""
        return self.weights + self.gradients + self.moments + self.activations + self.ends + self.average


def memory_bytes(job: Job, sharding: Sharding, machine: Machine) -> MemoryBytes:
    """Bytes of each process.

    Plain mixed precision keeps float32 weights and gradients; DeepSpeed's keeps both in bfloat16 beside float32 master
    weights. ZeRO 1 shares out the optimizer's state (master weights, moments), 2 gradients too, 3 weights too.
    """
    count, stage = num_parameters(job.drafter), sharding.stage
    mixed = machine.bf16 and stage > 0
    value, num_processes = 2 if mixed else 4, machine.num_processes
    shares = [num_processes if stage >= least else 1 for least in (1, 2, 3)]
    master, moments = (4 * count if mixed else 0) // shares[0], 8 * count // shares[0]
    gradients, host = value * count // shares[1], 0
    if sharding.offloads:
        # Master weights, moments and float32 gradients of this process's share; on the device gradients pass through.
        host = 16 * count // num_processes
        master, moments, gradients = 0, 0, value * min(count, OFFLOAD_BUCKET)
    return MemoryBytes(
        weights=value * count // shares[2] + master,
        gradients=gradients,
        moments=moments,
        activations=activation_bytes(job, machine),
        ends=ends_bytes(job, machine),
        average=average_bytes(job),
        host=host,
    )


def num_parameters(config: DrafterConfig) -> int:
    """Trainable values, counted without allocating them."""
    with torch.device("meta"):
        drafter = Drafter(config)
    return sum(p.numel() for p in drafter.parameters())


def ends_bytes(job: Job, machine: Machine) -> int:
    """Bytes of the target's embedding and head; tied ones are one matrix."""
    matrices = 1 if job.spec.tie_word_embeddings else 2
    return matrices * job.spec.vocab_size * job.spec.hidden_size * machine.value_bytes


def average_bytes(job: Job) -> int:
    """Bytes of the float32 average of the weights, 0 where none is kept; each process holds it whole."""
    return 4 * num_parameters(job.drafter) if job.config.optim.ema_decay else 0


def state_bytes(job: Job) -> int:
    """Bytes on disk of one trainer state and its checkpoint: float32 weights, two moments, bfloat16 weights."""
    return (12 + 2) * num_parameters(job.drafter) + average_bytes(job)


def activation_bytes(job: Job, machine: Machine) -> int:
    """Rough bytes of what one packed row keeps for its backward pass, and of the chunk of logits that is at work.

    On CPUs attention is torch's own: dense masks, which each layer turns into numbers, and keys and values once for each
    query head.
    """
    config, data = job.drafter, job.config.data
    slots, tokens, layers = data.anchors * config.block_size, data.seq_len, config.num_hidden_layers
    width, key_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    per_slot = layers * (8 * config.hidden_size + 2 * width + 2 * key_width + 4 * config.intermediate_size)
    per_token = (config.num_taps + 3) * config.hidden_size + layers * 2 * key_width
    kept = machine.value_bytes * (slots * (per_slot + 3 * config.hidden_size) + tokens * per_token)
    if machine.on_gpu:
        return kept + 2 * CHUNK_BYTES["cuda"]
    pairs, kinds = slots * (tokens + slots), len(set(zip(config.layer_types, config.layer_causal, strict=True)))
    dense = pairs * (kinds + 4 * layers) + 4 * layers * 2 * width * (tokens + slots)
    return kept + dense + 2 * CHUNK_BYTES["cpu"]
