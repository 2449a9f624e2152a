"""Readers: the inputs that a user names, as raw records, one at a time.

An input is a JSONL, JSON or Parquet file, a folder of such files, a glob, or ``hf:org/name`` for a data set of the
Hugging Face hub; several are separated by commas. Parquet files are read in batches and only in the columns that are
understood; a JSON array alone is held in memory as a whole.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.hub_connection import load_dataset
from dflash_kit.shard_share import manifest_names, manifest_of_shard
from dflash_kit.shard_store import is_url

from .places import CONFIG_NAME

CONTENT_COLUMNS = ("messages", "prompt", "conversations", "input_ids", "text")
"""Columns that hold what is said, in the order in which they are looked for."""
SIDE_COLUMNS = ("tools", "system", "loss_mask")
"""Columns that are read beside them."""
FOLDER_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
HUB_PREFIX = "hf:"
DEFAULT_SPLIT = "train"
OTHER_SUFFIXES = (".csv", ".tsv", ".xlsx", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")
"""Of files that people have prompts in, too, and that would be refused for their first line."""
BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Record:
    """One line or row of an input."""

    source: str
    """``file:line`` or ``file row number``, from 1, for messages."""
    value: Any
    """A line of JSON that is not parsed yet (bytes), or what stood in the row."""


def read_records(inputs: str | Path, content_columns: Sequence[str] = CONTENT_COLUMNS) -> Iterator[Record]:
    """Read every input in the order given, a folder's files by name.

    Args:
        inputs: what the user named.
        content_columns: columns of which a Parquet file or data set must have one.

    Raises:
        KitError: an input is missing or unreadable, or has none of the columns.
    """
    for name in find_inputs(str(inputs)):
        if name.startswith(HUB_PREFIX):
            yield from _read_hub(name, content_columns)
        elif name.endswith(".parquet"):
            yield from _read_parquet(Path(name), content_columns)
        else:
            yield from _read_json(Path(name))


def find_inputs(inputs: str) -> list[str]:
    """Files and hub names behind comma-separated inputs, each once.

    Raises:
        KitError: a folder without files that can be read, a glob that matches nothing, or shards.
    """
    names = [inputs] if os.path.exists(inputs) else [name.strip() for name in inputs.split(",")]
    found = [file for name in names if name for file in _expand(name)]
    if not found:
        raise KitError(f"prompts are {inputs!r}; name a file, a folder, a glob or hf:org/name")
    for file in found:
        _refuse_others(file)
        _refuse_shards(Path(file))
    return list(dict.fromkeys(found))


def unknown_columns(source: str, found: Sequence[str], content_columns: Sequence[str]) -> KitError:
    """What to say of a row or file without a column that is understood."""
    return KitError(
        f"{source}: none of the columns {', '.join(f'`{name}`' for name in content_columns)} holds anything; "
        f"columns found: {sorted(found)}; name one that holds the prompt or the messages with --prompt_column"
    )


def _expand(name: str) -> list[str]:
    if name.startswith(HUB_PREFIX):
        return [name]
    if is_url(name):
        return [name]
    path = Path(name).expanduser()
    if path.is_dir():
        return _files_of(path)
    if not os.path.exists(path) and any(sign in name for sign in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise KitError(f"no file matches {name}; name a file, a folder or another glob")
        return [file for match in matches for file in _expand(match)]
    return [str(path)]


def _files_of(folder: Path) -> list[str]:
    """Files of a folder and its subfolders by path; hidden ones (a download cache, a checkout's records) are not data."""
    found = [path for path in folder.rglob("*") if path.suffix in FOLDER_SUFFIXES and path.is_file()]
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not visible:
        raise KitError(f"folder {folder} holds no file that ends in {', '.join(FOLDER_SUFFIXES)}")
    return [str(path) for path in sorted(visible)]


def _refuse_others(name: str) -> None:
    if is_url(name):
        raise KitError(
            f"prompts are {name!r}; a URL may stand for shards alone: download the file, or name hf:org/name"
        )
    if name.endswith(OTHER_SUFFIXES) and not name.startswith(HUB_PREFIX):
        raise KitError(f"prompts file {name} is neither JSONL nor JSON nor Parquet (uncompressed); convert it")


def _refuse_shards(path: Path) -> None:
    """Shards hold tokens and states of prompts that were answered already, and their manifest would pass for JSONL."""
    if manifest_names([path.name]):
        is_ours = False
        with suppress(OSError), path.open("rb") as file:
            is_ours = file.read(4096).startswith(b'{"kind":"header"')
    else:
        is_ours = manifest_of_shard(path.name) is not None and path.is_file()
    if is_ours:
        kept = path.with_name(CONFIG_NAME)
        where = f" ({kept} names them)" if kept.is_file() else ""
        raise KitError(
            f"prompts: {path} belongs to shards, which hold states of prompts that were answered already, not prompts: train on "
            f"them (train/run.py --shards {path.parent}), or name the prompts that they were extracted from{where}"
        )


def _read_json(path: Path) -> Iterator[Record]:
    """Lines of a JSONL file (whatever its name), or the elements of a ``.json`` file that holds an array."""
    try:
        if path.suffix == ".json" and _holds_array(path):
            values = json.loads(path.read_bytes())
            yield from (Record(f"{path} row {number}", value) for number, value in enumerate(values, start=1))
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Record(f"{path}:{number}", line)
    except OSError as error:
        raise KitError(
            f"prompts file {path} cannot be read: {error.strerror or error}; name a file or folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise KitError(
            f"prompts file {path} is not JSON ({error}); it must hold one array, or one object a line"
        ) from error


def _holds_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_parquet(path: Path, content_columns: Sequence[str]) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # With pyarrow's defaults every byte that was read stays in memory until the file is closed.
        with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            columns = _columns_to_read(file.schema_arrow.names, content_columns, str(path))
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path} row {number}", _without_nulls(row))
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        place = f" behind row {number}" if number else ""
        raise KitError(f"prompts file {path} cannot be read as Parquet{place}: {error}") from error


def _read_hub(name: str, content_columns: Sequence[str]) -> Iterator[Record]:
    dataset = _load_hub(name)
    columns = _columns_to_read(dataset.column_names, content_columns, name)
    for number, row in enumerate(dataset.select_columns(columns), start=1):
        yield Record(f"{name} row {number}", _without_nulls(row))


def _load_hub(name: str) -> Any:
    """A split of a data set on disk (``datasets`` downloads it once and maps it into memory)."""
    path, config, split = (*name.removeprefix(HUB_PREFIX).split(":", 2), "", "")[:3]
    if not path:
        raise KitError(f"prompts are {name!r}; write hf:org/name, hf:org/name:config or hf:org/name:config:split")
    try:
        return load_dataset(path, config or None, split=split or DEFAULT_SPLIT)
    except Exception as error:  # the library, the hub's client and the network raise errors of many kinds
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KitError(
            f"data set {name} cannot be loaded: {reason}; check name, config and split (hf:org/name:config:split), "
            "and the connection, or download it and name the folder"
        ) from error


def _columns_to_read(found: Sequence[str], content_columns: Sequence[str], source: str) -> list[str]:
    if not set(found) & set(content_columns):
        raise unknown_columns(source, found, content_columns)
    return [name for name in found if name in content_columns or name in SIDE_COLUMNS]


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a column the same fields, null where a row has none; here they are absent again."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
