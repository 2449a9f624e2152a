"""Keys and values of many responses at once, each as long as it is, and the storage that its parts share.

A slot is one response's place. The slots in use are always the first ones: when a response ends, the last one
moves into its place. Storage is zeroed, since a masked key still multiplies its value by 0, and 0 times what
memory happens to hold may be no number.

Shape legend: S slots, A of them in use, C capacity in tokens, n rows of a forward pass, P longest path.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache import PathCache

CAPACITY_STEP = 64
"""Tokens; capacities are multiples of it, so that a slightly longer prompt needs no new storage."""


def round_up(num_tokens: int) -> int:
    """Capacity for so many tokens."""
    return -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP


def widen(states: Tensor, capacity: int, num_used: int) -> Tensor:
    """States (S, heads, C, dim) with more capacity, the first ``num_used`` slots kept."""
    wider = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    wider[:num_used, :, : states.shape[2]] = states[:num_used]
    return wider


def token_index(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Index tensors (A, 1) and (A, count) of so many tokens from ``starts`` (A,) in states[slot, :, token]."""
    slots = torch.arange(len(starts), device=starts.device)[:, None]
    return slots, starts[:, None] + torch.arange(count, device=starts.device)


def pad_paths(paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(A, P) row numbers of paths of several lengths; behind its end a path repeats its root, row 0."""
    longest = max(map(len, paths))
    return torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device)


class BatchLayer(CacheLayerMixin):
    """Keys and values of one layer, (S, heads, C, dim) each."""

    is_sliding = False  # windows are in the mask

    def __init__(self, cache: "BatchCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes, dtype and device of the first states."""
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.cache.num_slots, states.shape[1], self.cache.capacity, states.shape[-1])
            setattr(self, name, states.new_zeros(shape))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write n rows behind each slot's committed ones; return the used slots up to the longest, new rows included."""
        assert self.is_initialized, "a slot is filled before anything is decoded in it"
        slots, columns = self.cache.new_rows
        self.keys[slots, :, columns] = key_states.transpose(1, 2)
        self.values[slots, :, columns] = value_states.transpose(1, 2)
        used, end = len(self.cache.lengths), self.cache.end
        return self.keys[:used, :, :end], self.values[:used, :, :end]

    def get_seq_length(self) -> int:
        """Committed tokens of the longest response."""
        return max(self.cache.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a forward pass of ``query_length`` rows sees, and the offset of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in transformers before 5.18


class BatchCache(Cache):
    """Committed keys and values of all layers and slots, and room for one forward pass behind each."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.num_slots, self.capacity = num_slots, 0
        self.lengths: list[int] = []
        """Committed tokens of each slot in use."""
        self.end = 0
        self.new_rows: tuple[Tensor, Tensor]
        super().__init__(layers=[BatchLayer(self) for _ in range(num_layers)])

    @property
    def _held(self) -> list[BatchLayer]:
        return [layer for layer in self.layers if layer.is_initialized]

    def reserve(self, num_tokens: int) -> None:
        """Let every slot hold that many tokens, rows of a verification included; what is held stays."""
        if num_tokens > self.capacity:
            self.capacity = round_up(num_tokens)
            for layer in self._held:  # one after another, so that little is held twice
                layer.keys = widen(layer.keys, self.capacity, len(self.lengths))
                layer.values = widen(layer.values, self.capacity, len(self.lengths))

    def admit(self, prompt: PathCache) -> None:
        """Take a prefilled prompt into the next slot."""
        slot, length = len(self.lengths), prompt.length
        for layer, source in zip(self.layers, prompt.layers, strict=True):
            if source.is_initialized:
                if not layer.is_initialized:
                    layer.lazy_initialization(source.keys, source.values)
                layer.keys[slot, :, :length] = source.keys[0, :, :length]
                layer.values[slot, :, :length] = source.values[0, :, :length]
        self.lengths.append(length)

    def release(self, slot: int) -> None:
        """Free a slot; the last one in use moves into it."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if slot != last:
            for layer in self._held:
                layer.keys[slot, :, :length] = layer.keys[last, :, :length]
                layer.values[slot, :, :length] = layer.values[last, :, :length]
            self.lengths[slot] = length

    def expect(self, lengths: Tensor, num_rows: int) -> None:
        """The next forward pass has so many rows behind the committed tokens ``lengths`` (A,), which are on the device."""
        self.end = max(self.lengths) + num_rows
        assert self.end <= self.capacity, "the cache is too small: a bug of the engine"
        self.new_rows = token_index(lengths, num_rows)

    def commit(self, paths: Sequence[Sequence[int]], padded: Tensor) -> None:
        """Keep a path of the last forward pass in each slot.

        Args:
            paths: row numbers within the pass, ascending.
            padded: (A, P) the same on the device.
        """
        slots, columns = self.new_rows
        if any(path[-1] != len(path) - 1 for path in paths):
            source, destination = columns.gather(1, padded), columns[:, : padded.shape[1]]
            for layer in self._held:
                for states in (layer.keys, layer.values):
                    # Reading makes a copy, so a source that is also a destination is read in time. What is written
                    # behind the end of a shorter path is never looked at.
                    states[slots, :, destination] = states[slots, :, source]
        for slot, path in enumerate(paths):
            self.lengths[slot] += len(path)
