"""A key-value cache of the target that keeps one path of a verified tree.

Storage is allocated once. A forward pass writes its rows behind the committed ones; ``commit`` moves the
accepted rows to the front of that window and forgets the rest. Nothing is ever reallocated or cropped.

Shape legend: T committed tokens, n rows of a forward pass, C capacity in tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PathLayer(CacheLayerMixin):
    """Keys and values of one layer, (1, heads, C, dim) each."""

    is_sliding = False  # windows are in the mask: a sliding layer may look at any row it was given

    def __init__(self, cache: "PathCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes, dtype and device of the first states."""
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (*states.shape[:2], self.cache.capacity, states.shape[-1])
            setattr(self, name, states.new_empty(shape))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write n rows behind the committed ones; return committed and new rows (1, heads, T + n, dim)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.cache.length, self.cache.length + key_states.shape[2]
        assert end <= self.cache.capacity, "the cache is too small: a bug of the engine"
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Committed tokens T."""
        return self.cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a forward pass of ``query_length`` rows sees, and the offset of the first."""
        return self.cache.length + query_length, 0

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in transformers before 5.18


class PathCache(Cache):
    """Committed keys and values of all layers, and room for one forward pass behind them."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        super().__init__(layers=[PathLayer(self) for _ in range(num_layers)])

    def commit(self, rows: Tensor) -> None:
        """Keep these rows of the last forward pass, in this order.

        Args:
            rows: (m,) row numbers within the pass, ascending.
        """
        count = rows.numel()
        front = torch.arange(count, device=rows.device)
        moved = rows != front
        if bool(moved.any()):
            source, destination = self.length + rows[moved], self.length + front[moved]
            for layer in self.layers:
                if layer.is_initialized:
                    for states in (layer.keys, layer.values):
                        # index_select copies first, so a source that is also a destination is read in time.
                        states[:, :, destination] = states.index_select(2, source)
        self.length += count
