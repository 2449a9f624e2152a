"""Packed rows: conversations of the shards laid end to end, with the anchors, labels and weights of their blocks.

Everything that the loss needs but the model is decided here, on the CPU and from the row alone: which slots count,
what they should say and how much they weigh. So the global normalisation is known before the first forward pass.

Shape legend: T tokens of a packed row, K taps, D hidden size, N blocks, B block size, M slots with a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_kit.errors import KitError
from dflash_kit.masks import BlockLayout
from dflash_kit.shard_states import LAST_HIDDEN_DTYPE, STORED_DTYPES, dequantise
from dflash_kit.shards import Row, Shards

from .anchors import draw_anchors, row_generator
from .laying import lay_states, lay_tokens
from .losses import decay_weights
from .packing import PackedIndex
from .transfer import Bundle

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
    """(T, K * D) taps, zero where a token has no state (the last one said) and in the tail; float8 codes where there are
    ``scales``."""
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
    scales: Tensor | None = None
    """(T, K) float32: the taps are codes * scales; None where ``features`` are the taps themselves."""
    flops: float = 0.0
    """Operations of a forward and backward pass over it."""
    bundle: Bundle | None = None
    """The small tensors once more, side by side, as ``to`` copies them."""
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
            scales=None if self.scales is None else self.scales[:tokens],
            bundle=None,
            last_hidden=None if self.last_hidden is None else self.last_hidden[:tokens],
            layout=BlockLayout(
                layout.positions[:tokens],
                layout.documents[:tokens],
                layout.anchors[:blocks],
                layout.used[:blocks],
                layout.block_size,
            ),
        )

    @property
    def small_tensors(self) -> list[Tensor]:
        """All but the states; those whose sizes vary come last."""
        layout = self.layout
        fixed = [self.token_ids, layout.positions, layout.documents, layout.anchors, layout.used]
        return [*fixed, self.slots, self.labels, self.weights]

    def bundled(self, *, pin: bool) -> "PackedRow":
        """The same, ready to be copied in few pieces; ``pin`` where the host is not to wait for the copies."""
        return replace(self, bundle=Bundle.of(self.small_tensors, pin=pin))

    def to(self, device: torch.device, feature_dtype: torch.dtype) -> "PackedRow":
        """Copy to a device; taps also to the dtype that the drafter computes in."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        if self.bundle is None:
            small = [move(tensor) for tensor in self.small_tensors]
        else:
            small = self.bundle.to(device).tensors()
        token_ids, positions, documents, anchors, used, slots, labels, weights = small
        features = move(self.features)
        if self.scales is not None:
            features = dequantise(features, move(self.scales))
        return replace(
            self,
            token_ids=token_ids,
            features=features.to(feature_dtype),
            scales=None,
            bundle=None,
            last_hidden=None if self.last_hidden is None else move(self.last_hidden),
            layout=BlockLayout(positions, documents, anchors, used, self.layout.block_size),
            slots=slots,
            labels=labels,
            weights=weights,
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
    count_flops: Callable[[PackedRow], float] | None = None
    """Counts a packed row's operations; None leaves 0."""
    keeps_codes: bool = False
    """Hand out float8 states as they are stored, for the device to turn into taps; not together with noise."""
    pins: bool = False
    """Lay the states into pinned memory."""

    def for_gpu(self) -> "RowPacker":
        """The same for a GPU: half the bytes of fp8 shards to copy, and nothing that the host waits for."""
        return replace(self, keeps_codes=not self.feature_noise, pins=True)

    def __call__(self, index: PackedIndex) -> PackedRow:
        """Read, lay out and weigh one packed row.

        Raises:
            KitError: a shard of it is unreadable or damaged.
        """
        rows, unreadable = self._read(index)
        laid = lay_tokens(rows, self.seq_len)
        features, scales = self._lay_taps(rows, laid.lengths)
        if self.feature_noise:
            self._add_noise(features, index)
        token_ids, supervised = laid.token_ids, laid.supervised
        anchors, used = draw_anchors(
            laid.documents, supervised, self.num_anchors, seed=self.seed, epoch=index.epoch, row=index.row
        )
        layout = BlockLayout(laid.positions, laid.documents, anchors, used, self.block_size)
        slots, labels, weights = weigh_slots(layout, token_ids, supervised, self.gamma)
        if self.sample_slots:
            draws = row_generator(self.seed, index.epoch, index.row, SLOT_STREAM).random(len(weights))
            kept = torch.from_numpy(draws).float() < weights
            slots, labels, weights = slots[kept], labels[kept], torch.ones(int(kept.sum()))
        packed = PackedRow(
            index=index,
            ids=tuple(row.id for row in rows),
            token_ids=token_ids,
            features=features,
            scales=scales,
            layout=layout,
            slots=slots,
            labels=labels,
            weights=weights,
            num_cut_tokens=laid.num_cut_tokens,
            last_hidden=self._lay_last_hidden(rows, laid.lengths) if self.with_last_hidden else None,
            unreadable=unreadable,
        )
        flops = 0.0 if self.count_flops is None else self.count_flops(packed)
        packed = replace(packed, flops=flops)
        return packed.bundled(pin=True) if self.pins else packed

    def _read(self, index: PackedIndex) -> tuple[list[Row], tuple[tuple[str, str], ...]]:
        """The conversations, and of those that are left out, id and what is wrong."""
        rows, unreadable = [], []
        for place in (self.row_indices[i] for i in index.members):
            try:
                rows.append(self.shards.stored(place))
            except KitError as error:
                if not self.skip_unreadable:
                    raise KitError(
                        f"{error}; data.skip_unreadable true trains on without such conversations"
                    ) from error
                unreadable.append((self.shards.ids[place], str(error)))
        return rows, tuple(unreadable)

    def _lay_taps(self, rows: Sequence[Row], lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Taps (T, K * D), or float8 codes and their scales (T, K)."""
        header = self.shards.header
        is_fp8 = header.dtype == "fp8"
        pin = self.pins and (self.keeps_codes or not is_fp8)
        dtype = STORED_DTYPES[header.dtype]
        laid_dtype = torch.uint8 if is_fp8 else dtype  # few operations know float8
        states = [row.hidden_states.view(laid_dtype) for row in rows]
        empty = torch.zeros(1, header.row_width, dtype=laid_dtype)
        features = lay_states(states, lengths, self.seq_len, empty, pin=pin).view(dtype)
        if not is_fp8:
            return features, None
        parts = [row.scales for row in rows if row.scales is not None]
        scales = lay_states(parts, lengths, self.seq_len, torch.zeros(1, header.num_taps), pin=pin)
        if self.keeps_codes:
            return features, scales
        taps = dequantise(features, scales)
        return taps.pin_memory() if self.pins else taps, None

    def _lay_last_hidden(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tensor:
        states = [row.last_hidden for row in rows if row.last_hidden is not None]  # the header was asked before
        empty = torch.zeros(1, self.shards.header.hidden_size, dtype=LAST_HIDDEN_DTYPE)
        return lay_states(states, lengths, self.seq_len, empty, pin=self.pins)

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
