"""What a training run can be told of its optimizer and its schedule."""

from dataclasses import dataclass
from math import inf
from typing import Literal

DECAY_FRACTION = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings:
    """The optimizer and its schedule. DeepSpeed's own optimizer, scheduler and clipping sections stay empty or "auto"."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the layers, AdamW for fc and norms; not under DeepSpeed."""
    lr: float = 6e-4
    """Peak learning rate of AdamW."""
    muon_lr: float | None = None
    """Peak learning rate of Muon, whose updates are scaled to the size of AdamW's; null takes lr."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the projections; norms have none."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    clip: float = 1.0
    """Largest global gradient norm."""
    warmup_fraction: float = 0.04
    """Share of the steps in which the rate rises."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """What follows the warm-up. cosine, linear: down from there on. wsd: stable, then linearly down."""
    decay_fraction: float | None = None
    """Share of the steps in which wsd goes down; null takes 0.2."""
    final_fraction: float = 0.0
    """Rate at the end as a share of the peak."""
    ema_decay: float = 0.0
    """Decay per step of a float32 average of the weights, which replay and the finished drafter then use; 0: none.
    It starts lower, (1 + step) / (10 + step), so that the first weights are forgotten. Not under ZeRO 3."""
    epochs: int = 6
    """Passes over the rows; without effect where max_steps is given, and on a spool, where extraction has the epochs."""
    max_steps: int | None = None
    """Optimizer steps; null takes what the epochs need. Not for a spool, which is trained on to its end."""
    max_bad_steps: int = 5
    """Steps in a row with a non-finite loss or gradient after which the run stops; each is skipped."""

    def __post_init__(self) -> None:
        for name in ("epochs", "max_bad_steps"):
            at_least(f"optim.{name}", getattr(self, name), 1)
        if self.max_steps is not None:
            at_least("optim.max_steps", self.max_steps, 1)
        if not 0 < self.lr < inf or not self.clip > 0:
            raise ValueError(
                f"optim.lr is {self.lr} and optim.clip is {self.clip}; both must be above 0, the rate finite"
            )
        if not 0 <= self.weight_decay < inf:
            raise ValueError(f"optim.weight_decay is {self.weight_decay}; allowed is 0 (none) or more, and finite")
        if not 0 <= self.warmup_fraction <= 1 or not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"optim.warmup_fraction is {self.warmup_fraction} and optim.final_fraction is {self.final_fraction}; "
                "both lie between 0 and 1"
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"optim.ema_decay is {self.ema_decay}; allowed is 0 (none) up to below 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; allowed is 0 up to below 1")
        self._check_muon()
        self._check_decay()

    def _check_muon(self) -> None:
        if self.muon_lr is None:
            return
        if not 0 < self.muon_lr < inf:
            raise ValueError(f"optim.muon_lr is {self.muon_lr}; it must be above 0 and finite (null for optim.lr)")
        if self.kind != "muon":
            raise ValueError(f"optim.muon_lr is {self.muon_lr} with optim.kind {self.kind}; only muon uses it")

    def _check_decay(self) -> None:
        if self.schedule != "wsd":
            if self.decay_fraction is not None:
                raise ValueError(
                    f"optim.decay_fraction is {self.decay_fraction} with optim.schedule {self.schedule}; only wsd uses it"
                )
            return
        if self.decay_share <= 0 or self.decay_share + self.warmup_fraction > 1 + 1e-9:
            raise ValueError(
                f"optim.decay_fraction is {self.decay_share} with optim.warmup_fraction {self.warmup_fraction}; "
                "it must be above 0, and both together at most 1"
            )

    @property
    def decay_share(self) -> float:
        """The share of the steps in which wsd goes down."""
        return DECAY_FRACTION if self.decay_fraction is None else self.decay_fraction

    @property
    def muon_peak(self) -> float:
        """Muon's peak learning rate."""
        return self.lr if self.muon_lr is None else self.muon_lr


def at_least(name: str, value: int, lowest: int) -> None:
    """Refuse a setting below its lowest value; ``ValueError`` names both."""
    if value < lowest:
        raise ValueError(f"{name} is {value}; allowed is {lowest} or more")
