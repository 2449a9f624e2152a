"""What a target says in its own dtype and in float32, without a second copy of it: one layer is widened at a time."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_kit.target import decoder_layers

from .delta_layers import own_forwards

HALF = (torch.bfloat16, torch.float16)
PLAIN = (*HALF, torch.float32)


@dataclass(frozen=True, slots=True)
class PlainLogits:
    """What a target says behind each of the last n tokens of a text."""

    own: Tensor
    """(n, V) float32, as the target computes."""
    read_float32: Callable[[], Tensor]
    """The same as it would compute in float32: many times slower, so only where it is asked for."""


def plain_logits(model: Any, token_ids: list[int], num_last: int) -> PlainLogits:
    """Logits behind the last ``num_last`` of ``token_ids``, by prefills that read and change no cache.

    Args:
        model: loaded causal language model; our runners may have replaced the forward passes of its linear layers.
        token_ids: at least one.
        num_last: at least one; all tokens where there are fewer.
    """
    return PlainLogits(
        _prefill(model, token_ids, num_last, wide=False), lambda: _prefill(model, token_ids, num_last, wide=True)
    )


@torch.no_grad()
def _prefill(model: Any, token_ids: list[int], num_last: int, *, wide: bool) -> Tensor:
    """Logits (n, V) in float32; ``wide`` if they are to be computed in it as well.

    Weights are widened as they are needed, so the memory of one layer (or of the embedding) in float32 is enough. A target with weights
    of other dtypes (quantised ones) computes as it always does.
    """
    arguments: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = num_last
    ids = torch.tensor([token_ids], device=model.device)
    with ExitStack() as undo:
        undo.enter_context(own_forwards(model))
        if wide and all(weight.dtype in PLAIN for weight in model.parameters()):
            undo.enter_context(_widened(model))
        logits: Tensor = model(ids, **arguments).logits[0, -num_last:].float()
    return logits


@contextmanager
def _widened(model: Any) -> Iterator[None]:
    """Modules compute in float32 from here on: layers as a whole, since they may read their parts' weights themselves."""
    layers = list(decoder_layers(model))
    inside = {id(part) for layer in layers for part in layer.modules()}
    holders = [
        part for part in model.modules() if id(part) not in inside and any(True for _ in part.parameters(recurse=False))
    ]
    handles = [handle for layer in layers for handle in _widen_calls(layer, recurse=True)]
    handles += [handle for part in holders for handle in _widen_calls(part, recurse=False)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _widen_calls(module: nn.Module, *, recurse: bool) -> Iterator[Any]:
    """Have each call of a module find its weights in float32, and leave them as they were."""
    kept: list[tuple[nn.Parameter, Tensor]] = []

    def widen(*_: Any) -> None:
        for weight in module.parameters(recurse):
            if weight.dtype in HALF:
                kept.append((weight, weight.data))
                weight.data = weight.data.float()

    def restore(*_: Any) -> None:
        for weight, data in kept:
            weight.data = data
        kept.clear()

    yield module.register_forward_pre_hook(widen)
    yield module.register_forward_hook(restore, always_call=True)
