"""The drafter over many responses: one context pass and one block pass a round, whatever their lengths.

Shape legend: S slots, A of them in use, C capacity in tokens, T tokens of the longest context, B block size, M = B - 1, P
longest path, V vocabulary, G key-value heads, d head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_kit.drafter import DraftCache, Drafter
from dflash_kit.masks import single_block_mask
from dflash_kit.target_ends import TargetEnds

from .batch_cache import round_up, token_index, widen


class BatchDrafter:
    """Context keys and values of all slots, (S, G, C, d) a layer, and what is drafted from them.

    Args:
        drafter: loaded drafter.
        ends: the target's embedding and head.
        num_slots: responses at once, at most.
    """

    def __init__(self, drafter: Drafter, ends: TargetEnds, num_slots: int) -> None:
        self.drafter, self.ends = drafter, ends
        config, weight = drafter.config, drafter.fc.weight
        shape = (num_slots, config.num_key_value_heads, 0, config.head_dim)
        self._states = [[weight.new_zeros(shape) for _ in range(2)] for _ in drafter.layers]
        self.lengths: list[int] = []
        """Context tokens of each slot in use."""

    def admit(self, context: DraftCache, num_tokens: int) -> None:
        """Take the context of a prefilled prompt into the next slot, with room for ``num_tokens``."""
        slot, length = len(self.lengths), context.length
        self._reserve(num_tokens)
        for states, *sources in zip(self._states, context.keys, context.values, strict=True):
            for held, source in zip(states, sources, strict=True):
                held[slot, :, :length] = source[0, :, :length]
        self.lengths.append(length)

    def release(self, slot: int) -> None:
        """Free a slot; the last one in use moves into it."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if slot != last:
            for held in (held for states in self._states for held in states):
                held[slot, :, :length] = held[last, :, :length]
            self.lengths[slot] = length

    @torch.no_grad()
    def extend(self, taps: Tensor, counts: Sequence[int]) -> None:
        """Add the context of newly committed tokens.

        Args:
            taps: (A, P, K * D); of each response so many as ``counts`` says are its own, what follows is padding.
            counts: tokens that each response gained.
        """
        slots, columns = token_index(self._lengths(), taps.shape[1])
        cos, sin = self._rotary(columns)
        fused = self.drafter.hidden_norm(self.drafter.fc(taps.to(self.drafter.fc.weight.dtype)))
        for states, layer in zip(self._states, self.drafter.layers, strict=True):
            for held, new in zip(states, layer.self_attn.key_value(fused, cos, sin), strict=True):
                held[slots, :, columns] = new.transpose(1, 2)  # padding lands behind the end, and is written over
        for slot, count in enumerate(counts):
            self.lengths[slot] += count

    @torch.no_grad()
    def draft(self, anchors: Sequence[int]) -> Tensor:
        """Draft logits (A, M, V) of a block behind each response's context; slot 0 (the anchor) predicts none."""
        config, device, count = self.drafter.config, self.drafter.fc.weight.device, len(anchors)
        block_ids = torch.full((count, config.block_size), config.mask_token_id, device=device)
        block_ids[:, 0] = torch.tensor(anchors, device=device)
        hidden = self.ends.embed(block_ids).to(self.drafter.fc.weight.dtype)
        lengths, longest = self._lengths(), max(self.lengths)
        _, slot_positions = token_index(lengths, config.block_size)
        cos, sin = self._rotary(slot_positions)
        masks = self._masks(lengths, longest, slot_positions)
        for states, layer in zip(self._states, self.drafter.layers, strict=True):
            attention = layer.self_attn
            context = states[0][:count, :, :longest], states[1][:count, :, :longest]
            hidden = layer(hidden, context, cos, sin, masks[attention.causal, attention.window])
        return self.ends.logits(self.drafter.norm(hidden)[:, 1:].to(self.ends.head.dtype))

    def _masks(self, lengths: Tensor, longest: int, slot_positions: Tensor) -> dict[tuple[bool, int | None], Tensor]:
        """Masks (A, 1, B, T + B) by kind of layer; what lies behind a response's context is hidden."""
        context_positions = torch.arange(longest, device=lengths.device).expand(len(lengths), -1)
        is_held = torch.cat(
            [context_positions < lengths[:, None], torch.ones_like(slot_positions, dtype=torch.bool)], dim=1
        )
        kinds = {(layer.self_attn.causal, layer.self_attn.window) for layer in self.drafter.layers}
        return {
            (causal, window): (
                single_block_mask(context_positions, slot_positions, causal=causal, window=window) & is_held[:, None]
            )[:, None]
            for causal, window in kinds
        }

    def _lengths(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.drafter.fc.weight.device)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables (A, 1, L, d) of positions (A, L), for states (A, heads, L, d)."""
        cos, sin = self.drafter.rotary(positions.flatten(), self.drafter.fc.weight.dtype)
        return cos.view(*positions.shape, -1)[:, None], sin.view(*positions.shape, -1)[:, None]

    def _reserve(self, num_tokens: int) -> None:
        capacity = round_up(num_tokens)
        if capacity > self._states[0][0].shape[2]:
            for states in self._states:
                states[:] = [widen(held, capacity, len(self.lengths)) for held in states]
