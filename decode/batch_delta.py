"""Gated DeltaNet layers that look at the trees of many responses in one pass, each from a state of its own.

Prompts are read one at a time by ``delta_layers``; what these layers have committed then is copied into a slot.

Shape legend: S slots, A of them in use, N rows of the largest tree, H value heads, Dk and Dv key and value width, C
convolution channels, W its kernel, P longest path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .delta_layers import DeltaLayer, DeltaLayers, convolve, project, rule_inputs
from .forest import Forest
from .gated_delta import solve_on_paths, states_after


@dataclass(frozen=True, slots=True)
class ForestPaths:
    """Who stands before whom in a pass; the same for all layers."""

    on_path_ANN: Tensor
    """bool."""
    columns_ANW: Tensor
    """int64: where each row's convolution inputs lie, oldest first: W - 1 committed ones, then the rows."""

    @classmethod
    def of(cls, forest: Forest, kernel: int) -> "ForestPaths":
        """Paths of all trees."""
        window, (count, num_rows) = kernel - 1, forest.parents.shape
        device = forest.parents.device
        # Column of each column's parent; the oldest committed input is its own, which nobody asks for.
        committed = torch.arange(-1, window - 1, device=device).expand(count, -1)
        behind = torch.cat([committed, forest.parents + window], dim=1).clamp(min=0)
        columns = [torch.arange(window, window + num_rows, device=device).expand(count, -1)]
        for _ in range(window):
            columns.append(behind.gather(1, columns[-1]))
        return cls(forest.visible, torch.stack(columns[::-1], dim=2))


class BatchDeltaLayer:
    """States of one layer in all slots, and its pass over trees.

    Args:
        single: the layer's state while a prompt is read.
        num_slots: S.
    """

    def __init__(self, single: DeltaLayer, num_slots: int) -> None:
        self.single, self.module = single, single.module
        self.inputs_SCW = single.inputs_CW.new_zeros(num_slots, *single.inputs_CW.shape)
        self.states_SHKV = single.state_HKV.new_zeros(num_slots, *single.state_HKV.shape)
        self._pass: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def admit(self, slot: int) -> None:
        """Take what the prompt left."""
        self.inputs_SCW[slot], self.states_SHKV[slot] = self.single.inputs_CW, self.single.state_HKV

    def move(self, source: int, slot: int) -> None:
        """Put the state of one slot into another."""
        self.inputs_SCW[slot], self.states_SHKV[slot] = self.inputs_SCW[source], self.states_SHKV[source]

    def look(self, hidden: Tensor, paths: ForestPaths) -> Tensor:
        """Outputs (A, N, D) of rows (A, N, D), each given its own path."""
        count = hidden.shape[0]
        mixed_ANC, z, b, a = project(self.module, hidden)
        known_ACM = torch.cat([self.inputs_SCW[:count], mixed_ANC.mT], dim=2)
        columns = paths.columns_ANW.flatten(1)[:, None].expand(-1, known_ACM.shape[1], -1)
        windows_ACNW = known_ACM.gather(2, columns).unflatten(2, paths.columns_ANW.shape[1:])
        convolved = convolve(self.module, windows_ACNW).to(mixed_ANC.dtype)
        q, k, v, decay, beta = rule_inputs(self.module, convolved, a, b)
        outputs, updates, summed = solve_on_paths(q, k, v, decay, beta, self.states_SHKV[:count], paths.on_path_ANN)
        self._pass = known_ACM, k, updates, summed
        normed = self.module.norm(outputs.to(v.dtype).flatten(0, 2), z.flatten(0, 2))
        attended: Tensor = self.module.out_proj(normed.view(*hidden.shape[:2], -1))
        return attended

    def commit(self, on_path_ANN: Tensor, leaves: Tensor, window_AW: Tensor) -> None:
        """Keep a path of the last pass in every slot.

        Args:
            leaves: (A,) last row of each path.
            window_AW: columns of each path's last W - 1 convolution inputs, among committed ones and rows.
        """
        assert self._pass is not None
        known_ACM, k, updates, summed = self._pass
        count = len(leaves)
        self.states_SHKV[:count] = states_after(k, updates, summed, self.states_SHKV[:count], on_path_ANN, leaves)
        self.inputs_SCW[:count] = known_ACM.gather(2, window_AW[:, None].expand(-1, known_ACM.shape[1], -1))
        self._pass = None


class BatchDelta:
    """All Gated DeltaNet layers of a target.

    Args:
        singles: the target's layers as they read prompts; their forward passes are wrapped.
        num_slots: S.
    """

    def __init__(self, singles: DeltaLayers, num_slots: int) -> None:
        self.layers = [BatchDeltaLayer(layer, num_slots) for layer in singles.layers]
        self._paths: ForestPaths | None = None
        self._num_used = 0
        for layer in self.layers:
            layer.module.forward = self._forward_of(layer, layer.module.forward)

    def admit(self) -> None:
        """Take what the last prompt left into the next slot."""
        for layer in self.layers:
            layer.admit(self._num_used)
        self._num_used += 1

    def release(self, slot: int) -> None:
        """Free a slot; the last one in use moves into it."""
        self._num_used -= 1
        if slot != self._num_used:
            for layer in self.layers:
                layer.move(self._num_used, slot)

    def look_at(self, forest: Forest | None) -> None:
        """The next pass looks at these trees; None: it reads a prompt."""
        if self.layers:
            kernel = self.layers[0].inputs_SCW.shape[2] + 1
            self._paths = None if forest is None else ForestPaths.of(forest, kernel)

    def commit(self, paths: Sequence[Sequence[int]], padded: Tensor, forest: Forest) -> None:
        """Keep a path of the last pass in each slot.

        Args:
            paths: rows from the root down.
            padded: (A, P) the same on the device.
            forest: of that pass.
        """
        if not self.layers:
            return
        kept = self.layers[0].inputs_SCW.shape[2]
        counts = torch.tensor([len(path) for path in paths], device=padded.device)
        known = torch.cat([torch.arange(kept, device=padded.device).expand(len(paths), -1), padded + kept], dim=1)
        window_AW = known.gather(1, counts[:, None] + torch.arange(kept, device=padded.device))
        leaves = padded.gather(1, counts[:, None] - 1)[:, 0]
        for layer in self.layers:
            layer.commit(forest.visible, leaves, window_AW)

    def _forward_of(self, layer: BatchDeltaLayer, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._paths is not None:
                return layer.look(hidden_states, self._paths)
            return read(hidden_states, *args, **kwargs)

        return forward
