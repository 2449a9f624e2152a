"""Contexts of many rows side by side on the device, and blocks drafted at any anchors of them in one batch.

Shape legend: R rows, L tokens of all rows, N anchors, T tokens of the longest context, B block size, M = B - 1 depths, G key-value
heads, d head dimension, D hidden.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .drafter import Drafter
from .masks import single_block_mask
from .shards import Row
from .target_ends import TargetEnds

CONTEXT_TOKENS_AT_ONCE = 1 << 14
"""Tokens that go through the drafter's context pass together."""
CONTEXT_BYTES_AT_ONCE = 1 << 30
"""Of one layer's keys and values that a batch of blocks is given copies of."""
KEYS_TILE = 64
"""Contexts are padded to a multiple: few shapes to allocate, and masks whose rows need no copy in attention."""
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's, which makes a plan for each new shape."""


class PackedContexts:
    """What the drafter reads of many rows.

    Args:
        drafter: the drafter.
        ends: the target's embedding.
        rows: the rows.
        lengths: leading tokens of each that blocks may see; 0 for a row that has no blocks.
    """

    @torch.no_grad()
    def __init__(self, drafter: Drafter, ends: TargetEnds, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        self.drafter, self.ends = drafter, ends
        self.device = drafter.fc.weight.device
        self.starts = np.cumsum([0, *lengths])[:-1]
        """(R,) where each row's tokens begin."""
        self._keys_values: list[tuple[Tensor, Tensor]] = []
        """(L, G, d) of every layer"""
        self._token_bytes = (
            2 * drafter.config.num_key_value_heads * drafter.config.head_dim * drafter.fc.weight.element_size()
        )
        parts = [self._context(group) for group in _groups(rows, lengths)]
        if parts:
            self._keys_values = [
                (torch.cat([part[layer][0] for part in parts]), torch.cat([part[layer][1] for part in parts]))
                for layer in range(len(drafter.layers))
            ]

    def _context(self, group: list[tuple[Row, int]]) -> list[tuple[Tensor, Tensor]]:
        weight = self.drafter.fc.weight
        features = torch.cat(
            [row.hidden_states[:length].to(device=self.device, dtype=weight.dtype) for row, length in group]
        )
        positions = torch.cat([torch.arange(length) for _, length in group]).to(self.device)
        found = self.drafter.context(features[None], positions)
        return [
            (keys[0].transpose(0, 1).contiguous(), values[0].transpose(0, 1).contiguous()) for keys, values in found
        ]

    @torch.no_grad()
    def draft(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> Tensor:
        """Hidden states (N, M, D) of the masked slots of a block at each anchor.

        Args:
            rows: (N,) row of each anchor.
            positions: (N,) its position in the row.
            tokens: (N,) its token.
        """
        order = np.argsort(positions, kind="stable")  # contexts that are read together are of similar lengths
        hidden: Tensor | None = None
        longest = int(positions.max()) + self.drafter.config.block_size
        step = max(1, CONTEXT_BYTES_AT_ONCE // (longest * self._token_bytes))
        for start in range(0, len(order), step):
            some = order[start : start + step]
            found = self._draft(*(torch.from_numpy(x[some]) for x in (self.starts[rows], positions, tokens)))
            hidden = found.new_empty(len(order), *found.shape[1:]) if hidden is None else hidden
            hidden[torch.from_numpy(some).to(self.device)] = found
        assert hidden is not None, "no anchors"
        return hidden

    def _draft(self, starts: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        config = self.drafter.config
        longest = -(-int(positions.max()) // KEYS_TILE) * KEYS_TILE
        starts, positions, tokens = (x.to(self.device) for x in (starts, positions, tokens))
        block_ids = torch.full((len(tokens), config.block_size), config.mask_token_id, device=self.device)
        block_ids[:, 0] = tokens
        slot_positions = positions[:, None] + torch.arange(config.block_size, device=self.device)
        context_positions = torch.arange(longest, device=self.device).expand(len(tokens), -1)
        is_held = torch.cat(
            [context_positions < positions[:, None], torch.ones_like(slot_positions, dtype=torch.bool)], dim=1
        )
        kinds = {(layer.self_attn.causal, layer.self_attn.window) for layer in self.drafter.layers}
        masks = {
            (causal, window): (
                single_block_mask(context_positions, slot_positions, causal=causal, window=window) & is_held[:, None]
            )[:, None]
            for causal, window in kinds
        }
        # Behind a context its last token is repeated, and hidden: what is hidden must be finite, too.
        places = starts[:, None] + torch.minimum(context_positions, positions[:, None] - 1).clamp(min=0)
        contexts = (  # one layer's at a time
            (keys[places].transpose(1, 2), values[places].transpose(1, 2)) for keys, values in self._keys_values
        )
        attentions = [layer.self_attn for layer in self.drafter.layers]
        with sdpa_kernel(ATTENTION):
            hidden = self.drafter.blocks(
                self.ends.embed(block_ids).to(self.drafter.fc.weight.dtype),
                slot_positions,
                contexts,
                [masks[attention.causal, attention.window] for attention in attentions],
            )
        return hidden[:, 1:]


def _groups(rows: Sequence[Row], lengths: Sequence[int]) -> list[list[tuple[Row, int]]]:
    """Rows with their lengths, so many together that they go through a context pass at once."""
    groups: list[list[tuple[Row, int]]] = []
    num_tokens = 0
    for row, length in zip(rows, lengths, strict=True):
        if not groups or num_tokens + length > CONTEXT_TOKENS_AT_ONCE:
            groups.append([])
            num_tokens = 0
        if length:
            groups[-1].append((row, length))
            num_tokens += length
    return [group for group in groups if group]
