"""The drafter for NVIDIA GPUs: context pass and block pass in the fused form, on the target's device buffers.

The context pass projects the fused taps to keys and values of all layers with one matrix product. The block's own
keys and values lie in the slots behind the context while it is drafted, and the next context pass overwrites them.

Of several prompts each has its block, its heads of the cache and, shared with the target, its length.

Shape legend: N prompts, B block size, K taps, D hidden size, G key-value heads, d head dimension, V vocabulary, L layers, C slots.
"""

import copy

import torch
from torch import Tensor

from dflash_kit.drafter import Drafter

from .fused_layers import FusedLayer, RowBuffers, Rows, run_layers
from .fused_ops import Heads, add_norm, linear, pack_mask, rope_write
from .fused_target import FusedTarget


class FusedDrafter:
    """Wraps a `Drafter`; its weights are fused in place. Shares ``length`` with the target."""

    def __init__(self, drafter: Drafter, target: FusedTarget) -> None:
        config, like = drafter.config, target.embedding
        self.config, self.target = config, target
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.layers = [
            FusedLayer.from_module(
                layer,
                heads,
                config.rms_norm_eps,
                window=layer.self_attn.window,
                bidirectional=not layer.self_attn.causal,
            )
            for layer in drafter.layers
        ]
        self.kv_heads = Heads(0, heads.num_kv, heads.dim)
        queries = heads.num_queries * heads.dim
        self.kv = torch.cat([layer.qkv[queries:] for layer in self.layers])
        self.k_norms = torch.cat([layer.norms[1] for layer in self.layers if layer.norms is not None])
        self.fc = drafter.fc.weight.detach()
        self.hidden_norm, self.norm = drafter.hidden_norm.weight.detach(), drafter.norm.weight.detach()
        slots = target.caches.shape[3]
        self.caches = like.new_zeros(len(self.layers), 2, target.num_prompts * heads.num_kv, slots, heads.dim)
        cos, sin = drafter.rotary(torch.arange(slots, device=like.device), like.dtype)
        half = heads.dim // 2
        self.tables = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        self._allocate()

    def part(self, target: FusedTarget, first: int) -> "FusedDrafter":
        """The same drafter for the prompts of ``target``, a part of its own target from prompt ``first`` on."""
        part, num_kv = copy.copy(self), self.kv_heads.num_kv
        part.target = target
        part.caches = self.caches[:, :, first * num_kv : (first + target.num_prompts) * num_kv]
        part._allocate()
        return part

    def _allocate(self) -> None:
        config, like, count = self.config, self.target.embedding, self.target.num_prompts
        size = config.block_size
        self.slots = torch.full((count * size,), config.mask_token_id, dtype=torch.long, device=like.device)
        """(N * B,) int64 anchors and masks."""
        self.anchor = self.slots.view(count, size)[:, 0]
        """(N,) view of them."""
        self.depths = torch.arange(size, dtype=torch.int32, device=like.device).repeat(count)
        full = torch.ones(size, size, dtype=torch.bool, device=like.device)
        self.masks = {seen: pack_mask(mask).repeat(count, 1) for seen, mask in ((True, full), (False, full.tril()))}
        self.buffers = RowBuffers.allocate(count * size, self.layers)
        self.logits = like.new_zeros(count * size, self.target.head.shape[0])

    @property
    def draft_logits(self) -> Tensor:
        """(N, B - 1, V) view of the logits of the slots behind the anchors."""
        return self.logits.view(self.target.num_prompts, -1, self.logits.shape[1])[:, 1:]

    def extend(self, features: Tensor) -> None:
        """Write the context of taps (N * n, K * D) to slots ``length`` … ``length + n - 1``; ``length`` is not advanced."""
        rows, count = features.shape[0], self.target.num_prompts
        fused = linear(features, self.fc, None, features.new_empty(rows, self.fc.shape[0]))
        normed = add_norm(fused, None, self.hidden_norm, self.config.rms_norm_eps, torch.empty_like(fused))
        projected = linear(normed, self.kv, None, normed.new_empty(rows, self.kv.shape[0]))
        depths = self.depths
        if rows != depths.numel():
            depths = torch.arange(rows // count, dtype=torch.int32, device=fused.device).repeat(count)
        rope_write(
            projected, None, self.caches, (None, self.k_norms), self.tables, depths, self.target.length, self.kv_heads,
            self.config.rms_norm_eps,
        )  # fmt: skip

    def draft(self) -> Tensor:
        """``draft_logits`` of the anchors in ``slots``."""
        torch.index_select(self.target.embedding, 0, self.slots, out=self.buffers.residual)
        mask = self.masks[self.layers[0].bidirectional]
        rows = Rows(mask, self.depths, self.target.length, self.tables, self.target.long_context)
        states = run_layers(
            self.layers, self.caches, rows, self.buffers, self.norm, self.config.rms_norm_eps, row_masks=self._masks()
        )
        linear(states, self.target.head, None, self.logits)
        return self.draft_logits

    def _masks(self) -> list[Tensor]:
        return [self.masks[layer.bidirectional] for layer in self.layers]
