"""What a manifest says of one finished shard, and the checks of what its lines hold: a manifest may be damaged."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """Journal line of one finished shard."""

    file: str
    """File name inside the folder."""
    rows: int
    """Number of rows."""
    tokens: int
    """Sum of ``lengths``."""
    lengths: list[int]
    """Tokens with states, per row."""
    ids: list[str]
    """Row ids, in the order of the file."""
    checksum: str
    """``algorithm:hex`` of the whole file."""
    bytes: int
    """Size of the file."""

    @classmethod
    def from_dict(cls, line: dict[str, Any]) -> "ShardEntry":
        """Read a journal line; ``ValueError`` (or ``KeyError``) for what cannot be one."""
        file = _text(line, "file")
        if "/" in file or "\0" in file or file in ("", ".", ".."):
            raise ValueError(f"file is {file!r}, which names no file of the folder")
        entry = cls(
            file=file,
            rows=count_in(line, "rows"),
            tokens=count_in(line, "tokens"),
            lengths=_list(line, "lengths", int),
            ids=_list(line, "ids", str),
            checksum=_text(line, "checksum"),
            bytes=count_in(line, "bytes"),
        )
        if not entry.rows == len(entry.lengths) == len(entry.ids) or entry.tokens != sum(entry.lengths):
            raise ValueError(f"counts of {entry.file} disagree with each other")
        return entry


def check_header(line: dict[str, Any]) -> dict[str, Any]:
    """A header's fields, those that sizes are computed from being counts; ``ValueError`` where they are not."""
    for name in {"vocab_size", "hidden_size", "num_taps"} & line.keys():
        count_in(line, name)
    _list(line, "target_layer_ids", int)
    if not isinstance(line.get("has_last_hidden", False), bool):
        raise ValueError(f"has_last_hidden is {line['has_last_hidden']!r}; true or false belongs there")
    if not isinstance(line.get("sampling", {}), dict):
        raise ValueError(f"sampling is {line['sampling']!r}; settings by name belong there")
    return line


def check_summary(line: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run, its counts being counts; ``ValueError`` where they are not."""
    dropped = line.get("dropped", {})
    if not isinstance(dropped, dict):
        raise ValueError(f"dropped is {dropped!r}; counts by reason belong there")
    for name in dropped:
        count_in(dropped, name)
    for name in {"asked", "world_size"} & line.keys():
        count_in(line, name)
    return line


def count_in(line: dict[str, Any], name: str) -> int:
    """A whole number of 0 or more."""
    value = line[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; a count belongs there")
    return value


def _text(line: dict[str, Any], name: str) -> str:
    value = line[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; text belongs there")
    return value


def _list(line: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = line[name]
    if not isinstance(values, list) or set(map(type, values)) - {kind}:
        raise ValueError(f"{name} must be a list of {kind.__name__} values")
    return values
