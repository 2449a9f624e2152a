"""One Arrow file of a shards folder: growing it with a checksum, and mapping it into torch without a copy."""

import json
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from .errors import KitError
from .shard_entry import ShardEntry
from .shard_format import (
    ARROW_TYPES,
    HEADER_KEY,
    Row,
    ShardsHeader,
    arrow_schema,
    new_hasher,
    row_checksum,
)
from .shard_states import LAST_HIDDEN_DTYPE, STORED_DTYPES, with_stored_states
from .writeback import Writeback

# What parsing damaged bytes may raise: besides Arrow's own errors, columns of another type or length.
PARSE_FAULTS = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


class GrowingShard:
    """An Arrow file under construction: one record batch a row, hashed while it is written."""

    def __init__(self, path: Path, header: ShardsHeader) -> None:
        self.path = path
        self.ids: list[str] = []
        self.lengths: list[int] = []
        self._header = header
        self._schema = arrow_schema(header)
        self._sink = _HashingSink(path, new_hasher(header.checksum))
        compression = None if header.compression == "none" else header.compression
        options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer = pa.ipc.new_file(self._sink, self._schema, options=options)

    @property
    def num_bytes(self) -> int:
        """Bytes written up to now."""
        return self._sink.num_bytes

    def add(self, row: Row) -> None:
        """Append a row as it is stored (``to_stored``)."""
        self._writer.write_batch(_to_batch(row, self._header, self._schema))
        self.ids.append(row.id)
        self.lengths.append(len(row.input_ids))

    def finish(self, final: Path) -> ShardEntry:
        """Complete the file, make it durable, and give it its final name."""
        self._writer.close()
        self._sink.sync_and_close()
        os.rename(self.path, final)
        sync_folder(final.parent)
        return ShardEntry(
            file=final.name,
            rows=len(self.ids),
            tokens=sum(self.lengths),
            lengths=self.lengths,
            ids=self.ids,
            checksum=f"{self._header.checksum}:{self._sink.hasher.hexdigest()}",
            bytes=self._sink.num_bytes,
        )

    def abandon(self) -> None:
        """Close and delete the unfinished file."""
        self._sink.drop()
        self.path.unlink(missing_ok=True)


