"""The target for NVIDIA GPUs: a loaded transformers model, its projections fused in place, run with few kernels.

Llama-like decoders only (`FAMILIES`); for anything else the constructor refuses and the portable engine runs.
The key-value cache is static. One forward pass takes R rows that stand behind ``length`` committed tokens: a chain, a
draft tree, or a piece of the prompt. R comes from a few buckets, so that every pass can be a CUDA graph.
Of several prompts each has R rows in a pass, its heads of the cache and its length.

Shape legend: N prompts, T prompt tokens, R rows of a prompt, D hidden size, K taps, V vocabulary, L layers, C cache slots.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash_kit.errors import KitError
from dflash_kit.target import decoder_layers

from .cuda_graphs import capture
from .device_tree import TreeBuffers
from .feed_forward import unsupported_feed_forwards
from .fused_layers import FusedLayer, RowBuffers, Rows, run_layers
from .fused_ops import Heads, commit_rows, linear, preferred_library
from .fused_weights import is_plain

FAMILIES = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
PREFILL_ROWS = 512
LONG_CONTEXT_TOKENS = 3072
SLACK_SLOTS = 128 + 16
"""Cache slots behind the last row of a round that begins within the context: a tile of keys never reaches outside, nor do the
rows of a round that was started before the end was seen."""


def padded_rows(num_rows: int) -> int:
    """Rows of the smallest bucket that holds ``num_rows``: 1, then multiples of 8."""
    return 1 if num_rows == 1 else -(-num_rows // 8) * 8


@dataclass(slots=True)
class Pass:
    """Everything one forward pass of R rows reads and writes; its addresses never change.

    Attributes:
        tree: tokens, depths, parents and mask of the rows.
        taps: (N * R, K * D)
        logits: (N * R, V), the target's logits behind each row.
        choices: (N * R,) int64, their argmax.
    """

    tree: TreeBuffers
    buffers: RowBuffers
    taps: Tensor
    logits: Tensor
    choices: Tensor
    graph: Any = field(default=None)


class FusedTarget:
    """See the module. ``length`` (N,) int32 lives on the device and counts committed tokens.

    Args:
        model: loaded causal language model, frozen, on the device and in the dtype it shall run in.
        tap_layer_ids: 0-based layers whose output is kept.
        max_context_tokens: prompt and generated tokens together.
        max_rows: rows of the largest pass, padded.
        num_prompts: N, for which there are caches.

    Raises:
        KitError: an architecture that this path does not compute.
    """

    splits_by_context = True
    """Whether passes differ between short and long contexts; see ``long_context``."""
    gains_by_preorder = True
    """Whether large trees had better be numbered so; see `TreeBuffers`."""

    def __init__(
        self,
        model: Any,
        tap_layer_ids: Sequence[int],
        max_context_tokens: int,
        max_rows: int = 16,
        num_prompts: int = 1,
    ) -> None:
        config = model.config.get_text_config()
        check_supported(model)
        layers = decoder_layers(model)
        decoder = model.get_decoder()
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, layers[0].self_attn.head_dim)
        self.layers = [
            FusedLayer.from_module(layer, heads, config.rms_norm_eps, window=_window(layer, config)) for layer in layers
        ]
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()
        self.final_norm, self.eps = decoder.norm.weight.detach(), config.rms_norm_eps
        self.tap_layer_ids = tuple(tap_layer_ids)
        self.max_context_tokens = max_context_tokens
        slots = -(-(max_context_tokens + max(max_rows, PREFILL_ROWS) + SLACK_SLOTS) // 128) * 128
        self.caches = self.embedding.new_zeros(len(layers), 2, num_prompts * heads.num_kv, slots, heads.dim)
        self.length = torch.zeros(num_prompts, dtype=torch.int32, device=self.embedding.device)
        self.tables = rope_tables(decoder.rotary_emb, slots, self.embedding)
        self.long_context = False
        """How attention is split by passes that run or are captured from now on."""
        self._prefilling: list[Pass] = []
        """The one pass that reads prompts, once it is there; parts share it."""
        self._passes: dict[int, Pass] = {}
        self._verified: Pass | None = None

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_prompts(self) -> int:
        return self.length.numel()

    def part(self, first: int, count: int = 1) -> "FusedTarget":
        """The same target for some of its prompts alone: a view of their caches and lengths."""
        part = copy.copy(self)
        num_kv = self.caches.shape[2] // self.num_prompts
        part.caches = self.caches[:, :, first * num_kv : (first + count) * num_kv]
        part.length = self.length[first : first + count]
        part._passes, part._verified = {}, None  # graphs hold addresses
        return part

    def new_pass(self, num_rows: int) -> Pass:
        """Buffers of a pass of ``num_rows`` rows a prompt (a padded count)."""
        device, width, total = self.device, self.embedding.shape[1], self.num_prompts * num_rows
        return Pass(
            tree=TreeBuffers.allocate(num_rows, device, self.num_prompts),
            buffers=RowBuffers.allocate(total, self.layers),
            taps=self.embedding.new_zeros(total, len(self.tap_layer_ids) * width),
            logits=self.embedding.new_zeros(total, self.head.shape[0]),
            choices=torch.zeros(total, dtype=torch.long, device=device),
        )

    def run(self, step: Pass, *, head_rows: slice | None = slice(None)) -> None:
        """One forward pass; ``head_rows`` are the rows that get logits and choices (None: no row)."""
        b, tree = step.buffers, step.tree
        torch.index_select(self.embedding, 0, tree.tokens, out=b.residual)
        width = self.embedding.shape[1]
        taps = {layer: step.taps[:, i * width : (i + 1) * width] for i, layer in enumerate(self.tap_layer_ids)}
        rows = Rows(tree.mask, tree.depths, self.length, self.tables, self.long_context, tree.ancestors)
        with preferred_library(tree.tokens.numel()):
            states = run_layers(self.layers, self.caches, rows, b, self.final_norm, self.eps, taps)
        if head_rows is not None:
            linear(states[head_rows], self.head, None, step.logits[head_rows])
            torch.argmax(step.logits[head_rows], dim=-1, out=step.choices[head_rows])

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, on_taps: Callable[[Tensor, int], None] | None = None) -> tuple[Tensor, Tensor]:
        """Read a prompt from the start; forgets what was committed before.

        Args:
            input_ids: (T,) int64.
            on_taps: called with the taps (n, K * D) of every piece and the position of its first token.

        Returns:
            The logits (V,) behind the last token, and its argmax (1,) int64.
        """
        count = input_ids.numel()
        if not 0 < count <= self.max_context_tokens:
            raise KitError(
                f"the prompt has {count} tokens; allowed is 1..{self.max_context_tokens} (max_context_tokens)"
            )
        self.length.zero_()
        self.long_context = False  # so many rows fill a GPU without splitting attention further
        step = self.prefill_pass()
        for start in range(0, count, PREFILL_ROWS):
            piece = input_ids[start : start + PREFILL_ROWS]
            step.tree.tokens.zero_()
            step.tree.tokens[: piece.numel()] = piece
            last = start + piece.numel() == count
            end = piece.numel()
            self.run(step, head_rows=slice(end - 1, end) if last else None)
            if on_taps is not None:
                on_taps(step.taps[:end], start)
            self.length += end
        return step.logits[end - 1], step.choices[end - 1 : end]

    def prefill_pass(self) -> Pass:
        """The pass that reads prompts, `PREFILL_ROWS` at a time."""
        assert self.num_prompts == 1, "one prompt is read at a time"
        if not self._prefilling:
            self._prefilling.append(self.new_pass(PREFILL_ROWS))
            self._prefilling[0].tree.set_chain()
        return self._prefilling[0]

    @torch.no_grad()
    def verify(self, tokens: Tensor, depths: Tensor, parents: Tensor) -> Pass:
        """Judge a tree behind the committed tokens: anchor and n nodes, as three tensors of `dflash_kit.tree.Tree`.

        Args:
            tokens: (n + 1,) int64, the anchor's token first.
            depths: (n,) from 1.
            parents: (n,) rows of the parents.

        Returns:
            The pass, with logits, choices and taps of rows 0 … n.
        """
        num_rows = padded_rows(tokens.numel())
        if num_rows not in self._passes:
            self._passes[num_rows] = self.new_pass(num_rows)
        step = self._passes[num_rows]
        step.tree.tokens[0] = tokens[0]
        step.tree.set_nodes(tokens[1:], depths, parents)
        self.replay(step)
        self._verified = step
        return step

    @torch.no_grad()
    def commit(self, path: Tensor) -> None:
        """Keep rows ``path`` (a,) of the last pass, ascending from the root's row 0, and advance by their number."""
        padded = torch.zeros(1 << (path.numel() - 1).bit_length(), dtype=torch.int32, device=self.device)
        padded[: path.numel()] = path
        count = torch.full((1,), path.numel() - 1, dtype=torch.int32, device=self.device)
        assert self._verified is not None, "nothing was verified"
        self.keep(self._verified, padded, count)
        self.length += path.numel()

    def carried(self) -> list[Tensor]:
        """What a round changes for the next one, caches aside."""
        return [self.length]

    def rewind(self, num_tokens: int) -> None:
        """Go back to the end of the prompt of ``num_tokens``: nothing before it has changed since."""
        self.length.fill_(num_tokens)

    def keep(self, _step: Pass, path: Tensor, num_accepted: Tensor) -> None:
        """Commit a path of the last pass without advancing ``length``; arguments as for ``commit_rows``."""
        if path.numel() > self.num_prompts:
            commit_rows(self.caches, path, num_accepted, self.length)

    def replay(self, step: Pass) -> None:
        """Run a pass, on a GPU as a CUDA graph that is captured the first time."""
        if not self.embedding.is_cuda:
            self.run(step)
            return
        if step.graph is None:
            step.graph = capture(lambda: self.run(step))
        step.graph.replay()


