"""The feed-forward of a layer: a dense one with fused weights, or the model's own module where it has experts.

Shape legend: R rows, D hidden size, F feed-forward width.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .fused_products import linear, swiglu
from .fused_weights import PLAIN_DTYPES, fuse_weights, is_plain

EXPERTS = {
    "Qwen3MoeSparseMoeBlock": "Qwen3MoeExperts",
    "Qwen3NextSparseMoeBlock": "Qwen3NextExperts",
    "Qwen3_5MoeSparseMoeBlock": "Qwen3_5MoeExperts",
}
"""Blocks that are run, and what their experts have to be."""
BATCHED_BYTES = 1 << 30
"""Of weights that the batched product may copy at once: it copies those of each expert once for each row that chose it."""


class Scratch(Protocol):
    """Where a feed-forward finds its input and leaves what it computes, R rows each."""

    normed: Tensor
    delta: Tensor
    gate_up: Tensor
    activated: Tensor


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """SwiGLU."""

    gate_up: Tensor
    """(2 F, D)"""
    down: Tensor

    @property
    def width(self) -> int:
        """F, for which the scratch has to have room."""
        return self.down.shape[1]

    def run(self, scratch: Scratch) -> Tensor:
        """What ``scratch.normed`` (R, D) gives: (R, D), to be added to the residual."""
        swiglu(scratch.normed, self.gate_up, scratch.gate_up, scratch.activated)
        return linear(scratch.activated, self.down, None, scratch.delta)


@dataclass(frozen=True, slots=True)
class ExpertsFeedForward:
    """A mixture of experts, with a shared one or without: transformers' own block, each row on its own.

    The model keeps its setting of how experts are computed; while rows run here it is ``graph_safe``.
    """

    block: Any
    width: ClassVar[int] = 0

    def run(self, scratch: Scratch) -> Tensor:
        """As of ``DenseFeedForward``; no step waits for the host, so that a CUDA graph can hold it."""
        experts, rows = self.block.experts, scratch.normed
        name, at_once = graph_safe(experts.down_proj), len(rows)
        if name == "batched_mm":
            parts = (experts.gate_up_proj, experts.down_proj)
            row_bytes = self.block.gate.top_k * sum(part[0].numel() * part.element_size() for part in parts)
            at_once = max(1, BATCHED_BYTES // row_bytes)
        with _computed_by(experts.config, name):
            found = [self.block(piece[None])[0] for piece in rows.split(at_once)]
        return found[0] if len(found) == 1 else torch.cat(found, out=scratch.delta)


FeedForward = DenseFeedForward | ExpertsFeedForward


def feed_forward(mlp: Any) -> FeedForward:
    """That of a module of transformers or of the drafter; a dense one's weights are fused in place."""
    if type(mlp).__name__ in EXPERTS:
        return ExpertsFeedForward(mlp)
    return DenseFeedForward(fuse_weights((mlp.gate_proj, mlp.up_proj)), mlp.down_proj.weight.detach())


def graph_safe(weight: Tensor) -> str:
    """The implementation of transformers that computes experts of this ``weight`` without waiting for the device.

    Its "eager" loops over the experts that were chosen, on the host. "grouped_mm" reads each of them once, but outside
    of bfloat16 on Hopper and Blackwell torch reads the groups' sizes on the host. "batched_mm" copies weights for every row.
    """
    if not weight.is_cuda:
        return "grouped_mm"
    has_kernel = torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
    return "grouped_mm" if has_kernel and weight.dtype == torch.bfloat16 else "batched_mm"


@contextlib.contextmanager
def _computed_by(config: Any, name: str) -> Iterator[None]:
    before = config._experts_implementation
    config._experts_implementation = name
    try:
        yield
    finally:
        config._experts_implementation = before


def has_experts(layers: Sequence[Any]) -> bool:
    """Whether a layer of a model has them."""
    return any(type(layer.mlp).__name__ in EXPERTS for layer in layers)


def unsupported_feed_forwards(layers: Sequence[Any], hidden_act: str) -> list[str]:
    """What these layers' feed-forwards have that would be computed wrongly here, each named once."""
    reasons = {} if hidden_act == "silu" else {f"hidden_act is {hidden_act!r}, not 'silu'": None}
    for mlp in (layer.mlp for layer in layers):
        name = type(mlp).__name__
        if name in EXPERTS:
            kind = type(mlp.experts).__name__
            if kind != EXPERTS[name] or mlp.experts.down_proj.dtype not in PLAIN_DTYPES:
                reasons[f"its experts are not plain {EXPERTS[name]} but {kind} (quantised?)"] = None
            continue
        parts = [getattr(mlp, part, None) for part in ("gate_proj", "up_proj", "down_proj")]
        if None in parts:
            reasons[f"its feed-forward is {name}; of mixtures of experts it knows {', '.join(EXPERTS)}"] = None
        elif not all(is_plain(part) for part in parts):
            reasons["its feed-forward's projections are not plain nn.Linear (quantised?)"] = None
        elif any(part.bias is not None for part in parts if part is not None):
            reasons["its feed-forward has biases"] = None
    return list(reasons)
