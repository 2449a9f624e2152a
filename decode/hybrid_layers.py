"""Layers of a hybrid target as data: fused weights taken from transformers' modules, and what is refused.

Shape legend: D hidden size, H (value or query) heads, Dv value width, C convolution channels, W convolution kernel,
G key-value heads, d head dimension, F feed-forward width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_kit.errors import KitError
from dflash_kit.target import decoder_layers

from .feed_forward import FeedForward, feed_forward, unsupported_feed_forwards
from .fused_weights import fuse_weights, is_plain

FAMILIES = ("Qwen3NextDecoderLayer", "Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer")


@dataclass(slots=True)
class MixerLayer:
    """Weights of one layer; those of the token mixer that it has not are None."""

    input_norm: Tensor
    post_norm: Tensor
    projection: Tensor
    """Linear: (C + H Dv + 2 H, D). Attention: ((2 H + 2 G) * d, D)."""
    out: Tensor
    feed_forward: FeedForward
    conv_CW: Tensor | None = None
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    gate_norm: Tensor | None = None
    gains: tuple[Tensor, Tensor] | None = None
    """Query and key norm of an attention layer, float32."""

    @property
    def is_linear(self) -> bool:
        """Whether the token mixer is a Gated DeltaNet."""
        return self.conv_CW is not None

    @classmethod
    def from_module(cls, layer: Any) -> "MixerLayer":
        """Fuse one layer of transformers in place."""
        common: dict[str, Any] = {
            "input_norm": norm_gain(layer.input_layernorm),
            "post_norm": norm_gain(layer.post_attention_layernorm),
            "feed_forward": feed_forward(layer.mlp),
        }
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            return cls(
                projection=mixer_weights(mixer),
                out=mixer.out_proj.weight.detach(),
                conv_CW=mixer.conv1d.weight.detach().squeeze(1).contiguous(),
                a_log=mixer.A_log.detach(),
                dt_bias=mixer.dt_bias.detach(),
                gate_norm=mixer.norm.weight.detach(),
                **common,
            )
        attention = layer.self_attn
        return cls(
            projection=fuse_weights((attention.q_proj, attention.k_proj, attention.v_proj)),
            out=attention.o_proj.weight.detach(),
            gains=(norm_gain(attention.q_norm), norm_gain(attention.k_norm)),
            **common,
        )


@torch.no_grad()
def mixer_weights(mixer: Any) -> Tensor:
    """The input projections of a Gated DeltaNet as ``MixerLayer.projection``: queries, keys, values, gates, b, a.

    Fused in place; but a copy of Qwen3-Next's (1.7 GiB of the 80B model's 150), which go by key head and stay as they
    are for the model's own forward pass.
    """
    if not hasattr(mixer, "in_proj_qkvz"):
        return fuse_weights((mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a))
    heads, repeats = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    values = repeats * mixer.head_v_dim
    parts = [
        *mixer.in_proj_qkvz.weight.unflatten(0, (heads, -1)).split((mixer.head_k_dim,) * 2 + (values,) * 2, dim=1),
        *mixer.in_proj_ba.weight.unflatten(0, (heads, -1)).split((repeats, repeats), dim=1),
    ]
    return torch.cat([part.flatten(0, 1) for part in parts])


def norm_gain(norm: Any) -> Tensor:
    """What a norm multiplies with: these models add 1 to its weight, in float32."""
    return 1.0 + norm.weight.detach().float()


def is_hybrid(model: Any) -> bool:
    """Whether a model has Gated DeltaNet layers."""
    return any(hasattr(layer, "linear_attn") for layer in decoder_layers(model))


def check_hybrid(model: Any) -> None:
    """Refuse what this path would compute wrongly.

    Raises:
        KitError: naming the part that is different.
    """
    config, layers = model.config.get_text_config(), decoder_layers(model)
    reasons = []
    family = type(layers[0]).__name__
    if family not in FAMILIES:
        reasons.append(f"its layers are {family}, not {', '.join(FAMILIES)}")
    else:
        reasons += unsupported_feed_forwards(layers, config.hidden_act)
        if config.head_dim not in (16, 32, 64, 128, 256):
            reasons.append(f"head_dim is {config.head_dim}, not a power of two within 16..256")
        if getattr(config, "attention_bias", False):
            reasons.append("its attention has biases")
        if not is_hybrid(model):
            reasons.append("it has no Gated DeltaNet layer")
        mixers = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
        first = "in_proj_qkvz" if family == "Qwen3NextDecoderLayer" else "in_proj_qkv"
        if not all(is_plain(getattr(mixer, first, None)) for mixer in mixers):
            reasons.append("its projections are not plain nn.Linear (quantised?)")
    if reasons:
        raise KitError(
            f"the fused path does not run {type(model).__name__}: {'; '.join(reasons)}; use the portable one"
        )
