"""The fused target for hybrids (Qwen3-Next, Qwen3.5, Qwen3.6: Gated DeltaNet and attention): one tree, one CUDA graph.

Prompts are read by the model's own forward pass, which takes flash-linear-attention's kernels where that package is
installed. Verification runs here: no state per node, and what was committed is only read until a path is kept.

Shape legend: T prompt tokens, R rows, D hidden size, L linear layers, H value heads, Dk and Dv key and value width,
C convolution channels, W convolution kernel, G key-value heads, d head dimension.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_kit.errors import KitError
from dflash_kit.target import TapRecorder, decoder_layers

from .delta_ops import commit_states, delta_inputs, gated_norm, gated_rope
from .delta_rule import DeltaRows, DeltaShape, tree_delta
from .device_tree import TreeBuffers
from .fused_layers import RowBuffers
from .fused_ops import (
    Heads,
    add_norm,
    commit_rows,
    linear,
    preferred_library,
    tree_attention,
)
from .fused_target import PREFILL_ROWS, SLACK_SLOTS, FusedTarget, Pass, rope_tables
from .hybrid_layers import MixerLayer, check_hybrid, norm_gain

PREFILL_CHUNK_TOKENS = 2048


@dataclass(slots=True)
class HybridPass(Pass):
    """A pass and what the linear layers keep of it until a path is committed."""

    delta: DeltaRows = field(kw_only=True)
    columns: Tensor = field(kw_only=True)
    """(R, W) int32, where each row's convolution inputs lie."""


