"""A drafter that is run otherwise than its checkpoint says: one deliberate change, its weights untouched.

Shape legend: T tokens with states, K taps, D hidden size, B block size, Q slots.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dflash_kit.drafter import Drafter, KeyValue
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.shards import Row
from dflash_kit.target_ends import TargetEnds

from .doctor_answers import CONFIGURED, Answer
from .doctor_rotary import Rotary, RotaryKind, paired_weights

StateForm = Literal["plain", "final_norm", "last_final_norm", "unit", "bfloat16", "int8"]
"""What is done to taps: nothing, the target's final norm (on all or on the last), division by their root mean square, rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """How a drafter is run. All defaults: as its checkpoint says."""

    config: DrafterConfig
    """The checkpoint's, or with another mask token, theta, window or causal flag."""
    layer_ids: tuple[int, ...] | None = None
    """Layers that are tapped instead of the config's; they may reach ``EMBEDDINGS``."""
    state_form: StateForm = "plain"
    rotary: RotaryKind | None = None
    """None: the plain embedding of the config's theta."""
    context_offset: int = 0
    """Added to the positions of the context, not to those of the slots."""
    slots_behind: int = 0
    """The token at anchor + k is read from slot k minus this."""
    slot_zero_is_mask: bool = False
    skip_hidden_norm: bool = False
    head_is_embedding: bool = False
    embedding_factor: float = 1.0
    """Of the slots' embeddings."""
    form: str = CONFIGURED
    """In which the prompts are put."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that are tapped."""
        return self.config.target_layer_ids if self.layer_ids is None else self.layer_ids


class AlteredDrafter(Drafter):
    """The drafter under a ``Change``; drafts through the same methods."""

    change: Change

    @classmethod
    def of(cls, drafter: Drafter, change: Change) -> "AlteredDrafter":
        """A drafter that shares the weights of ``drafter``."""
        weights = drafter.state_dict()
        if change.rotary is not None:
            weights = paired_weights(weights, change.rotary, change.config.head_dim)
        with torch.device("meta"):
            altered = cls(change.config)
        altered.load_state_dict(weights, assign=True)
        altered.change = change
        if change.skip_hidden_norm:
            altered.hidden_norm = nn.Identity()
        if change.rotary is not None:
            altered.rotary = Rotary(change.rotary, change.config.head_dim)
        return altered.eval().requires_grad_(False)

    def context(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        return super().context(features, positions + self.change.context_offset)

    def blocks(
        self, noise_embeds: Tensor, slot_positions: Tensor, context: Iterable[KeyValue], masks: Sequence[Any]
    ) -> Tensor:
        size = self.config.block_size
        slots = noise_embeds.unflatten(1, (-1, size)) * self.change.embedding_factor
        if self.change.slot_zero_is_mask:
            slots = torch.cat([slots[:, :, 1:2], slots[:, :, 1:]], dim=2)
        hidden = super().blocks(slots.flatten(1, 2), slot_positions, context, masks)
        # At one end of a block a slot is read that was trained for another token: the deepest draft is noise.
        return hidden.unflatten(1, (-1, size)).roll(self.change.slots_behind, dims=2).flatten(1, 2)


def altered_ends(ends: TargetEnds, change: Change) -> TargetEnds:
    """The target's ends as the changed drafter uses them."""
    return replace(ends, head=ends.embedding) if change.head_is_embedding else ends


def altered_row(answer: Answer, change: Change) -> Row:
    """The row that replay reads: the answer with the taps that the changed drafter reads."""
    taps = [_formed(answer, layer, change) for layer in change.layers]
    num_fed = len(answer.token_ids) - 1
    return Row(
        id=answer.prompt_id,
        input_ids=torch.tensor(answer.token_ids[:-1], dtype=torch.int32),
        loss_mask=torch.arange(num_fed) >= answer.prompt_tokens,
        hidden_states=torch.cat(taps, dim=-1),
        next_token=answer.token_ids[-1],
    )


def _formed(answer: Answer, layer: int, change: Change) -> Tensor:
    """States (T, D) of one layer in the changed form."""
    states, form = answer.states[layer], change.state_form
    if form == "final_norm" or (form == "last_final_norm" and layer == change.layers[-1]):
        return answer.final_norm(states)
    if form == "unit":
        return states / states.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).to(states.dtype)
    if form == "bfloat16":
        return states.bfloat16().to(states.dtype)
    if form == "int8":
        scale = states.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return ((states.float() / scale).round() * scale).to(states.dtype)
    return states
