"""Drafting at any anchors of recorded rows.

Shape legend: T tokens with states, N anchors, B block size, M = B - 1 depths, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafter import Drafter, KeyValue
from .masks import BlockLayout
from .shards import Row
from .target_ends import TargetEnds

ROWS_PER_PASS = 8
"""Rows drafted in one pass: the weights are read once for all, but a block is masked against the tokens of all of them."""
CPU_TOKENS_PER_PASS = 512
"""On a CPU, where attention to what is masked takes longer than reading the weights again: tokens of all rows of a pass."""


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """What the drafter reads of one row.

    Attributes:
        tokens: (T + 1,) or (T,) int64 on the CPU.
        keys_values: of every drafter layer, (1, G, T, d) each.
    """

    tokens: Tensor
    keys_values: list[KeyValue]

    @classmethod
    def of(cls, drafter: Drafter, row: Row, num_tokens: int) -> "RowContext":
        """Run the drafter's context pass over the first ``num_tokens`` tokens of a row."""
        weight = drafter.fc.weight
        features = row.hidden_states[None, :num_tokens].to(device=weight.device, dtype=weight.dtype)
        positions = torch.arange(features.shape[1], device=weight.device)
        return cls(row.token_ids().long(), drafter.context(features, positions))


def draft_blocks(drafter: Drafter, ends: TargetEnds, places: Sequence[tuple[RowContext, int]]) -> Tensor:
    """Hidden states (N, M, D) of the masked slots of one block at each anchor.

    Args:
        drafter: the drafter.
        ends: the target's embedding.
        places: row and anchor of each block.
    """
    rows = list({id(context): context for context, _ in places}.values())
    hidden: Tensor | None = None
    for group in _groups(rows, drafter.fc.weight.device):
        members = [i for i, (context, _) in enumerate(places) if any(context is row for row in group)]
        found = _draft_pass(drafter, ends, group, [places[i] for i in members])
        if hidden is None:
            hidden = found.new_empty(len(places), *found.shape[1:])
        hidden[members] = found
    assert hidden is not None
    return hidden


def _groups(rows: list[RowContext], device: torch.device) -> list[list[RowContext]]:
    """Rows that are drafted together, neighbours."""
    groups: list[list[RowContext]] = []
    for row in rows:
        num_tokens = sum(context.tokens.numel() for context in (*groups[-1], row)) if groups else 0
        is_full = not groups or len(groups[-1]) == ROWS_PER_PASS
        if is_full or (device.type == "cpu" and num_tokens > CPU_TOKENS_PER_PASS):
            groups.append([])
        groups[-1].append(row)
    return groups


def _draft_pass(
    drafter: Drafter, ends: TargetEnds, rows: list[RowContext], places: list[tuple[RowContext, int]]
) -> Tensor:
    """One pass over the rows side by side, each a document of its own."""
    device, block_size = rows[0].keys_values[0][0].device, drafter.config.block_size
    # Keys behind a row's last anchor are hidden from all of its blocks.
    lengths = [max(anchor for context, anchor in places if context is row) + 1 for row in rows]
    starts = {id(row): sum(lengths[:i]) for i, row in enumerate(rows)}
    block_ids = torch.full((len(places), block_size), drafter.config.mask_token_id)
    block_ids[:, 0] = torch.stack([context.tokens[anchor] for context, anchor in places])
    layout = BlockLayout(
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        documents=torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device),
        anchors=torch.tensor([starts[id(context)] + anchor for context, anchor in places], device=device),
        used=torch.ones(len(places), dtype=torch.bool, device=device),
        block_size=block_size,
    )
    hidden = drafter.blocks(
        ends.embed(block_ids.to(device).flatten()[None]).to(rows[0].keys_values[0][0].dtype),
        layout.slot_positions,
        [_side_by_side(rows, lengths, layer) for layer in range(len(drafter.layers))],
        drafter.layer_masks(layout, flex=False),
    )
    return hidden.unflatten(1, (len(places), block_size))[0, :, 1:]


def _side_by_side(rows: list[RowContext], lengths: list[int], layer: int) -> KeyValue:
    keys, values = zip(
        *(
            (row.keys_values[layer][0][:, :, :length], row.keys_values[layer][1][:, :, :length])
            for row, length in zip(rows, lengths, strict=True)
        ),
        strict=True,
    )
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)
