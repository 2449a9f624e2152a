"""The target behind three calls: prefill a prompt, verify a tree, commit a path.

The loop knows nothing else of the target, so a target with another kind of state needs another runner, not
another loop.

Shape legend: T committed tokens, n nodes of a tree (n + 1 rows with the root), V vocabulary, K taps, D
hidden size.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_kit.errors import KitError
from dflash_kit.target import TapRecorder, decoder_layers
from dflash_kit.tree import Tree, ancestor_mask, positions

from .cache import PathCache
from .delta_layers import DeltaLayers
from .target_masks import TargetMasks

PREFILL_CHUNK_TOKENS = 2048


class TargetRunner:
    """Runs a transformers target over trees, with its keys and values in one preallocated cache.

    Args:
        model: a causal language model with SDPA attention, frozen, in evaluation mode.
        tap_layer_ids: layers whose outputs the drafter reads; empty when nothing is drafted.

    Raises:
        KitError: a target with layers that neither a mask nor ``DeltaLayers`` can steer, or with another attention
            implementation.
    """

    def __init__(self, model: Any, tap_layer_ids: Sequence[int]) -> None:
        implementation = model.config.get_text_config()._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise KitError(f"target runs {implementation} attention, which takes no tree mask; load it with sdpa")
        self._delta = DeltaLayers(model)
        if getattr(model, "_is_stateful", False) and not self._delta.layers:
            raise KitError(
                f"target {model.config.model_type} keeps a recurrent state, which this version cannot verify "
                "trees over; it decodes targets with attention and Gated DeltaNet layers"
            )
        self.model = model
        self.masks = TargetMasks(model.config)
        self.dtype, self.device = model.dtype, model.device
        self._recorder = TapRecorder(model, tap_layer_ids) if tap_layer_ids else None
        self._num_layers = len(decoder_layers(model))
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache = PathCache(self._num_layers, 0)
        self._pending: Tensor | None = None
        self._num_prompt_tokens = 0

    @property
    def num_committed(self) -> int:
        """Tokens whose keys and values are committed."""
        return self._cache.length

    @property
    def committed(self) -> tuple[PathCache, DeltaLayers]:
        """What is committed: keys and values, and the states of Gated DeltaNet layers."""
        return self._cache, self._delta

    def reserve(self, num_tokens: int) -> None:
        """Make room for that many tokens, rows of a verification included; forgets what was committed."""
        if self._cache.capacity < num_tokens:
            self._cache = PathCache(self._num_layers, num_tokens)
        self._cache.length = 0
        self._delta.reset()

    def rewind(self, num_tokens: int) -> None:
        """Go back to the end of the prompt, ``num_tokens``, to decode on from there once more."""
        assert num_tokens == self._num_prompt_tokens
        self._cache.length = num_tokens
        self._delta.restore()

    @torch.no_grad()
    def prefill(self, prompt_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Commit a prompt (T,).

        Returns:
            Logits (V,) behind its last token, and taps (1, T, K * D), None without tap layers.
        """
        taps: list[Tensor] = []
        logits = None
        self._delta.expect_prompt()
        for chunk in prompt_ids.split(PREFILL_CHUNK_TOKENS):
            rows = torch.arange(len(chunk), device=self.device)
            logits, tap = self._forward(chunk, self._cache.length + rows, rows[:, None] >= rows, last_only=True)
            self._cache.commit(rows)
            if tap is not None:
                taps.append(tap)
        assert logits is not None, "a prompt has at least one token"
        self._num_prompt_tokens = self._cache.length
        self._delta.save()
        return logits[-1], torch.cat(taps, dim=1) if taps else None

    @torch.no_grad()
    def verify(self, anchor: int, tree: Tree) -> Tensor:
        """One forward pass over the anchor and all nodes: logits (n + 1, V), row 0 behind the anchor."""
        token_ids = torch.cat([tree.tokens.new_tensor([anchor]), tree.tokens]).to(self.device)
        row_positions = positions(tree, self._cache.length).to(self.device)
        visible = ancestor_mask(tree.parents).to(self.device)
        self._delta.expect_tree(tree.parents, self.device)
        logits, self._pending = self._forward(token_ids, row_positions, visible, last_only=False)
        return logits

    @torch.no_grad()
    def commit(self, rows: Sequence[int]) -> Tensor | None:
        """Keep the anchor (row 0) and the accepted nodes of the last verification, and forget the rest.

        Args:
            rows: rows of the path from the root down; node i is row i + 1.

        Returns:
            Taps (1, len(rows), K * D) of these rows, None without tap layers.
        """
        index = torch.tensor(rows, device=self.device)
        self._cache.commit(index)
        self._delta.commit(rows)
        taps, self._pending = self._pending, None
        return None if taps is None else taps[:, index]

    def _forward(
        self, token_ids: Tensor, row_positions: Tensor, visible: Tensor, *, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (rows, V), or (1, V) of the last row alone, and the taps of all rows."""
        mask = self.masks(row_positions, visible, self._cache.length, self.dtype)
        logits, taps = self.run_model(token_ids[None], row_positions[None], mask, self._cache, last_only=last_only)
        return logits[0], taps

    def run_model(
        self, token_ids: Tensor, row_positions: Tensor, mask: Any, cache: Any, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """One forward pass of the model over rows (A, n) at positions (A, n).

        Args:
            token_ids: int64.
            row_positions: int64.
            mask: what the model takes as ``attention_mask``.
            cache: keys and values, written by the pass.
            last_only: logits of the last row alone where the model can do that.

        Returns:
            Logits (A, n, V), and taps (A, n, K * D), None without tap layers.
        """
        arguments: dict[str, Any] = {
            "input_ids": token_ids,
            "position_ids": row_positions,
            "attention_mask": mask,
            self._cache_name: cache,
            "use_cache": True,
        }
        if last_only and self._keeps_logits:
            arguments["logits_to_keep"] = 1
        if self._recorder is None:
            return self.model(**arguments).logits, None
        with self._recorder as recorder:
            logits = self.model(**arguments).logits
            return logits, recorder.taps()
