"""Floating-point operations of a training step: what its arithmetic needs, counted from the packed rows themselves.

A multiply and an add are two. Three passes over trained matrices (output, gradient of the input, of the weight), two over
the frozen head; attention counts the pairs that are seen. Nothing that is computed again or masked away counts.

Shape legend: T real tokens, Q slots of used blocks, M slots with a weight, B block size.
"""

from dataclasses import dataclass

import torch

from dflash_kit.drafter_config import SLIDING, DrafterConfig
from dflash_kit.masks import BlockLayout

from .batches import PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSizes:
    """What decides the operations of a packed row."""

    tokens: float
    """T"""
    slots: float
    """Q"""
    weighted_slots: float
    """M"""
    pairs: tuple[float, ...]
    """(slot, key) pairs that are seen, per layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCounter:
    """Counts the operations of packed rows."""

    drafter: DrafterConfig
    vocab_size: int
    distils: bool
    """Whether the target's own distribution is projected, too."""

    def __call__(self, row: PackedRow) -> float:
        """Operations of one packed row, forward and backward."""
        layout = row.layout
        sizes = RowSizes(
            tokens=row.num_tokens,
            slots=int(layout.used.sum()) * layout.block_size,
            weighted_slots=len(row.slots),
            pairs=tuple(seen_pairs(layout, self.drafter)),
        )
        return sum(self.by_part(sizes).values())

    def by_part(self, sizes: RowSizes) -> dict[str, float]:
        """Operations by part: matrices of the slots, of the context, attention, head."""
        config = self.drafter
        hidden, layers = config.hidden_size, config.num_hidden_layers
        width, key_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        per_slot = hidden * (2 * width + 2 * key_width + 3 * config.intermediate_size)
        head_passes = 3 if self.distils else 2
        return {
            "slots": 6.0 * sizes.slots * layers * per_slot,
            # Taps are data: fc has no gradient of its input.
            "context": sizes.tokens * (4.0 * config.num_taps * hidden**2 + 6.0 * layers * 2 * hidden * key_width),
            "attention": 12.0 * width * sum(sizes.pairs),
            "head": 2.0 * head_passes * sizes.weighted_slots * self.vocab_size * hidden,
        }


def seen_pairs(layout: BlockLayout, config: DrafterConfig) -> list[int]:
    """(slot, key) pairs that the mask of each layer lets through, over the used blocks."""
    anchors = layout.positions[layout.anchors[layout.used]]
    offsets = torch.arange(layout.block_size)
    found: dict[tuple[bool, int | None], int] = {}
    kinds = []
    for layer_type, causal in zip(config.layer_types, config.layer_causal, strict=True):
        kind = (causal, config.sliding_window if layer_type == SLIDING else None)
        kinds.append(kind)
        if kind not in found:
            context = anchors[:, None].expand(-1, layout.block_size)
            if kind[1] is not None:  # a window is at least a block wide
                context = torch.minimum(context, (kind[1] - 1 - offsets).clamp(min=0))
            own = int((offsets + 1).sum()) if causal else layout.block_size**2
            found[kind] = int(context.sum()) + len(anchors) * own
    return [found[kind] for kind in kinds]
