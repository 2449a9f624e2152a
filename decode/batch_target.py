"""The target over many responses: one forward pass verifies a tree of each.

Shape legend: A responses in use, n rows of the largest tree, P longest path, V vocabulary, K taps, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_kit.target import decoder_layers
from dflash_kit.tree import Tree

from .batch_cache import BatchCache, pad_paths
from .batch_delta import BatchDelta
from .forest import Forest
from .target_runner import TargetRunner


class BatchTarget:
    """Slots of committed responses over one runner, which prefills their prompts.

    Args:
        runner: reads prompts; a forward pass over trees goes through its model, too.
        num_slots: responses at once, at most.
    """

    def __init__(self, runner: TargetRunner, num_slots: int) -> None:
        self.runner, self.device, self.model = runner, runner.device, runner.model
        _, delta = runner.committed
        self._cache = BatchCache(len(decoder_layers(runner.model)), num_slots)
        self._delta = BatchDelta(delta, num_slots)
        self._last: tuple[Forest, Tensor | None] | None = None

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each response."""
        return self._cache.lengths

    def admit(self, num_tokens: int) -> None:
        """Take the prompt that the runner prefilled last into the next slot, with room for ``num_tokens``."""
        prompt, _ = self.runner.committed
        self._cache.reserve(num_tokens)
        self._cache.admit(prompt)
        self._delta.admit()

    def release(self, slot: int) -> None:
        """Free a slot; the last one in use moves into it."""
        self._cache.release(slot)
        self._delta.release(slot)

    @torch.no_grad()
    def verify(self, anchors: Sequence[int], trees: Sequence[Tree]) -> Tensor:
        """Logits (A, n, V) behind each anchor (row 0) and all nodes; rows beyond a tree's own are padding."""
        forest = Forest.of(anchors, trees, self.device)
        num_rows = forest.tokens.shape[1]
        lengths = torch.tensor(self._cache.lengths, device=self.device)
        self._cache.expect(lengths, num_rows)
        row_positions = lengths[:, None] + forest.depths
        mask = self.runner.masks.of_batch(row_positions, forest.visible, lengths, self._cache.end, self.runner.dtype)
        self._delta.look_at(forest)
        try:
            logits, taps = self.runner.run_model(forest.tokens, row_positions, mask, self._cache)
        finally:
            self._delta.look_at(None)
        self._last = forest, taps
        return logits

    @torch.no_grad()
    def commit(self, paths: Sequence[Sequence[int]]) -> Tensor | None:
        """Keep the anchor (row 0) and the accepted nodes of each response, and forget the rest.

        Returns:
            Taps (A, P, K * D) of the paths' rows, None without tap layers; behind a path's end, its anchor's.
        """
        assert self._last is not None, "nothing was verified"
        (forest, taps), self._last = self._last, None
        padded = pad_paths(paths, self.device)
        self._cache.commit(paths, padded)
        self._delta.commit(paths, padded, forest)
        return None if taps is None else taps[torch.arange(len(paths), device=self.device)[:, None], padded]
