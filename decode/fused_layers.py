"""Decoder layers as data: fused weights taken from existing modules, and the one way to run rows through them.

Shape legend: R rows, D hidden size, H query heads, G key-value heads, d head dimension, F feed-forward width, C slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .feed_forward import FeedForward, feed_forward
from .fused_ops import Heads, add_norm, linear, rope_write, tree_attention
from .fused_weights import fuse_biases, fuse_weights


@dataclass(slots=True)
class FusedLayer:
    """Weights of one pre-norm layer with grouped-query attention and SwiGLU, or a mixture of such."""

    heads: Heads
    eps: float
    scale: float
    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    """((H + 2 G) * d, D)"""
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    """Query norm (d,) and key norm (1, d), where the family has them."""
    out: Tensor
    out_bias: Tensor | None
    feed_forward: FeedForward
    window: int | None = None
    bidirectional: bool = False
    """Rows may look at rows of greater numbers (a drafter's full layers)."""

    @classmethod
    def from_module(cls, layer: Any, heads: Heads, eps: float, **extra: Any) -> "FusedLayer":
        """Fuse one layer of transformers or of the drafter; both name their parts alike."""
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach()[None])
        return cls(
            heads=heads,
            eps=eps,
            scale=heads.dim**-0.5,
            input_norm=layer.input_layernorm.weight.detach(),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            qkv=fuse_weights(projections),
            qkv_bias=fuse_biases(projections),
            norms=norms,
            out=attention.o_proj.weight.detach(),
            out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
            feed_forward=feed_forward(layer.mlp),
            **extra,
        )


@dataclass(slots=True)
class RowBuffers:
    """Intermediate results of R rows, allocated once."""

    residual: Tensor
    normed: Tensor
    qkv: Tensor
    queries: Tensor
    attended: Tensor
    delta: Tensor
    gate_up: Tensor
    activated: Tensor

    @classmethod
    def allocate(cls, num_rows: int, layers: Sequence[FusedLayer]) -> "RowBuffers":
        layer = layers[0]

        def empty(*shape: int) -> Tensor:
            return layer.qkv.new_zeros(num_rows, *shape)

        hidden, heads, width = layer.qkv.shape[1], layer.heads, max(part.feed_forward.width for part in layers)
        return cls(
            residual=empty(hidden),
            normed=empty(hidden),
            qkv=empty(layer.qkv.shape[0]),
            queries=empty(heads.num_queries, heads.dim),
            attended=empty(heads.num_queries * heads.dim),
            delta=empty(hidden),
            gate_up=empty(2 * width),
            activated=empty(width),
        )


@dataclass(slots=True)
class Rows:
    """Where a set of rows stands: how they see each other, and behind how many committed tokens."""

    mask: Tensor
    """(R, W) int64 bits"""
    depths: Tensor
    """(R,) int32 position of each row behind ``length``."""
    length: Tensor
    """(N,) int32; rows are those of N prompts, as many of each."""
    tables: tuple[Tensor, Tensor]
    """Cosines and sines (positions, d / 2)."""
    long_context: bool = False
    ancestors: Tensor | None = None
    """(R, P) int32 of rows in preorder, see `TreeBuffers`"""


def run_layers(
    layers: Sequence[FusedLayer],
    caches: Tensor,
    rows: Rows,
    buffers: RowBuffers,
    final_norm: Tensor,
    final_eps: float,
    taps: Mapping[int, Tensor] | None = None,
    row_masks: Sequence[Tensor] | None = None,
) -> Tensor:
    """Run ``buffers.residual`` (R, D) through the layers; returns the final-normed states (R, D).

    Keys and values of the rows go to cache slots ``length + row`` of ``caches`` (L, 2, N * G, C, d). ``taps`` maps layer
    ids to (R, D) views that receive the layer's output. ``row_masks`` gives each layer its own mask.
    """
    taps = taps or {}
    b, delta = buffers, None
    for index, layer in enumerate(layers):
        add_norm(b.residual, delta, layer.input_norm, layer.eps, b.normed, taps.get(index - 1))
        linear(b.normed, layer.qkv, layer.qkv_bias, b.qkv)
        rope_write(
            b.qkv, b.queries, caches[index : index + 1], layer.norms, rows.tables, rows.depths, rows.length,
            layer.heads,
            layer.eps,
        )  # fmt: skip
        mask = rows.mask if row_masks is None else row_masks[index]
        tree_attention(
            b.queries, caches[index], mask, rows.depths, rows.length, b.attended, scale=layer.scale,
            window=layer.window, triangular=not layer.bidirectional,
            long_context=rows.long_context, ancestors=rows.ancestors,
        )  # fmt: skip
        linear(b.attended, layer.out, layer.out_bias, b.delta)
        add_norm(b.residual, b.delta, layer.post_norm, layer.eps, b.normed)
        delta = layer.feed_forward.run(b)
    return add_norm(b.residual, delta, final_norm, final_eps, b.normed, taps.get(len(layers) - 1))
