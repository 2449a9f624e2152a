"""What the drafter is built of: rotary positions, attention of slots over context and slots, feed-forward, layer.

Shape legend: L tokens or slots, Q slots, D hidden size, H query heads, G key-value heads, d head dimension.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from .drafter_config import SLIDING, DrafterConfig

KeyValue = tuple[Tensor, Tensor]


class RotaryPositions(nn.Module):
    """Plain full-dimension rotary embedding; the tables are computed in float32."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (L, d), of integer positions (L,)."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angles = positions[:, None].float() * (1.0 / self.theta**exponents)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (1, heads, L, d) by position tables (L, d)."""
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin


class DrafterAttention(nn.Module):
    """Grouped-query attention of slots over context and slots, with per-head query and key norms."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        hidden, heads, groups, dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.num_heads, self.num_groups, self.head_dim = heads, groups, dim
        self.window = config.sliding_window if config.layer_types[layer_index] == SLIDING else None
        self.causal = config.layer_causal[layer_index]
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, groups * dim, bias=False)
        self.v_proj = nn.Linear(hidden, groups * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def key_value(self, states: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """Keys and values (1, G, L, d) of states (1, L, D); context and slots share these projections."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (self.num_groups, self.head_dim))).transpose(1, 2)
        values = self.v_proj(states).unflatten(-1, (self.num_groups, self.head_dim)).transpose(1, 2)
        return rotate(keys, cos, sin), values

    def forward(self, slots: Tensor, context: KeyValue, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """Attend from slots (1, Q, D) to ``context`` and themselves under ``mask`` (dense bool or BlockMask)."""
        queries = self.q_norm(self.q_proj(slots).unflatten(-1, (self.num_heads, self.head_dim))).transpose(1, 2)
        queries = rotate(queries, cos, sin)
        slot_keys, slot_values = self.key_value(slots, cos, sin)
        keys, values = torch.cat([context[0], slot_keys], dim=2), torch.cat([context[1], slot_values], dim=2)
        return self.o_proj(attend(queries, keys, values, mask).transpose(1, 2).flatten(2))


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    """Masked attention (N, H, Q, d); ``mask`` is a bool tensor (SDPA) or a FlexAttention ``BlockMask``."""
    if isinstance(mask, Tensor):
        repeats = queries.shape[1] // keys.shape[1]
        if len(queries) > 1:  # few slots each: the heads of a group are rows of one product, and keys need no copies
            grouped = queries.unflatten(1, (-1, repeats)).flatten(2, 3)
            found = functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask.repeat(1, 1, repeats, 1)
            )
            return found.unflatten(2, (repeats, -1)).flatten(1, 2)
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    run = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    return run(queries, keys, values, block_mask=mask, enable_gqa=True)


@functools.cache
def _compiled_flex_attention() -> Any:
    """FlexAttention for eager callers: uncompiled it materialises every score."""
    return torch.compile(flex_attention, dynamic=False)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class DrafterLayer(nn.Module):
    """Pre-norm attention and feed-forward; only slots pass through it."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config, layer_index)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, slots: Tensor, context: KeyValue, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        slots = slots + self.self_attn(self.input_layernorm(slots), context, cos, sin, mask)
        return slots + self.mlp(self.post_attention_layernorm(slots))
