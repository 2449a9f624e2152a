"""The target's token behind every row, drawn on the device: nothing returns to the host, so it can be part of a CUDA graph.

Adding a Gumbel variable to every logit and taking the largest draws from their softmax (Gumbel-max). A fresh variable for every
row and round makes each row's token an independent sample, as `sampling.choose_tokens` has it.
"""

import torch
from torch import Tensor

from .sampling import Sampling


class RowSampler:
    """Draws the tokens of one kind of pass.

    Its numbers come from the device's default generator, whose state CUDA graphs follow: seed that one
    (``seed_device``) before a response, not a generator of your own.

    Args:
        sampling: temperature above 0, and truncation.
        like: (R, V) logits of the pass; the noise takes the same shape in float32.
    """

    def __init__(self, sampling: Sampling, like: Tensor) -> None:
        assert not sampling.is_greedy, "greedy tokens are not drawn"
        self._sampling = sampling
        self._noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)

    def draw(self, logits: Tensor, out: Tensor) -> Tensor:
        """Tokens ``out`` (n,) int64 of logits (n, V), n at most R."""
        noise = self._noise[: len(logits)]
        noise.exponential_()
        return torch.argmax(self._sampling.scores(logits).sub_(noise.log_()), dim=-1, out=out)


def seed_device(device: torch.device, seed: int) -> None:
    """Set the default generator of a device; for a GPU also the numbers that captured graphs will draw."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
