"""Taps: which layers of the target the drafter reads, and their outputs in a forward pass.

Layer ids are 0-based decoder layers whose *output* is meant: id k is ``hidden_states[k + 1]`` of transformers
and auxiliary layer ``k + 1`` of vLLM (both count the embeddings as 0).

Shape legend: B batch, T tokens, K taps, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import KitError


def tap_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Layers to tap: evenly spread from the second layer to the fourth from the end (the published rule).

    ``id_i = round(1 + i (N - 4) / (n - 1))``; one tap takes the middle layer ``N // 2``.

    Raises:
        KitError: the target has too few layers for ``num_taps`` distinct taps.
    """
    if num_taps < 1:
        raise KitError(f"num_taps is {num_taps}; at least 1 is needed")
    if num_taps == 1:
        return [num_target_layers // 2]
    ids = [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    if len(set(ids)) != num_taps or ids != sorted(ids) or ids[-1] >= num_target_layers:
        raise KitError(
            f"{num_taps} taps do not fit a target of {num_target_layers} layers; "
            f"take at most {max(1, num_target_layers - 3)} taps or name target_layer_ids"
        )
    return ids


class TapRecorder:
    """Context manager that keeps the output of chosen decoder layers of the last forward pass.

    Args:
        model: a transformers causal language model.
        layer_ids: 0-based layers whose output is kept, in the order in which they are concatenated.

    Raises:
        KitError: an id outside the model's layers.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._layers = decoder_layers(model)
        bad = [i for i in self.layer_ids if not 0 <= i < len(self._layers)]
        if bad:
            raise KitError(f"tap layer ids {bad} are outside this target's layers 0..{len(self._layers) - 1}")
        self._outputs: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "TapRecorder":
        for layer_id in set(self.layer_ids):
            self._handles.append(self._layers[layer_id].register_forward_hook(self._keep(layer_id)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def taps(self) -> Tensor:
        """Taps of the last forward pass: (B, T, K * D), in the dtype of the model. They are handed out once.

        Raises:
            RuntimeError: a tapped layer did not run since the last call (a bug, never a user's mistake).
        """
        missing = [i for i in self.layer_ids if i not in self._outputs]
        if missing:
            raise RuntimeError(f"layers {missing} did not run since the taps were last taken")
        taps = torch.cat([self._outputs[i] for i in self.layer_ids], dim=-1)
        self._outputs.clear()
        return taps


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a text or multimodal causal language model, in order."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder = getattr(decoder, "language_model", decoder)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise KitError(f"{type(model).__name__} has no decoder layers that can be tapped")
    return layers