@torch.no_grad()
def rope_tables(rotary: nn.Module, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (positions, d / 2) of a transformers rotary module, in dtype and device of ``like``.

    Of multimodal rotary positions all three are those of text, which are equal.
    """
    positions = torch.arange(num_positions, device=like.device)[None]
    if hasattr(rotary, "mrope_section"):
        positions = positions.expand(3, 1, -1)
    cos, sin = rotary(like[:1, None], positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _window(layer: Any, config: Any) -> int | None:
    """The layer's sliding window: Qwen keeps it in the layer (None where it is full), Mistral in the config."""
    if type(layer).__name__ == "MistralDecoderLayer":
        return getattr(config, "sliding_window", None)
    return getattr(layer.self_attn, "sliding_window", None)


def check_supported(model: Any) -> None:
    """Refuse what this path would compute wrongly.

    Raises:
        KitError: naming the part that is different.
    """
    layers = decoder_layers(model)
    config = model.config.get_text_config()
    reasons = []
    family = type(layers[0]).__name__
    if family not in FAMILIES:
        reasons.append(f"its layers are {family}, not one of {', '.join(FAMILIES)}")
    else:
        attention = layers[0].self_attn
        reasons += unsupported_feed_forwards(layers, config.hidden_act)
        if attention.head_dim not in (16, 32, 64, 128, 256):
            reasons.append(f"head_dim is {attention.head_dim}, not a power of two within 16..256")
        rope = model.get_decoder().rotary_emb.rope_type
        if rope not in STATIC_ROPE:
            reasons.append(f"rope_type is {rope!r}, which depends on the length")
        if not is_plain(attention.q_proj):
            reasons.append("its projections are not plain nn.Linear (quantised?)")
    if model.get_output_embeddings().bias is not None:
        reasons.append("its head has a bias")
    if reasons:
        raise KitError(
            f"the fused path does not run {type(model).__name__}: {'; '.join(reasons)}; use the portable one"
        )
