"""Decoder layers as data: fused weights taken from existing modules, and the one way to run rows through them.

Fusing is in place: the modules' own weights become views of the fused ones, so the untransformed model keeps working
and no memory is spent twice.

Shape legend: R rows, D hidden size, H query heads, G key-value heads, d head dimension, F feed-forward width, C slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .fused_ops import Heads, add_norm, linear, rope_write, swiglu, tree_attention


@dataclass(slots=True)
class FusedLayer:
    """Weights of one pre-norm layer with grouped-query attention and SwiGLU."""

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
    gate_up: Tensor
    """(2 F, D)"""
    down: Tensor
    window: int | None = None
    bidirectional: bool = False
    """Rows may look at rows of greater numbers (a drafter's full layers)."""

    @classmethod
    def from_module(cls, layer: Any, heads: Heads, eps: float, **extra: Any) -> "FusedLayer":
        """Fuse one layer of transformers or of the drafter; both name their parts alike."""
        attention, mlp = layer.self_attn, layer.mlp
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
            gate_up=fuse_weights((mlp.gate_proj, mlp.up_proj)),
            down=mlp.down_proj.weight.detach(),
            **extra,
        )


@torch.no_grad()
def fuse_weights(linears: Sequence[nn.Linear]) -> Tensor:
    """Stack the weights of several projections of the same input; each becomes a view of the stack."""
    fused = _already_fused([part.weight for part in linears])
    if fused is not None:
        return fused
    fused = torch.cat([part.weight.detach() for part in linears])
    start = 0
    for part in linears:
        part.weight.data = fused[start : start + part.out_features]
        start += part.out_features
    return fused


def _already_fused(weights: Sequence[Tensor]) -> Tensor | None:
    """The stack that these weights are consecutive views of, if they are."""
    rows = sum(weight.shape[0] for weight in weights)
    storage, offset = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != offset:
            return None
        offset += weight.numel()
    return weights[0].detach().as_strided((rows, weights[0].shape[1]), weights[0].stride())


def fuse_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of several projections behind one another, zeros where one has none; None if none has."""
    if all(part.bias is None for part in linears):
        return None
    parts = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in linears]
    return torch.cat(parts)


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
    def allocate(cls, num_rows: int, layer: FusedLayer) -> "RowBuffers":
        def empty(*shape: int) -> Tensor:
            return layer.qkv.new_zeros(num_rows, *shape)

        hidden, heads = layer.qkv.shape[1], layer.heads
        return cls(
            residual=empty(hidden),
            normed=empty(hidden),
            qkv=empty(layer.qkv.shape[0]),
            queries=empty(heads.num_queries, heads.dim),
            attended=empty(heads.num_queries * heads.dim),
            delta=empty(hidden),
            gate_up=empty(layer.gate_up.shape[0]),
            activated=empty(layer.gate_up.shape[0] // 2),
        )


@dataclass(slots=True)
class Rows:
    """Where a set of rows stands: how they see each other, and behind how many committed tokens."""

    mask: Tensor
    """(R, W) int64 bits"""
    depths: Tensor
    """(R,) int32 position of each row behind ``length``."""
    length: Tensor
    """(1,) int32"""
    tables: tuple[Tensor, Tensor]
    """Cosines and sines (positions, d / 2)."""
    long_context: bool = False


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

    Keys and values of the rows go to cache slots ``length + row`` of ``caches`` (L, 2, G, C, d). ``taps`` maps layer
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
            long_context=rows.long_context,
        )  # fmt: skip
        linear(b.attended, layer.out, layer.out_bias, b.delta)
        add_norm(b.residual, b.delta, layer.post_norm, layer.eps, b.normed)
        swiglu(b.normed, layer.gate_up, b.gate_up, b.activated)
        delta = linear(b.activated, layer.down, None, b.delta)
    return add_norm(b.residual, delta, final_norm, final_eps, b.normed, taps.get(len(layers) - 1))