class _HashingSink:
    """File object for Arrow that counts and hashes what passes through."""

    closed = False

    def __init__(self, path: Path, hasher: Any) -> None:
        self.hasher = hasher
        self.num_bytes = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._writeback = Writeback(self._descriptor)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.hasher.update(view)
        num_bytes = len(view)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self.num_bytes += num_bytes
        self._writeback.follow(self.num_bytes)
        return num_bytes

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        """Arrow closes its sink before we are through with the file: see ``sync_and_close``."""

    def sync_and_close(self) -> None:
        os.fsync(self._descriptor)
        self.drop()

    def drop(self) -> None:
        """Close without making anything durable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ShardFile:
    """A finished Arrow file, memory-mapped: tensors of its rows share the page cache, unless the file is compressed.

    The mapping is private and copy-on-write, so a tensor that is written to never reaches the file.
    """

    def __init__(self, path: Path) -> None:
        """Map the file; ``KitError`` when it is missing or no Arrow file of ours."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._buffer = pa.py_buffer(self._map)
            self._reader = pa.ipc.open_file(self._buffer)
            self.header = _header_of(self._reader.schema)
        except (*PARSE_FAULTS, KitError) as error:
            raise KitError(f"shard {path} cannot be read: {error}; restore it or extract into a new folder") from error

    @property
    def num_rows(self) -> int:
        """Rows in the file."""
        return int(self._reader.num_record_batches)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._map)

    def row(self, index: int) -> tuple[Row, int]:
        """A row as it is stored, sharing the file's memory, and its stored checksum.

        Raises:
            KitError: the bytes are damaged so far that they cannot be parsed.
        """
        try:
            # Reading what a shortened file no longer has would end the process (SIGBUS).
            if self._map.size() < len(self._map):
                raise ValueError(f"the file was cut to {self._map.size():,} of {len(self._map):,} bytes while in use")
            batch = self._reader.get_batch(index)
            batch.validate(
                full=True
            )  # damage may have sent a buffer out of the file, where reading it ends the process
            return self._to_row(batch), batch.column("checksum")[0].as_py()
        except PARSE_FAULTS as error:
            raise KitError(
                f"shard {self.path} row {index} is damaged: {error}; restore the file from a copy"
            ) from error

    def sound_rows(self) -> list[Row]:
        """All rows as they are stored; ``KitError`` for one that does not match its checksum."""
        pairs = [self.row(index) for index in range(self.num_rows)]
        damaged = [row.id for row, checksum in pairs if row_checksum(self.header.checksum, row) != checksum]
        if damaged:
            raise KitError(f"shard {self.path} is damaged: row {damaged[0]} does not match its checksum")
        return [row for row, _ in pairs]

    def _to_row(self, batch: pa.RecordBatch) -> Row:
        header, num_tokens = self.header, len(batch.column("input_ids").values)
        mask = np.asarray(batch.column("loss_mask").values.to_numpy(zero_copy_only=False))

        def states(name: str, dtype: torch.dtype, width: int) -> Tensor:
            return self._view(batch.column(name).values.values, dtype).view(num_tokens, width)

        return Row(
            id=batch.column("id")[0].as_py(),
            input_ids=self._view(batch.column("input_ids").values, torch.int32),
            loss_mask=torch.from_numpy(mask.copy()),
            hidden_states=states("hidden_states", STORED_DTYPES[header.dtype], header.row_width),
            next_token=batch.column("next_token")[0].as_py(),
            last_hidden=states("last_hidden", LAST_HIDDEN_DTYPE, header.hidden_size)
            if header.has_last_hidden
            else None,
            scales=states("scales", torch.float32, header.num_taps) if header.dtype == "fp8" else None,
        )

    def _view(self, array: pa.Array, dtype: torch.dtype) -> Tensor:
        """The array's values as a tensor over the mapping, without a copy; of compressed files a copy."""
        data = array.buffers()[1]
        if self.header.compression != "none":
            raw = np.frombuffer(data, np.uint8, len(array) * dtype.itemsize, array.offset * dtype.itemsize)
            return torch.from_numpy(raw.copy()).view(dtype)
        start = data.address - self._buffer.address + array.offset * dtype.itemsize
        if not 0 <= start <= len(self._map) - len(array) * dtype.itemsize:
            raise ValueError("values outside of the file")
        return torch.frombuffer(self._map, dtype=dtype, count=len(array), offset=start)


def to_stored(row: Row, header: ShardsHeader) -> Row:
    """The row as it is stored: int32 ids, bool mask, states in their stored dtypes, on the CPU."""
    return replace(
        with_stored_states(row, header),
        input_ids=row.input_ids.to("cpu", torch.int32).contiguous(),
        loss_mask=row.loss_mask.to("cpu", torch.bool).contiguous(),
    )


def _to_batch(row: Row, header: ShardsHeader, schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array([0, len(row.input_ids)], pa.int32())

    def states(tensor_TF: Tensor, value_type: pa.DataType) -> pa.Array:
        raw = pa.py_buffer(tensor_TF.view(torch.uint8).numpy())
        values = pa.Array.from_buffers(value_type, tensor_TF.numel(), [None, raw])
        return pa.ListArray.from_arrays(offsets, pa.FixedSizeListArray.from_arrays(values, tensor_TF.shape[1]))

    columns = {
        "id": pa.array([row.id], pa.string()),
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(row.input_ids.numpy())),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(row.loss_mask.numpy())),
        "hidden_states": states(row.hidden_states, ARROW_TYPES[header.dtype]),
        "next_token": pa.array([row.next_token], pa.int32()),
        "checksum": pa.array([row_checksum(header.checksum, row)], pa.uint64()),
    }
    if row.scales is not None:
        columns["scales"] = states(row.scales, pa.float32())
    if row.last_hidden is not None:
        columns["last_hidden"] = states(row.last_hidden, pa.uint16())
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _header_of(schema: pa.Schema) -> ShardsHeader:
    return ShardsHeader.from_dict(json.loads((schema.metadata or {})[HEADER_KEY]))


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
