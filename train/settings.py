"""Everything that a training run can be told: frozen dataclasses whose fields are the flags."""

from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

from dflash_kit.acceptance import MAX_BUDGET
from dflash_kit.errors import require_folder_name

from .losses import default_gamma
from .optim_settings import OptimSettings, at_least

NEW_DRAFTER: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_sliding_layers": 0,
    "sliding_window": 2048,
    "sliding_causal": True,
    "full_causal": False,
    "block_size": 16,
}
"""What null stands for in ``DrafterSettings`` when a drafter begins from random weights."""
MAX_BLOCK_SIZE = 1024
"""Far more tokens than any target accepts at once; a larger block is a slip that would not fit in memory."""
MAX_SEED = 2**63 - 1
"""The largest that torch, NumPy and a signed 64-bit integer of a checkpoint all hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSettings:
    """Shape of the drafter; the rest follows from the target and the shards. With init, null keeps what it has."""

    num_hidden_layers: int | None = None
    """Layers of the drafter; null takes 5."""
    num_sliding_layers: int | None = None
    """How many of them, the first ones, see only a window of the context; null takes 0."""
    sliding_window: int | None = None
    """Window of the sliding layers, in tokens; null takes 2048."""
    sliding_causal: bool | None = None
    """Whether slots of sliding layers see only earlier slots of their block; null takes true (the serving engines'
    convention)."""
    full_causal: bool | None = None
    """The same for full layers; null takes false."""
    block_size: int | None = None
    """Anchor plus masked slots, block_size - 1 tokens are drafted; null takes 16."""
    intermediate_size: int | None = None
    """Width of the feed-forward; null takes the target's."""
    mask_token_id: int | None = None
    """Token fed to masked slots; null takes a reserved one of the target."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "intermediate_size"):
            if getattr(self, name) is not None:
                at_least(f"drafter.{name}", getattr(self, name), 1)
        if self.block_size is not None and not 2 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"drafter.block_size is {self.block_size}; allowed is 2 or more, up to {MAX_BLOCK_SIZE}")

    def given(self) -> dict[str, Any]:
        """The settings that are not left open."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """How conversations become batches."""

    seq_len: int = 4096
    """Tokens of a packed row; longer conversations are cut there, counted and reported."""
    anchors: int = 512
    """Blocks of a packed row, drawn anew each epoch."""
    rows_per_step: int = 4
    """Packed rows of an optimizer step, over all processes and accumulated micro-steps together."""
    holdout_fraction: float = 0.02
    """Share of conversations kept out of training for replay, chosen by a hash of their id."""
    feature_noise: float = 0.0
    """Standard deviation of noise on the taps, as a share of each tap's root mean square."""
    prefetch: int = 2
    """Optimizer steps whose rows are read ahead."""
    skip_unreadable: bool = False
    """Train on without conversations whose shard is damaged or missing; they are named and counted. false: stop there."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "anchors", "rows_per_step", "prefetch"):
            at_least(f"data.{name}", getattr(self, name), 2 if name == "seq_len" else 1)
        if not 0 <= self.holdout_fraction < 1:
            raise ValueError(f"data.holdout_fraction is {self.holdout_fraction}; allowed is 0 up to below 1")
        if not 0 <= self.feature_noise < inf:
            raise ValueError(f"data.feature_noise is {self.feature_noise}; allowed is 0 or more, and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """What is minimised."""

    kind: Literal["decay", "dpace", "kl", "tv", "lk", "lk_hybrid"] = "decay"
    """decay: cross-entropy, slot k weighs exp(-(k-1)/gamma). dpace: weights follow how likely the block survives.
    The others weigh as decay, with a distance to the target's own distribution in place of cross-entropy; they need
    shards with last hidden states. kl: forward KL. tv: total variation. lk: -log of the chance of acceptance. lk_hybrid:
    kl while that chance is low, tv when it is high."""
    gamma: float | None = None
    """Decay of the slot weights; null takes 7, 5 or 4 for blocks of 16, 10 or 8, half a block for others."""
    sample_slots: bool = False
    """Keep each slot with the probability of its weight instead of weighing it (not with dpace): the same gradient on
    average from fewer slots, which pays where the head takes most of a step, as on CPUs."""
    dpace_alpha: float = 0.5
    """Smoothing of D-PACE's survival probabilities, 0 (none) to 1 (uniform)."""
    distill_weight: float = 1.0
    """Share of the distance in the loss of kl, tv, lk and lk_hybrid; the rest is cross-entropy."""

    def __post_init__(self) -> None:
        if not 0 < self.distill_weight <= 1:
            raise ValueError(f"loss.distill_weight is {self.distill_weight}; allowed is above 0 up to 1")
        if self.distill_weight != 1 and self.kind in ("decay", "dpace"):
            raise ValueError(
                f"loss.distill_weight is {self.distill_weight} with loss.kind {self.kind}, which does not distil; "
                "leave it out, or take kl, tv, lk or lk_hybrid"
            )
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"loss.gamma is {self.gamma}; it must be above 0 (null for the default)")
        if self.sample_slots and self.kind == "dpace":
            raise ValueError("loss.sample_slots is true with loss.kind dpace, which needs every slot; set one back")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"loss.dpace_alpha is {self.dpace_alpha}; allowed is 0 to 1")

    def gamma_of(self, block_size: int) -> float:
        """The decay in force."""
        return default_gamma(block_size) if self.gamma is None else self.gamma


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Acceptance on held-out rows while training, without the target."""

    every_steps: int = 500
    """Optimizer steps between two replays; 0 replays only at the end."""
    max_rows: int = 32
    """Held-out rows that are replayed; 0 switches replay off."""
    budgets: list[int] = field(default_factory=lambda: [16, 64])
    """Tree budgets, 1 to 4096 nodes."""

    def __post_init__(self) -> None:
        at_least("replay.every_steps", self.every_steps, 0)
        at_least("replay.max_rows", self.max_rows, 0)
        if not all(1 <= budget <= MAX_BUDGET for budget in self.budgets):
            raise ValueError(f"replay.budgets is {self.budgets}; each must be from 1 to {MAX_BUDGET}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Train a drafter from shards."""

    shards: str
    """Folder that extraction wrote, or writes (a spool), or a URL in an object store."""
    out: str
    """Folder for the finished drafter; OUT.state beside it holds the trainer's state and intermediate checkpoints.
    A link is followed: both lie where it leads."""
    target: str | None = None
    """Target folder or hub id, whose embedding and head are read; null takes the one that the shards name."""
    init: str | None = None
    """Drafter checkpoint to start from, a folder or hub id, published or of this trainer; null starts from random
    weights. Taps, layer types, windows, causal flags, mask token, block size and sizes are kept."""
    eval_shards: str | None = None
    """Shards (folder or URL) to replay on; null holds a share of the training shards out (of a spool, rows of the first
    window, which are copied to OUT.state/held-out)."""
    spool: bool | None = None
    """true: train while an extractor writes with --spool_bytes, which may begin later, and delete shards once a saved
    state is past them; training ends with the spool. false: train on the shards that are there. null: true for a folder
    whose manifest says that it is a spool."""
    spool_timeout_s: float = 600.0
    """How long to wait for a spool at which no extractor is at work and whose end is not written, in seconds."""
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    seed: int = 0
    """Seed of weights, order, anchors and noise."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 with float32 master weights on GPUs, float32 on CPUs."""
    log_every_steps: int = 10
    """Optimizer steps between two lines of metrics."""
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Where the numbers of metrics.jsonl also go. tensorboard: files in OUT.state/tensorboard. wandb: W&B, project
    WANDB_PROJECT or dflash-kit. Either package must be installed."""
    save_every_steps: int = 200
    """Optimizer steps between two saved states; the last one is always saved."""
    keep_last: int = 2
    """Saved states and checkpoints that are kept, beside the best checkpoint."""
    cpu_threads: int | None = None
    """Threads of a process that trains on the CPU; null leaves it to OMP_NUM_THREADS."""
    dry_run: bool = False
    """Print what would be trained, with sizes and memory, and stop."""

    def __post_init__(self) -> None:
        require_folder_name("out", self.out)
        for name in ("log_every_steps", "save_every_steps", "keep_last"):
            at_least(name, getattr(self, name), 1)
        if not 0 < self.spool_timeout_s < inf:
            raise ValueError(f"spool_timeout_s is {self.spool_timeout_s}; it must be above 0, and finite")
        if self.spool and self.optim.max_steps is not None:
            raise ValueError(
                f"optim.max_steps is {self.optim.max_steps} with a spool, which is trained on to its end; leave it out"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; allowed is 0 up to 2^63 - 1 ({MAX_SEED})")
        if self.cpu_threads is not None:
            at_least("cpu_threads", self.cpu_threads, 1)
