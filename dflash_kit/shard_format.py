"""What is in a shards folder: the header, the row, the Arrow schema, the manifest and the checksums.

A folder holds ``manifest.jsonl`` and ``shard-NNNNN.arrow``, or those of several writers (see ``shard_share``). A
manifest's first line is the header, each further line is the journal entry of a finished shard or the summary of a
run. Reader, writer and verification share this module.

The row rule. ``input_ids`` are the tokens that have hidden states: exactly one row of ``hidden_states`` per
token. The last token that a target says is never fed back to it, so it has no state; it is kept in
``next_token`` (-1 when the response was given, not generated). ``token_ids`` = ``input_ids`` followed by
``next_token`` is the whole conversation.

Shape legend: T tokens with states, K taps, D hidden size.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from .errors import KitError
from .shard_states import LAST_HIDDEN_DTYPE, STORED_DTYPES
from .target import TargetSpec

FORMAT_VERSION = 1
LAYER_ID_CONVENTION = "0-based; the layer's output = hidden_states[id + 1] of transformers"
SHARD_GLOB = "shard-*.arrow"
INCOMPLETE_SUFFIX = ".incomplete"
NO_NEXT_TOKEN = -1
HEADER_KEY = b"dflash_kit.header"
ARROW_TYPES = {"bfloat16": pa.uint16(), "float32": pa.float32(), "fp8": pa.uint8()}
COMPRESSIONS = ("none", "zstd")
# Fields that say where the target was read from; a moved folder is still the same target.
PLACE_FIELDS = {"target_name"}
# Fields that may be unknown (None): older shards lack them, and a hub id's weights may not have been there.
LATER_FIELDS = ("weights_hash", "eos_token_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardsHeader:
    """Everything that has to agree between the shards, the target and whoever reads them."""

    format_version: int = FORMAT_VERSION
    """Version of this file format."""
    target_name: str
    """Folder or hub id of the target, as it was given."""
    target_revision: str | None
    """Hub revision, None for a folder."""
    config_hash: str
    """Hash of the target's configuration."""
    tokenizer_hash: str | None
    """Hash of the tokenizer's vocabulary and rules."""
    template_hash: str | None
    """Hash of the chat template, None when the tokenizer has none."""
    weights_hash: str | None = None
    """Hash of the target's weights, None when they were not known."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that ended responses; None in shards of earlier versions."""
    vocab_size: int
    """Rows of the target's embedding."""
    hidden_size: int
    """D: width of one tap."""
    target_layer_ids: tuple[int, ...]
    """Tapped layers, in the order in which their outputs are concatenated."""
    layer_id_convention: str = LAYER_ID_CONVENTION
    """What a layer id means, spelt out."""
    num_taps: int
    """K: number of taps."""
    dtype: str = "bfloat16"
    """Stored type of the hidden states: bfloat16 (as bits), float32, or fp8 (float8_e4m3 as bits, and scales)."""
    compression: str = "none"
    """Compression of the file's buffers: none or zstd."""
    has_last_hidden: bool = False
    """Whether rows also hold the last layer's output before the final norm."""
    compute_dtype: str
    """Type in which the target computed them."""
    engine: str
    """What ran the target: vllm or transformers."""
    engine_version: str
    """Version of that engine."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """How responses were sampled (temperature 0 = greedy), and the seed."""
    checksum: str = "blake2b_64"
    """Algorithm of the checksums of rows and files."""

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise KitError(f"shards have format version {self.format_version}; this program reads {FORMAT_VERSION}")
        if self.dtype not in STORED_DTYPES:
            raise KitError(f"shards dtype is {self.dtype!r}; allowed: {', '.join(STORED_DTYPES)}")
        if self.compression not in COMPRESSIONS:
            raise KitError(f"shards compression is {self.compression!r}; allowed: {', '.join(COMPRESSIONS)}")
        if self.num_taps != len(self.target_layer_ids) or not self.target_layer_ids:
            raise KitError(f"num_taps is {self.num_taps} but target_layer_ids are {list(self.target_layer_ids)}")

    @classmethod
    def from_target(cls, spec: TargetSpec, **others: Any) -> "ShardsHeader":
        """A header for this target; ``others`` are the remaining fields."""
        layer_ids = tuple(others.pop("target_layer_ids"))
        return cls(
            target_name=spec.name,
            target_revision=spec.revision,
            config_hash=spec.config_hash,
            tokenizer_hash=spec.tokenizer_hash,
            template_hash=spec.template_hash,
            weights_hash=spec.weights_hash,
            eos_token_ids=spec.eos_token_ids,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            target_layer_ids=layer_ids,
            num_taps=len(layer_ids),
            checksum=default_checksum(),
            **others,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ShardsHeader":
        """Read a header; ``KitError`` for unknown or missing fields (written by another version)."""
        known = {f.name for f in fields(cls)}
        optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
        odd = sorted(set(values) ^ known - (optional - set(values)))
        if odd:
            raise KitError(f"shards header has unknown or missing fields {odd}; it was written by another version")
        lists = ("target_layer_ids", "eos_token_ids")
        read: dict[str, Any] = {k: tuple(v) if k in lists and v is not None else v for k, v in values.items()}
        return cls(**read)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    @property
    def row_width(self) -> int:
        """K * D: values per token."""
        return self.num_taps * self.hidden_size

    @property
    def states_dtype(self) -> torch.dtype:
        """Type of the hidden states of the rows that readers hand out."""
        return torch.bfloat16 if self.dtype == "fp8" else STORED_DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a shard before compression, metadata left out."""
        last_bytes = self.hidden_size * LAST_HIDDEN_DTYPE.itemsize if self.has_last_hidden else 0
        scale_bytes = 4 * self.num_taps if self.dtype == "fp8" else 0
        return self.row_width * STORED_DTYPES[self.dtype].itemsize + scale_bytes + last_bytes + 5

    def captured_layer_ids(self, num_layers: int) -> list[int]:
        """Layers of a target of ``num_layers`` whose outputs an engine captures: the taps and, for the last hidden state,
        the last layer, unless it is tapped anyway. ``split_captured`` takes them apart."""
        last = {num_layers - 1} if self.has_last_hidden else set()
        return sorted({*self.target_layer_ids, *last})

    def require_compatible(self, other: "ShardsHeader | TargetSpec", what: str = "these shards") -> None:
        """Refuse shards of another target, or written with other settings.

        Args:
            other: a target's specification (identity and sizes are compared) or another header (all but its
                place).

        Raises:
            KitError: naming the first field that differs, and both values.
        """
        difference = self.difference(other)
        if difference is not None:
            name, mine, theirs = difference
            raise KitError(
                f"{what}: {name} is {mine} in the shards but {theirs} here; "
                "use the target and settings they were written with, or another folder"
            )

    def difference(self, other: "ShardsHeader | TargetSpec") -> tuple[str, str, str] | None:
        """The first field that differs (as in ``require_compatible``) with both values as JSON; None if none does."""
        if isinstance(other, ShardsHeader):
            names = [f.name for f in fields(self) if f.name not in PLACE_FIELDS]
        else:
            names = ["hidden_size", "vocab_size", "config_hash", "tokenizer_hash", "template_hash", *LATER_FIELDS]
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            unknown = name in LATER_FIELDS and None in (mine, theirs)
            if mine != theirs and not unknown:
                return name, _shown(mine), _shown(theirs)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One conversation with its hidden states; see the row rule at the top of this module."""

    id: str
    """Stable hash of what was asked."""
    input_ids: Tensor
    """(T,) int32: tokens that have hidden states."""
    loss_mask: Tensor
    """(T,) bool: tokens that the assistant said, the ones to be learnt."""
    hidden_states: Tensor
    """(T, K * D), bfloat16 or as the header's dtype says: taps in layer-id order."""
    next_token: int = NO_NEXT_TOKEN
    """The token that the target said last (an end token or the one at the length limit); -1: none."""
    last_hidden: Tensor | None = None
    """(T, D) bfloat16: the last layer's output before the final norm; None where the header has none."""
    scales: Tensor | None = None
    """(T, K) float32: only in rows as fp8 shards store them, whose hidden states are float8; readers hand out the product."""

    @property
    def is_generated(self) -> bool:
        """Whether the target itself said the response (then ``next_token`` is known)."""
        return self.next_token != NO_NEXT_TOKEN

    def token_ids(self) -> Tensor:
        """(T,) or (T + 1,) int64: the whole conversation, with ``next_token`` when there is one."""
        tail = [self.next_token] if self.is_generated else []
        return torch.cat([self.input_ids.long(), torch.tensor(tail, dtype=torch.int64)])

    def token_mask(self) -> Tensor:
        """Bool mask over ``token_ids``: what the assistant said, ``next_token`` included."""
        tail = [True] if self.is_generated else []
        return torch.cat([self.loss_mask, torch.tensor(tail, dtype=torch.bool)])


