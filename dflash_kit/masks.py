"""Who sees whom: the attention masks of packed training and of a single block.

Keys are the real tokens of a packed row followed by all blocks. A slot of block j sees real tokens of its own
document with position < anchor_j, and its own block (all of it, or up to itself in causal layers); sliding layers
add: query position - key position < W.

Shape legend: T packed context tokens, N blocks, B block size, Q = N * B slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

TILE = 128
"""Queries and keys that FlexAttention handles at a time."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the tokens and blocks of one packed row are.

    Attributes:
        positions: (T,) int64, position of each token inside its document.
        documents: (T,) int64, document number of each token, -1 for padding behind the last document.
        anchors: (N,) int64, index of each anchor in the packed row; any valid index for unused blocks.
        used: (N,) bool, False for blocks that only fill up the fixed count.
        block_size: B.
    """

    positions: Tensor
    documents: Tensor
    anchors: Tensor
    used: Tensor
    block_size: int

    @property
    def slot_positions(self) -> Tensor:
        """(Q,) positions of all slots: anchor, anchor + 1, …, anchor + B - 1 for each block."""
        offsets = torch.arange(self.block_size, device=self.anchors.device)
        return (self.positions[self.anchors][:, None] + offsets).flatten()

    @property
    def slot_documents(self) -> Tensor:
        """(Q,) document of each slot, -2 for unused blocks (no token has it)."""
        documents = torch.where(self.used, self.documents[self.anchors], -2)
        return documents.repeat_interleave(self.block_size)


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(layout: BlockLayout, *, causal: bool, window: int | None) -> MaskMod:
    """The rule as FlexAttention's ``mask_mod(batch, head, query, key)``; works on index tensors of any shape."""
    num_tokens, block_size, num_blocks = layout.positions.numel(), layout.block_size, layout.anchors.numel()
    slot_positions, slot_documents = layout.slot_positions, layout.slot_documents
    anchor_positions = layout.positions[layout.anchors]
    last_token, last_slot = max(num_tokens - 1, 0), max(num_blocks * block_size - 1, 0)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token, slot = key.clamp(max=last_token), (key - num_tokens).clamp(0, last_slot)
        is_token = key < num_tokens
        query_block = query // block_size
        before_anchor = layout.positions[token] < anchor_positions[query_block]
        seen_token = is_token & before_anchor & (layout.documents[token] == slot_documents[query])
        seen_slot = ~is_token & (slot // block_size == query_block)
        if causal:
            seen_slot = seen_slot & (slot <= query)
        seen = seen_token | seen_slot
        if window is not None:
            key_position = torch.where(is_token, layout.positions[token], slot_positions[slot])
            seen = seen & (slot_positions[query] - key_position < window)
        return seen

    return visible


def dense_mask(layout: BlockLayout, *, causal: bool, window: int | None) -> Tensor:
    """(Q, T + Q) bool, True where a slot may look; for the CPU and for tests."""
    num_slots, num_tokens = layout.anchors.numel() * layout.block_size, layout.positions.numel()
    device = layout.positions.device
    query = torch.arange(num_slots, device=device)[:, None]
    key = torch.arange(num_tokens + num_slots, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    return mask_mod(layout, causal=causal, window=window)(zero, zero, query, key)


def flex_mask(layout: BlockLayout, *, causal: bool, window: int | None) -> Any:
    """The same rule as a FlexAttention ``BlockMask``, built once per batch, for GPUs.

    What a slot sees is two ranges of keys, so how many keys of a tile it sees follows from four comparisons, and the
    tiles that are seen wholly or in part from those counts. torch's ``create_block_mask`` looks at every pair instead:
    eager it takes 17 ms of a 153 ms step, and its compiled form does not come through ptxas in two minutes.

    Documents must lie in the row in order, each with positions 0, 1, 2, …
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_slots, num_tokens = layout.anchors.numel() * layout.block_size, layout.positions.numel()
    counts_QK = _seen_per_tile(layout, causal=causal, window=window)
    tiles_RQK = functional.pad(counts_QK, (0, 0, 0, -num_slots % TILE)).unflatten(0, (-1, TILE))
    full_RK = (tiles_RQK == TILE).all(1)
    part_RK = (tiles_RQK > 0).any(1) & ~full_RK
    return BlockMask.from_kv_blocks(
        *_in_front(part_RK),
        *_in_front(full_RK),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(layout, causal=causal, window=window),
        seq_lengths=(num_slots, num_tokens + num_slots),
    )


def _seen_per_tile(layout: BlockLayout, *, causal: bool, window: int | None) -> Tensor:
    """(Q, K) int64: how many of the keys of each tile of ``TILE`` a slot sees."""
    num_tokens, device = layout.positions.numel(), layout.positions.device
    size, num_blocks = layout.block_size, layout.anchors.numel()
    slots = torch.arange(num_blocks * size, device=device)
    own_start = slots // size * size
    own_end = slots + 1 if causal else own_start + size
    anchors = layout.anchors.repeat_interleave(size)
    token_start = anchors - layout.positions[anchors]  # where the document starts
    token_end = torch.where(layout.used.repeat_interleave(size), anchors, token_start)
    if window is not None:
        own_start = torch.maximum(own_start, slots - window + 1)
        token_start = torch.maximum(token_start, anchors + slots % size - window + 1)
    tile_start = torch.arange(0, num_tokens + len(slots), TILE, device=device)
    seen = [
        (torch.minimum(end[:, None], tile_start + TILE) - torch.maximum(start[:, None], tile_start)).clamp(min=0)
        for start, end in ((token_start, token_end), (own_start + num_tokens, own_end + num_tokens))
    ]
    return seen[0] + seen[1]


def _in_front(tiles_RK: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a (R, K) bool: how many a row has (1, 1, R), and which, those in front (1, 1, R, K)."""
    order = tiles_RK.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return tiles_RK.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def single_block_mask(context_positions: Tensor, slot_positions: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """(B, T + B) bool for one block whose context is all committed (every context position is before the anchor).

    Args:
        context_positions: (T,) positions of the context keys.
        slot_positions: (B,) positions of the slots, the anchor's first. Both may have leading dimensions alike, one block
            for each of them.
    """
    keys = torch.cat([context_positions, slot_positions], dim=-1)
    distance = slot_positions[..., :, None] - keys[..., None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    return seen
