"""The DFlash drafter: a few Qwen3-style layers that read the target's taps as extra keys and values.

The context (fused taps) has keys and values only: no queries, no output projection, no feed-forward, and it skips
the input norm. The slots of a block are queries and keys. Slot k predicts the token at position anchor + k.

Shape legend: T context tokens, N blocks, B block size, Q slots (N * B, or B for one block), K taps, D hidden size,
H query heads, G key-value heads, d head dimension.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import read_config, read_tensors, write_checkpoint
from .drafter_config import DrafterConfig
from .drafter_layers import DrafterLayer, KeyValue, RotaryPositions
from .masks import BlockLayout, dense_mask, flex_mask, single_block_mask


def _run_layer(layer: DrafterLayer, *inputs: Any) -> Tensor:
    """Call a layer: a function of its own, so that one compiled graph serves them all."""
    output: Tensor = layer(*inputs)
    return output


@dataclass(slots=True)
class DraftCache:
    """Context keys and values of committed tokens, preallocated; block keys and values never enter it."""

    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor
    """(capacity,) int64"""
    length: int = 0
    """Context tokens held; equals the anchor's position whenever a block is drafted."""


class Drafter(nn.Module):
    """The trainable part: layers, ``fc``, ``hidden_norm``, ``norm``. Embedding and head stay with the target."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_hidden_layers))
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = RotaryPositions(config.head_dim, config.rope_theta)
        self._training_context: Callable[..., list[KeyValue]] = self.context
        self._training_layer: Callable[..., Tensor] = _run_layer
        self.apply(_init_weights)

    def compile_training(self) -> None:
        """Compile what a training step runs, ``forward`` with masks; drafting and replay, of ever new lengths, stay eager.

        One graph serves all layers of a kind, so that start-up compiles one layer and not the whole drafter.
        """
        self._training_context = torch.compile(self.context, dynamic=False)
        self._training_layer = torch.compile(_run_layer, dynamic=False)

    # -- the two halves of a draft -------------------------------------------------------------------------------

    def context(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of the context, for every layer.

        Args:
            features: (1, T, K * D) concatenated taps.
            positions: (T,) position of each token in its document.
        """
        fused = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(positions, fused.dtype)
        return [layer.self_attn.key_value(fused, cos, sin) for layer in self.layers]

    def blocks(
        self, noise_embeds: Tensor, slot_positions: Tensor, context: Iterable[KeyValue], masks: Sequence[Any]
    ) -> Tensor:
        """Hidden states (1, Q, D) after the final norm of slots (1, Q, D) at positions (Q,); one mask per layer.

        Or of a batch: slots (N, Q, D) at (N, Q), keys and values (N, G, T, d), masks (N, 1, Q, T + Q).
        """
        return self._run_layers(_run_layer, noise_embeds, slot_positions, context, masks)

    def _run_layers(
        self,
        run_layer: Callable[..., Tensor],
        noise_embeds: Tensor,
        slot_positions: Tensor,
        context: Iterable[KeyValue],
        masks: Sequence[Any],
    ) -> Tensor:
        cos, sin = self.rotary(slot_positions.flatten(), noise_embeds.dtype)
        if slot_positions.ndim == 2:
            cos, sin = (table.view(*slot_positions.shape, -1)[:, None] for table in (cos, sin))
        slots = noise_embeds
        for layer, key_value, mask in zip(self.layers, context, masks, strict=True):
            slots = run_layer(layer, slots, key_value, cos, sin, mask)
        return self.norm(slots)

    # -- three ways to call it -----------------------------------------------------------------------------------

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        masks: Sequence[Any] | None = None,
    ) -> Tensor:
        """Draft without a cache.

        Args:
            noise_embeds: (1, Q, D) target embeddings of [anchor, mask, …] for one block or many.
            context_hidden_states: (1, T, K * D) taps.
            position_ids: (1, T + Q) positions of the context, then of the slots.
            masks: one mask per layer (``layer_masks``); None means one block after the whole context.

        Returns:
            (1, Q, D) hidden states after the final norm, ready for the target's head.
        """
        num_context = context_hidden_states.shape[1]
        context_positions, slot_positions = position_ids[0, :num_context], position_ids[0, num_context:]
        if masks is None:
            masks = self.block_masks(context_positions, slot_positions)
            context = self.context(context_hidden_states, context_positions)
            return self.blocks(noise_embeds, slot_positions, context, masks)
        context = self._training_context(context_hidden_states, context_positions)
        return self._run_layers(self._training_layer, noise_embeds, slot_positions, context, masks)

    def new_cache(self, max_context_tokens: int) -> DraftCache:
        """An empty cache for at most ``max_context_tokens`` committed tokens, in the drafter's dtype and device."""
        weight = self.fc.weight
        shape = (1, self.config.num_key_value_heads, max_context_tokens, self.config.head_dim)
        tensors = [weight.new_empty(shape) for _ in range(2 * len(self.layers))]
        positions = torch.zeros(max_context_tokens, dtype=torch.long, device=weight.device)
        return DraftCache(tensors[::2], tensors[1::2], positions)

    @torch.no_grad()
    def extend(self, cache: DraftCache, features: Tensor, positions: Tensor) -> None:
        """Append the context of newly committed tokens: features (1, n, K * D) at positions (n,)."""
        start, end = cache.length, cache.length + features.shape[1]
        assert end <= cache.positions.numel(), "draft cache is too small: a bug of the engine"
        cache.positions[start:end] = positions
        for i, (keys, values) in enumerate(self.context(features, positions)):
            cache.keys[i][:, :, start:end] = keys
            cache.values[i][:, :, start:end] = values
        cache.length = end

    @torch.no_grad()
    def draft(self, cache: DraftCache, noise_embeds: Tensor) -> Tensor:
        """Hidden states (1, B, D) of one block whose anchor stands right behind the cached context."""
        held = cache.length
        offsets = torch.arange(noise_embeds.shape[1], device=noise_embeds.device)
        slot_positions = held + offsets
        context = [(k[:, :, :held], v[:, :, :held]) for k, v in zip(cache.keys, cache.values, strict=True)]
        return self.blocks(
            noise_embeds, slot_positions, context, self.block_masks(cache.positions[:held], slot_positions)
        )

    # -- masks ---------------------------------------------------------------------------------------------------

    def block_masks(self, context_positions: Tensor, slot_positions: Tensor) -> list[Tensor]:
        """Dense masks (B, T + B) of one block, one per layer (layers of a kind share the tensor)."""
        return self._per_layer(
            lambda causal, window: single_block_mask(context_positions, slot_positions, causal=causal, window=window)
        )

    def layer_masks(self, layout: BlockLayout, *, flex: bool) -> list[Any]:
        """Masks of packed training, one per layer: FlexAttention's on GPUs, dense on the CPU."""
        build = flex_mask if flex else dense_mask
        return self._per_layer(lambda causal, window: build(layout, causal=causal, window=window))

    def _per_layer(self, build: Any) -> list[Any]:
        kinds = [(layer.self_attn.causal, layer.self_attn.window) for layer in self.layers]
        made = {kind: build(*kind) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
    ) -> "Drafter":
        """Load a checkpoint in the published layout, in evaluation mode; ``dtype`` None keeps the stored one.

        Raises:
            KitError: a missing folder, key or tensor, or a shape that contradicts the config.
        """
        with torch.device("meta"):
            drafter = cls(DrafterConfig.from_dict(read_config(folder)))
        tensors = read_tensors(folder, drafter.state_dict())
        if dtype is not None:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        drafter.load_state_dict(tensors, assign=True)
        return drafter.to(device).eval()

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, provenance: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the published layout; the folder must be new or empty."""
        tensors = {name: tensor.to(dtype) for name, tensor in self.state_dict().items()}
        config = self.config.to_dict(dtype=str(dtype).removeprefix("torch."))
        return write_checkpoint(folder, config, tensors, provenance or {})


@torch.no_grad()
def _init_weights(module: nn.Module) -> None:
    """Normal(0, 0.02) for projections, as Qwen3 initialises; norms keep their ones."""
    if isinstance(module, nn.Linear) and module.weight.device.type != "meta":
        nn.init.normal_(module.weight, std=0.02)
