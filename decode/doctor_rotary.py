"""Rotary embeddings that a drafter should not have and may have been trained with: partial ones, scaled ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_kit.drafter_config import DrafterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryKind:
    """Frequencies of a rotary embedding."""

    inverse_frequencies: tuple[float, ...]
    """One for each pair of dimensions that is turned, fastest first."""
    scale: float = 1.0
    """Factor of cosine and sine, which YaRN has."""

    @classmethod
    def partial(cls, config: DrafterConfig, factor: float) -> "RotaryKind":
        """Only the first ``factor`` of a head's dimensions are turned."""
        num_turned = int(config.head_dim * factor) // 2 * 2
        exponents = torch.arange(0, num_turned, 2, dtype=torch.float32) / num_turned
        return cls(inverse_frequencies=tuple((1.0 / config.rope_theta**exponents).tolist()))

    @classmethod
    def scaled(cls, config: DrafterConfig, parameters: dict[str, Any]) -> "RotaryKind | None":
        """As transformers scales them (``rope_parameters`` of YaRN, Llama 3, …); None where it does not know the kind."""
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        compute = ROPE_INIT_FUNCTIONS.get(parameters.get("rope_type", "default"))
        if compute is None:
            return None
        like = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_theta": config.rope_theta, **parameters},
        )
        try:
            frequencies, scale = compute(like, torch.device("cpu"))
        except (KeyError, TypeError, ValueError, AttributeError):  # parameters that are not complete
            return None
        return cls(inverse_frequencies=tuple(frequencies.tolist()), scale=float(scale))


class Rotary(nn.Module):
    """The embedding of a ``RotaryKind``; unturned dimensions come last among the pairs (see ``paired_weights``)."""

    def __init__(self, kind: RotaryKind, head_dim: int) -> None:
        super().__init__()
        missing = head_dim // 2 - len(kind.inverse_frequencies)
        self.frequencies, self.scale = (*kind.inverse_frequencies, *[0.0] * missing), kind.scale

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (L, d), of integer positions (L,)."""
        angles = positions[:, None].float() * torch.tensor(self.frequencies, device=positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def paired_weights(weights: dict[str, Tensor], kind: RotaryKind, head_dim: int) -> dict[str, Tensor]:
    """Weights with the dimensions of queries and keys in another order, which changes no attention score.

    A partial embedding turns dimension i with i + r/2, where r dimensions are turned; the drafter turns i with i + d/2. So each
    dimension goes where its partner is.
    """
    turned = len(kind.inverse_frequencies)
    if 2 * turned == head_dim:
        return weights
    rest = torch.arange(2 * turned, head_dim)
    half = len(rest) // 2
    order = torch.cat([torch.arange(turned), rest[:half], torch.arange(turned, 2 * turned), rest[half:]])
    found = dict(weights)
    for name, tensor in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            found[name] = tensor[order.to(tensor.device)]
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            found[name] = tensor.unflatten(0, (-1, head_dim))[:, order.to(tensor.device)].flatten(0, 1)
    return found