class HybridTarget(FusedTarget):
    """See the module; used as ``FusedTarget`` is.

    Raises:
        KitError: an architecture that this path does not compute.
    """

    splits_by_context = False
    gains_by_preorder = (
        False  # few layers attend, and the others take a step for each node of the longest path in a tile of rows
    )

    def __init__(self, model: Any, tap_layer_ids: Sequence[int], max_context_tokens: int, max_rows: int = 16) -> None:
        check_hybrid(model)
        config, modules = model.config.get_text_config(), decoder_layers(model)
        self.model = model
        self.heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.mixers = [MixerLayer.from_module(layer) for layer in modules]
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()
        decoder = _decoder(model)
        self.final_norm, self.eps = norm_gain(decoder.norm), config.rms_norm_eps
        self.tap_layer_ids, self.max_context_tokens = tuple(tap_layer_ids), max_context_tokens
        slots = -(-(max_context_tokens + max(max_rows, PREFILL_ROWS) + SLACK_SLOTS) // 128) * 128
        linear_modules = [layer.linear_attn for layer in modules if hasattr(layer, "linear_attn")]
        first = linear_modules[0]
        self.shape = DeltaShape(
            first.num_k_heads, first.num_v_heads, first.head_k_dim, first.head_v_dim, first.conv_kernel_size
        )
        self.gate_norm_eps = first.norm.variance_epsilon
        count = len(linear_modules)
        like = self.embedding
        self.caches = like.new_zeros(len(modules) - count, 2, self.heads.num_kv, slots, self.heads.dim)
        size = (count, self.shape.heads, self.shape.key, self.shape.value)
        self.states = torch.zeros(size, dtype=torch.float32, device=like.device)
        self.windows = like.new_zeros(count, self.shape.kernel - 1, self.shape.channels)
        self._prompt_end: tuple[Tensor, Tensor] | None = None
        self.length = torch.zeros(1, dtype=torch.int32, device=like.device)
        self.tables = rope_tables(decoder.rotary_emb, slots, like)
        self.long_context = False
        self._passes, self._verified = {}, None
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"

    def new_pass(self, num_rows: int) -> HybridPass:
        """Buffers of a pass of ``num_rows`` rows (a padded count)."""
        like, width, heads, device = self.embedding, self.embedding.shape[1], self.heads, self.device
        wide = max(layer.feed_forward.width for layer in self.mixers)

        def empty(*shape: int) -> Tensor:
            return like.new_zeros(num_rows, *shape)

        buffers = RowBuffers(
            residual=empty(width), normed=empty(width), qkv=empty(2 * (heads.num_queries + heads.num_kv) * heads.dim),
            queries=empty(heads.num_queries, heads.dim), attended=empty(heads.num_queries * heads.dim),
            delta=empty(width), gate_up=empty(2 * wide), activated=empty(wide),
        )  # fmt: skip
        return HybridPass(
            tree=TreeBuffers.allocate(num_rows, device), buffers=buffers, taps=empty(len(self.tap_layer_ids) * width),
            logits=empty(self.head.shape[0]), choices=torch.zeros(num_rows, dtype=torch.long, device=device),
            delta=DeltaRows.allocate(len(self.states), num_rows, self.shape, like),
            columns=torch.zeros(num_rows, self.shape.kernel, dtype=torch.int32, device=device),
        )  # fmt: skip

    def run(self, step: Pass, *, head_rows: slice | None = slice(None)) -> None:
        """One forward pass; see ``FusedTarget.run``. States, windows and committed slots are only read."""
        assert isinstance(step, HybridPass)
        b, tree, width = step.buffers, step.tree, self.embedding.shape[1]
        torch.index_select(self.embedding, 0, tree.tokens, out=b.residual)
        step.columns.copy_(convolution_columns(tree.parents, self.shape.kernel))
        taps = {layer: step.taps[:, i * width : (i + 1) * width] for i, layer in enumerate(self.tap_layer_ids)}
        delta, num_linear, num_attention = None, 0, 0
        with preferred_library(tree.num_rows):
            for index, layer in enumerate(self.mixers):
                add_norm(b.residual, delta, layer.input_norm, self.eps, b.normed, taps.get(index - 1))
                if layer.is_linear:
                    mixed = self._mix(layer, num_linear, step)
                    num_linear += 1
                else:
                    mixed = self._attend(layer, num_attention, step)
                    num_attention += 1
                linear(mixed, layer.out, None, b.delta)
                add_norm(b.residual, b.delta, layer.post_norm, self.eps, b.normed)
                delta = layer.feed_forward.run(b)
            states = add_norm(b.residual, delta, self.final_norm, self.eps, b.normed, taps.get(len(self.mixers) - 1))
        if head_rows is not None:
            linear(states[head_rows], self.head, None, step.logits[head_rows])
            torch.argmax(step.logits[head_rows], dim=-1, out=step.choices[head_rows])

    def _mix(self, layer: MixerLayer, index: int, step: HybridPass) -> Tensor:
        """A linear layer between its norm and its output projection: (R, H * Dv)."""
        rows, shape = step.delta, self.shape
        assert layer.conv_CW is not None and layer.a_log is not None
        assert layer.dt_bias is not None and layer.gate_norm is not None
        mixed = linear(step.buffers.normed, layer.projection, None, rows.mixed[index])
        delta_inputs(rows, index, self.windows[index], step.columns, layer.conv_CW, layer.a_log, layer.dt_bias, shape)
        tree_delta(rows, index, self.states[index], step.tree.mask, shape)
        gate = mixed[:, shape.channels : shape.channels + shape.heads * shape.value]
        return gated_norm(rows.out, gate, layer.gate_norm, self.gate_norm_eps, rows.out)

    def _attend(self, layer: MixerLayer, index: int, step: HybridPass) -> Tensor:
        """An attention layer between its norm and its output projection: (R, H * d)."""
        b, tree, heads = step.buffers, step.tree, self.heads
        assert layer.gains is not None
        linear(b.normed, layer.projection, None, b.qkv)
        gated_rope(
            b.qkv, b.queries, self.caches[index], layer.gains, self.tables, tree.depths, self.length, self.eps
        )  # fmt: skip
        tree_attention(
            b.queries, self.caches[index], tree.mask, tree.depths, self.length, b.attended, scale=heads.dim**-0.5
        )
        gate = b.qkv[:, : 2 * heads.num_queries * heads.dim].view(tree.num_rows, heads.num_queries, 2, heads.dim)
        b.attended.view(tree.num_rows, heads.num_queries, heads.dim).mul_(torch.sigmoid(gate[:, :, 1]))
        return b.attended

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, on_taps: Callable[[Tensor, int], None] | None = None) -> tuple[Tensor, Tensor]:
        """Read a prompt with the model's own forward pass; see ``FusedTarget.prefill``."""
        from transformers import DynamicCache

        count = input_ids.numel()
        if not 0 < count <= self.max_context_tokens:
            raise KitError(
                f"the prompt has {count} tokens; allowed is 1..{self.max_context_tokens} (max_context_tokens)"
            )
        cache: Any = DynamicCache(config=self.model.config.get_text_config())
        self.length.zero_()
        logits = None
        for start in range(0, count, PREFILL_CHUNK_TOKENS):
            piece = input_ids[None, start : start + PREFILL_CHUNK_TOKENS]
            arguments = {"input_ids": piece, "use_cache": True, "logits_to_keep": 1, self._cache_name: cache}
            with TapRecorder(self.model, self.tap_layer_ids) as recorder:
                logits = self.model(**arguments).logits[0]
                if on_taps is not None and self.tap_layer_ids:
                    on_taps(recorder.taps()[0], start)
            self.length += piece.shape[1]
        assert logits is not None
        self._take(cache, count)
        return logits[-1], logits[-1:].argmax(-1)

    def _take(self, cache: Any, count: int) -> None:
        """Copy what transformers committed: keys and values of ``count`` tokens, windows and recurrent states."""
        linear_at = attention_at = 0
        for layer, kept in zip(self.mixers, cache.layers, strict=True):
            if layer.is_linear:
                self.windows[linear_at].copy_(kept.conv_states[0][0, :, 1 - self.shape.kernel :].T)
                self.states[linear_at].copy_(kept.recurrent_states[0][0])
                linear_at += 1
            else:
                self.caches[attention_at, 0, :, :count].copy_(kept.keys[0])
                self.caches[attention_at, 1, :, :count].copy_(kept.values[0])
                attention_at += 1
        self._prompt_end = self.states.clone(), self.windows.clone()

    def carried(self) -> list[Tensor]:
        """What a round changes for the next one, caches aside."""
        return [self.length, self.states, self.windows]

    def rewind(self, num_tokens: int) -> None:
        """Go back to the end of the prompt of ``num_tokens``."""
        assert self._prompt_end is not None, "nothing was prefilled"
        self.length.fill_(num_tokens)
        self.states.copy_(self._prompt_end[0])
        self.windows.copy_(self._prompt_end[1])

    def keep(self, step: Pass, path: Tensor, num_accepted: Tensor) -> None:
        """Commit a path of the last pass: keys, values, windows and states of the same leaf; see ``FusedTarget``."""
        assert isinstance(step, HybridPass)
        if path.numel() > 1:
            commit_rows(self.caches, path, num_accepted, self.length)
        commit_states(self.states, self.windows, step.delta, path, num_accepted, self.shape)


def convolution_columns(parents: Tensor, kernel: int) -> Tensor:
    """(R, W) where each row's convolution inputs lie, oldest first: W - 1 committed ones, then row r at W - 1 + r.

    Args:
        parents: (R,) rows, -1 at the root.
    """
    window = kernel - 1
    behind = torch.cat([torch.arange(-1, window - 1, device=parents.device), parents.long() + window]).clamp(min=0)
    columns = [torch.arange(window, window + parents.numel(), device=parents.device)]
    for _ in range(window):
        columns.append(behind[columns[-1]])
    return torch.stack(columns[::-1], dim=1)


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder()
    return getattr(decoder, "language_model", decoder)
