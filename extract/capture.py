"""What both engines share: the job they are given and what they report while they work."""

from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Where the target is, where rows go, and within which limits."""

    spec: TargetSpec
    """The target."""
    header: ShardsHeader
    """Header of the shards."""
    folder: Path
    """Shards folder, prepared for writing."""
    share: Share = field(default_factory=Share)
    """What this process takes, which names its files."""
    max_shard_bytes: int
    """Size at which a shard is finished."""
    max_num_seqs: int
    """Conversations that the engine works on at once."""
    longest_tokens: int
    """Tokens of the longest sample at most."""
    prefix_caching: bool = False
    """Whether common beginnings of prompts are prefilled once (vLLM only)."""
    tensor_parallel_size: int = 1
    """GPUs that share the target (vLLM only)."""
    workers_per_gpu: int = 1
    """Engines that share the GPU, each in a process of its own (vLLM only)."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that these engines may take together (vLLM only)."""
    max_num_batched_tokens: int | None = None
    """Tokens of one engine step at most; None: the engine's default (vLLM only)."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    verbose: bool = False
    """Let the engine say what it does, not only its errors (vLLM only)."""
    skip_errors: bool = False
    """Leave out samples at which the engine fails, instead of stopping when those in flight are done."""
    spool_bytes: int = 0
    """This process's part of a spool; 0: all shards stay. In a spool the samples keep their order."""
    keep_first: str | None = None
    """Name under which a spool's first shard is kept."""

    @property
    def captured_layer_ids(self) -> list[int]:
        """Layers whose outputs the engine is to keep; see ``ShardsHeader.captured_layer_ids``."""
        return self.header.captured_layer_ids(self.spec.num_layers)

    @property
    def writer_settings(self) -> dict[str, Any]:
        """Arguments of the ``ShardWriter`` beside folder and header."""
        settings = {**asdict(self.share), "max_shard_bytes": self.max_shard_bytes}
        if self.spool_bytes:
            settings |= {"spool_bytes": self.spool_bytes, "keep_first": self.keep_first}
        return settings


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows that have reached the writer since the last report."""

    num_rows: int
    """Rows accepted."""
    num_tokens: int
    """Their tokens, prompts included."""
    num_bytes: int
    """Size of finished shards by now, those of earlier runs included."""
    num_said: int = 0
    """Tokens that the target has said since the last report, in answers that are not finished as well."""
    num_failed: int = 0
    """Samples at which the engine has failed since the last report, and that are left out."""
    is_waiting: bool = False
    """Whether a spool is full and the trainer has to make room."""


class Capture(Protocol):
    """An engine: yields progress; on return every sample is in a finished shard, on ``close`` all that was captured.

    Samples at which the engine fails are reported as failed, and added to the summary's ``dropped``.
    """

    def __call__(self, job: Job, samples: list[Any], summary: dict[str, Any]) -> Generator[Progress, None, None]:
        """Capture ``samples`` and journal ``summary``."""
        ...
