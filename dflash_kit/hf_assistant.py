"""A drafter as the assistant of transformers' own ``generate(speculation_type="dflash")``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .drafter import Drafter
from .drafter_config import FULL
from .errors import KitError
from .hub import checkpoint_folder


class DFlashAssistant(nn.Module):
    """What transformers calls each round: new taps in, hidden states of one block out.

    Raises:
        KitError: the drafter taps the target's last layer.

    Example:
        ``target.generate(**inputs, assistant_model=DFlashAssistant.from_pretrained(ckpt), speculation_type="dflash")``
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        from transformers import Qwen3Config

        self.drafter = drafter
        raw = drafter.config.to_dict()
        for key in ("auto_map", "dflash_config", "block_size"):
            raw.pop(key)
        # The cache that transformers builds from this config must keep every token: the masks apply the windows.
        raw.update(layer_types=[FULL] * drafter.config.num_hidden_layers, use_sliding_window=False)
        self.config = Qwen3Config(**raw)
        # Asked for some hidden states alone (5.17 and later), transformers hands out the output of layer k as number k; in
        # a full list the embeddings are number 0. The last layer's output would come behind the final norm.
        self.config.target_layer_ids = list(drafter.config.target_layer_ids)
        last = drafter.config.num_target_layers - 1
        if last in self.config.target_layer_ids:
            raise KitError(f"the drafter taps the target's last layer {last}, which transformers hands out normed")
        self.config.block_size = drafter.config.block_size
        self.config.mask_token_id = drafter.config.mask_token_id

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "DFlashAssistant":
        """Load a checkpoint folder or hub id; keyword arguments go to ``Drafter.from_pretrained``."""
        return cls(Drafter.from_pretrained(checkpoint_folder(folder), **kwargs))

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        cache: Any = None,
        **_unused: Any,
    ) -> SimpleNamespace:
        """One round.

        Args:
            noise_embeds: (1, B, D) embeddings of [anchor, mask, …].
            context_hidden_states: (1, n, K * D) taps of the newly committed tokens only.
            position_ids: (1, n + B).
            past_key_values: the cache of earlier context (named ``cache`` in newer transformers). Its caller crops the
                last B entries after the round, so B empty ones stand there in place of the block's own.
        """
        held = past_key_values if past_key_values is not None else cache
        num_slots, dtype = noise_embeds.shape[1], self.drafter.fc.weight.dtype
        new_positions, slot_positions = position_ids[0, :-num_slots], position_ids[0, -num_slots:]
        context = []
        for i, pair in enumerate(self.drafter.context(context_hidden_states.to(dtype), new_positions)):
            keys, values = held.update(*(functional.pad(states, (0, 0, 0, num_slots)) for states in pair), i)
            context.append((keys[:, :, :-num_slots], values[:, :, :-num_slots]))
        context_positions = torch.arange(context[0][0].shape[2], device=slot_positions.device)
        masks = self.drafter.block_masks(context_positions, slot_positions)
        hidden = self.drafter.blocks(noise_embeds.to(dtype), slot_positions, context, masks)
        return SimpleNamespace(last_hidden_state=hidden.to(noise_embeds.dtype))  # as the target's head needs it
