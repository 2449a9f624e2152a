"""An exponential moving average of the weights, in float32, kept beside them by every process."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class WeightAverage:
    """The average; a pure function of the weights after each step, so it is the same in every process.

    Args:
        drafter: the bare drafter, whose weights are whole; the average begins with them.
        decay: share of the average that stays when a step's weights are taken in, once the start is over.
    """

    def __init__(self, drafter: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().float().clone() for name, p in drafter.named_parameters()}

    @torch.no_grad()
    def update(self, drafter: nn.Module, num_applied: int) -> None:
        """Take in the weights after a step.

        Args:
            drafter: the bare drafter.
            num_applied: steps that changed the weights so far, this one included.
        """
        # A fixed decay would keep the first weights in the average for 1 / (1 - decay) steps.
        decay = min(self.decay, (1 + num_applied) / (10 + num_applied))
        for name, parameter in drafter.named_parameters():
            self.weights[name].lerp_(parameter.float(), 1 - decay)

    def copies(self) -> dict[str, Tensor]:
        """Copies on the CPU, named like the drafter's weights."""
        return {name: tensor.cpu().clone() for name, tensor in self.weights.items()}

    def save(self, file: Path) -> None:
        """Write the average as safetensors."""
        save_file({name: tensor.cpu() for name, tensor in self.weights.items()}, file)

    def load(self, file: Path) -> None:
        """Put a saved average back, bit for bit.

        Raises:
            OSError, KeyError, RuntimeError: a missing or damaged file, or one of another drafter.
        """
        saved = load_file(file)
        for name, tensor in self.weights.items():
            tensor.copy_(saved[name])
