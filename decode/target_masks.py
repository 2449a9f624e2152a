"""Attention masks of the target's forward passes: committed context, then the rows of the pass.

Shape legend: T committed tokens, n rows of the pass.
"""

from typing import Any

import torch
from torch import Tensor

from dflash_kit.errors import KitError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class TargetMasks:
    """Makes what a target's ``attention_mask`` argument takes, for its kinds of attention layers.

    Raises:
        KitError: a layer kind whose state a mask cannot steer (recurrent or chunked layers).
    """

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        self.kinds = attention_kinds(text)
        self.window = text.sliding_window if SLIDING in self.kinds else None

    def __call__(self, row_positions: Tensor, visible: Tensor, num_committed: int, dtype: torch.dtype) -> Any:
        """Additive masks (1, 1, n, T + n): one tensor, or a dictionary where a target mixes kinds.

        Args:
            row_positions: (n,) position of each row; committed token i has position i.
            visible: (n, n) bool, which rows of the pass see which.
            num_committed: T.
            dtype: of the target.
        """
        context = torch.ones(len(row_positions), num_committed, dtype=torch.bool, device=visible.device)
        seen = torch.cat([context, visible], dim=1)
        keys = torch.cat([torch.arange(num_committed, device=visible.device), row_positions])
        return self._additive(seen[None], row_positions[None], keys[None], dtype)

    def of_batch(self, row_positions: Tensor, visible: Tensor, lengths: Tensor, end: int, dtype: torch.dtype) -> Any:
        """Additive masks (A, 1, n, L) of A responses whose rows stand right behind their own committed tokens.

        Args:
            row_positions: (A, n).
            visible: (A, n, n) bool, which rows of a response see which.
            lengths: (A,) committed tokens; what lies behind a response's rows is hidden.
            end: L, keys of the longest response.
            dtype: of the target.
        """
        count, num_rows = row_positions.shape
        columns = lengths[:, None] + torch.arange(num_rows, device=lengths.device)
        keys = torch.arange(end, device=lengths.device).expand(count, -1)
        seen = (keys < lengths[:, None])[:, None].repeat(1, num_rows, 1)
        seen.scatter_(2, columns[:, None].expand(-1, num_rows, -1), visible)
        return self._additive(seen, row_positions, keys.scatter(1, columns, row_positions), dtype)

    def _additive(self, seen: Tensor, row_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Any:
        """Masks of all kinds from who sees whom (A, n, L), and positions (A, n) and (A, L)."""
        masks = {}
        for kind in self.kinds:
            allowed = seen
            if kind == SLIDING:
                allowed = seen & (row_positions[..., :, None] - key_positions[..., None, :] < self.window)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=seen.device)
            masks[kind] = mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
        return masks if len(masks) > 1 else masks[self.kinds[0]]


def attention_kinds(text_config: Any) -> list[str]:
    """Kinds of attention that a target has; refuses what tree verification would silently get wrong."""
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types:
        kinds = sorted(set(layer_types) - {LINEAR}) or [FULL]  # linear layers take no mask: see DeltaLayers
    else:
        kinds = [SLIDING if getattr(text_config, "sliding_window", None) is not None else FULL]
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise KitError(
            f"target {text_config.model_type} has {', '.join(unknown)} layers, whose state a tree mask "
            f"does not steer; this version decodes targets with {FULL} and {SLIDING} layers only"
        )
    return kinds