def arrow_schema(header: ShardsHeader) -> pa.Schema:
    """Columns of a shard; the header travels in the schema's metadata, too."""

    def per_token(value_type: pa.DataType, width: int) -> pa.DataType:
        return pa.list_(pa.list_(value_type, width))

    columns = {
        "id": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "hidden_states": per_token(ARROW_TYPES[header.dtype], header.row_width),
    }
    if header.dtype == "fp8":
        columns["scales"] = per_token(pa.float32(), header.num_taps)
    if header.has_last_hidden:
        columns["last_hidden"] = per_token(pa.uint16(), header.hidden_size)
    columns |= {"next_token": pa.int32(), "checksum": pa.uint64()}
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in columns.items()],
        metadata={HEADER_KEY: json.dumps(header.to_dict(), sort_keys=True).encode()},
    )


def default_checksum() -> str:
    """The fastest checksum that is installed (xxhash hashes 10 GB/s, blake2b 1)."""
    try:
        import_module("xxhash")
    except ImportError:
        return "blake2b_64"
    return "xxh3_64"


def new_hasher(algorithm: str) -> Any:
    """An object with ``update`` and ``hexdigest`` (16 hex digits)."""
    if algorithm == "blake2b_64":
        return hashlib.blake2b(digest_size=8)
    if algorithm == "xxh3_64":
        try:
            factory: Callable[[], Any] = import_module("xxhash").xxh3_64
        except ImportError as error:
            raise KitError("these shards carry xxh3_64 checksums; install xxhash to read them") from error
        return factory()
    raise KitError(f"checksum algorithm {algorithm!r} is unknown; known: xxh3_64, blake2b_64")


def row_checksum(algorithm: str, row: Row) -> int:
    """Checksum of everything in a row, as stored (``with_stored_states``)."""
    hasher = new_hasher(algorithm)
    hasher.update(row.id.encode() + b"\0" + str(row.next_token).encode())
    hasher.update(row.input_ids.contiguous().numpy())
    hasher.update(row.loss_mask.contiguous().numpy())
    for states in (row.hidden_states, row.scales, row.last_hidden):
        if states is not None:
            hasher.update(states.contiguous().view(torch.uint8).numpy())
    return int(hasher.hexdigest(), 16)


def file_checksum(algorithm: str, path: Path) -> str:
    """``algorithm:hex`` of a whole file."""
    hasher = new_hasher(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return f"{algorithm}:{hasher.hexdigest()}"


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=list)
