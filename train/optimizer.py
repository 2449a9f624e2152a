"""The optimizer: AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest."""

from typing import Any

import torch
from torch import nn

from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError

from .settings import OptimSettings

RATE_RATIO = "rate_ratio"
"""Key of a parameter group whose learning rate is a multiple of the schedule's."""


def make_optimizer(drafter: Drafter, optim: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer of a run; norms are not decayed."""
    if optim.kind == "adamw":
        return _adamw(list(drafter.parameters()), optim)
    inner = [p for p in drafter.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in inner}
    muon = torch.optim.Muon(
        [{"params": inner, RATE_RATIO: optim.muon_peak / optim.lr}],
        lr=optim.muon_peak,
        weight_decay=optim.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # a matrix of any shape moves as far as AdamW would move it
    )
    return MuonWithAdamW(muon, _adamw([p for p in drafter.parameters() if id(p) not in taken], optim))


def _adamw(parameters: list[nn.Parameter], optim: OptimSettings) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim > 1]
    norms = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step; Muon's is the same multiple of it all the time."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_RATIO, 1.0)


def require_possible(optim: OptimSettings, zero_stage: int | None, *, fsdp: bool = False) -> None:
    """Refuse what cannot be done right under DeepSpeed or FSDP.

    Args:
        optim: the settings.
        zero_stage: DeepSpeed's ZeRO stage, None without DeepSpeed.
        fsdp: whether FSDP cuts the weights.

    Raises:
        KitError: Muon under DeepSpeed, or an average of weights that no process holds whole.
    """
    if fsdp and (optim.kind == "muon" or optim.ema_decay):
        setting = "optim.kind is muon" if optim.kind == "muon" else f"optim.ema_decay is {optim.ema_decay}"
        raise KitError(
            f"{setting} but under FSDP no process holds the whole weights, which that needs; "
            "launch with configs/accelerate/ddp.yaml, or take adamw without an average"
        )
    if optim.kind == "muon" and zero_stage is not None:
        raise KitError(
            f"optim.kind is muon but the launcher uses DeepSpeed (ZeRO {zero_stage}), which cuts matrices into flat "
            "pieces, while Muon needs whole ones; set optim.kind to adamw, or launch with configs/accelerate/ddp.yaml"
        )
    if optim.ema_decay and zero_stage == 3:
        raise KitError(
            f"optim.ema_decay is {optim.ema_decay} but under DeepSpeed ZeRO 3 no process holds the whole weights; "
            "set it to 0, or use ZeRO 1 or 2 (configs/accelerate/zero2.yaml)"
        )


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that look like one to accelerate and to the trainer's state.

    The parameter groups are the parts' own dictionaries, so that a learning rate set here reaches them.

    Args:
        muon: of the matrices.
        adamw: of everything else.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.parts = {"muon": muon, "adamw": adamw}
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: None = None) -> None:
        """One step of both."""
        assert closure is None
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Both states, by the part's name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put both states back."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        # Loading gives the parts new dictionaries.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
