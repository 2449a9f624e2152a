"""Packed rows: conversations of the shards laid end to end, with the anchors, labels and weights of their blocks.

Everything that the loss needs but the model is decided here, on the CPU and from the row alone: which slots count,
what they should say and how much they weigh. So the global normalisation is known before the first forward pass.

Shape legend: T tokens of a packed row, K taps, D hidden size, N blocks, B block size, M slots with a weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_kit.errors import KitError
from dflash_kit.masks import BlockLayout
from dflash_kit.shard_states import LAST_HIDDEN_DTYPE
from dflash_kit.shards import Row, Shards

from .anchors import draw_anchors, row_generator
from .losses import decay_weights
from .packing import PackedIndex

NOISE_STREAM = 2
SLOT_STREAM = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """One forward pass: a packed row and its blocks."""

    index: PackedIndex
    ids: tuple[str, ...]
    """Ids of the conversations, for messages."""
    token_ids: Tensor
    """(T,) int64; 0 in the unfilled tail."""
    features: Tensor
    """(T, K * D) taps, zero where a token has no state (the last one said) and in the tail."""
    layout: BlockLayout
    """Positions, documents (-1 in the tail), anchors and which blocks are used."""
    slots: Tensor
    """(M,) int64, ascending: flat indices block * B + slot of the slots with a weight above 0."""
    labels: Tensor
    """(M,) int64: slot k of a block says the token at anchor + k."""
    weights: Tensor
    """(M,) float32: the decayed weight of each slot."""
    num_cut_tokens: int
    """Tokens of conversations that did not fit into a packed row."""
    last_hidden: Tensor | None = None
    """(T, D) output of the target's last layer before the final norm, zero where a token has no state; None where the
    loss does without."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Id and what is wrong, of each conversation that was left out because it cannot be read."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return int((self.layout.documents >= 0).sum())

    @property
    def depths(self) -> Tensor:
        """(M,) int64: k of each weighted slot, 1 … B - 1."""
        return self.slots % self.layout.block_size

    @property
    def label_places(self) -> Tensor:
        """(M,) int64: index in the packed row of the token that each weighted slot says."""
        return self.layout.anchors[self.slots // self.layout.block_size] + self.depths

    def trimmed(self) -> "PackedRow":
        """The same without the unfilled tail and the unused blocks (at least one of each stays).

        Used ones come first in both, so nothing moves. For the CPU; GPUs want fixed shapes.
        """
        layout = self.layout
        tokens, blocks = max(self.num_tokens, 1), max(int(layout.used.sum()), 1)
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            features=self.features[:tokens],
            last_hidden=None if self.last_hidden is None else self.last_hidden[:tokens],
            layout=BlockLayout(
                layout.positions[:tokens],
                layout.documents[:tokens],
                layout.anchors[:blocks],
                layout.used[:blocks],
                layout.block_size,
            ),
        )

    def pinned(self) -> "PackedRow":
        """The same with its large tensors in pinned memory, for asynchronous copies to a GPU."""
        last_hidden = None if self.last_hidden is None else self.last_hidden.pin_memory()
        return replace(self, features=self.features.pin_memory(), last_hidden=last_hidden)

    def to(self, device: torch.device, feature_dtype: torch.dtype) -> "PackedRow":
        """Copy to a device; features also to the dtype that the drafter computes in."""
        layout = self.layout

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            token_ids=move(self.token_ids),
            features=move(self.features).to(feature_dtype),
            last_hidden=None if self.last_hidden is None else move(self.last_hidden),
            layout=BlockLayout(
                move(layout.positions),
                move(layout.documents),
                move(layout.anchors),
                move(layout.used),
                layout.block_size,
            ),
            slots=move(self.slots),
            labels=move(self.labels),
            weights=move(self.weights),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPacker:
    """Builds packed rows from the shards; safe to call from another thread."""

    shards: Shards
    row_indices: Sequence[int]
    """Rows of the shards to train on; members of a ``PackedIndex`` count in this list."""
    seq_len: int
    """T"""
    num_anchors: int
    """N"""
    block_size: int
    """B"""
    gamma: float
    """Decay of the slot weights."""
    seed: int
    feature_noise: float = 0.0
    """Standard deviation of the noise on the taps, as a share of each tap's own root mean square."""
    sample_slots: bool = False
    """Keep each slot with the probability of its weight instead of weighing it."""
    with_last_hidden: bool = False
    """Read the target's last hidden states, too."""
    skip_unreadable: bool = False
    """Leave out conversations that cannot be read, and say so in the packed row."""

    def __call__(self, index: PackedIndex) -> PackedRow:
        """Read, lay out and weigh one packed row.

        Raises:
            KitError: a shard of it is unreadable or damaged.
        """
        rows, unreadable = self._read(index)
        token_ids, supervised, features, positions, documents, num_cut = self._lay_out(rows)
        if self.feature_noise:
            self._add_noise(features, index)
        anchors, used = draw_anchors(
            documents, supervised, self.num_anchors, seed=self.seed, epoch=index.epoch, row=index.row
        )
        layout = BlockLayout(positions, documents, anchors, used, self.block_size)
        slots, labels, weights = weigh_slots(layout, token_ids, supervised, self.gamma)
        if self.sample_slots:
            draws = row_generator(self.seed, index.epoch, index.row, SLOT_STREAM).random(len(weights))
            kept = torch.from_numpy(draws).float() < weights
            slots, labels, weights = slots[kept], labels[kept], torch.ones(int(kept.sum()))
        return PackedRow(
            index=index,
            ids=tuple(row.id for row in rows),
            token_ids=token_ids,
            features=features,
            layout=layout,
            slots=slots,
            labels=labels,
            weights=weights,
            num_cut_tokens=num_cut,
            last_hidden=self._lay_out_last_hidden(rows) if self.with_last_hidden else None,
            unreadable=unreadable,
        )

    def _read(self, index: PackedIndex) -> tuple[list[Row], tuple[tuple[str, str], ...]]:
        """The conversations, and of those that are left out, id and what is wrong."""
        rows, unreadable = [], []
        for place in (self.row_indices[i] for i in index.members):
            try:
                rows.append(self.shards[place])
            except KitError as error:
                if not self.skip_unreadable:
                    raise KitError(
                        f"{error}; data.skip_unreadable true trains on without such conversations"
                    ) from error
                unreadable.append((self.shards.ids[place], str(error)))
        return rows, tuple(unreadable)

    def _lay_out(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        header = self.shards.header
        token_ids = torch.zeros(self.seq_len, dtype=torch.int64)
        supervised = torch.zeros(self.seq_len, dtype=torch.bool)
        features = torch.zeros(self.seq_len, header.row_width, dtype=header.states_dtype)
        positions = torch.zeros(self.seq_len, dtype=torch.int64)
        documents = torch.full((self.seq_len,), -1, dtype=torch.int64)
        start = num_cut = 0
        for document, row in enumerate(rows):
            tokens = row.token_ids()
            length = min(len(tokens), self.seq_len - start)
            num_cut += len(tokens) - length
            span = slice(start, start + length)
            token_ids[span] = tokens[:length]
            supervised[span] = row.token_mask()[:length]
            states = row.hidden_states[:length]
            features[start : start + len(states)] = states
            positions[span] = torch.arange(length)
            documents[span] = document
            start += length
        return token_ids, supervised, features, positions, documents, num_cut

    def _lay_out_last_hidden(self, rows: Sequence[Row]) -> Tensor:
        laid = torch.zeros(self.seq_len, self.shards.header.hidden_size, dtype=LAST_HIDDEN_DTYPE)
        start = 0
        for row in rows:
            assert row.last_hidden is not None, "the header was asked before"
            length = min(len(row.token_ids()), self.seq_len - start)
            states = row.last_hidden[:length]
            laid[start : start + len(states)] = states
            start += length
        return laid

    def _add_noise(self, features: Tensor, index: PackedIndex) -> None:
        """Gaussian noise that depends on nothing but (seed, epoch, row)."""
        seed = int(row_generator(self.seed, index.epoch, index.row, NOISE_STREAM).integers(2**62))
        noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(seed))
        taps = features.float().unflatten(-1, (self.shards.header.num_taps, -1))
        scale = taps.square().mean(-1, keepdim=True).sqrt() * self.feature_noise
        features += (noise.view_as(taps) * scale).flatten(-2).to(features.dtype)


def packed_length(num_state_tokens: int) -> int:
    """Places that a row takes at most in a packed row: the last said token has no state but is learnt."""
    return num_state_tokens + 1


def weigh_slots(
    layout: BlockLayout, token_ids: Tensor, supervised: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and weights of the slots that count.

    Slot k of a block says the token at anchor + k: the same place, no shift. It counts while every token from the
    anchor's successor up to its own is supervised and of the anchor's document (decoding would have stopped
    otherwise).

    Returns:
        slots (M,) int64 flat indices, labels (M,) int64, weights (M,) float32.
    """
    offsets = torch.arange(1, layout.block_size)
    places = layout.anchors[:, None] + offsets
    inside = places < len(token_ids)
    places = places.clamp(max=len(token_ids) - 1)
    same = layout.documents[places] == layout.documents[layout.anchors][:, None]
    counts = (inside & same & supervised[places] & layout.used[:, None]).long().cumprod(1).bool()
    slots = (torch.arange(len(layout.anchors))[:, None] * layout.block_size + offsets)[counts]
    weights = decay_weights(layout.block_size, gamma).expand(len(layout.anchors), -1)[counts]
    return slots, token_ids[places[counts]], weights
