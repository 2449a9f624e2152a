"""Damaged, lost and left-over parts of a shards folder: told in one line, never taken for sound."""

import json

import pytest
from test_shards import make_header, make_row, write

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardWriter, open_shards, verify_shards


@pytest.fixture
def folder(tmp_path):
    """Two shards of a row each."""
    write(tmp_path / "s", [make_row(1), make_row(2)], max_shard_bytes=1)
    return tmp_path / "s"


def change_lines(folder, change) -> None:
    """Rewrite the manifest; ``change`` gets the list of its lines as objects."""
    path = folder / "manifest.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = change(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


# Wrong types in a manifest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("file", value) for value in (5, None, "../shard-00000.arrow", "/etc/passwd", "..", "", "a\0b")],
        *[("bytes", value) for value in ("x", -1, 1.5, True)],
        *[("ids", value) for value in ([1], "ab", [None], {"a": 1})],
        *[("lengths", value) for value in (["4"], [True], 4, [[4]])],
        *[(name, None) for name in ("rows", "tokens", "checksum")],
    ],
)
def test_a_shard_line_of_wrong_types_is_damage_with_its_line(folder, name, value):
    change_lines(folder, lambda lines: lines[2].update({name: value}))
    for use in (open_shards, verify_shards, lambda f: ShardWriter(f, make_header())):
        with pytest.raises(KitError, match=r"manifest\.jsonl line 3 is damaged"):
            use(folder)


@pytest.mark.parametrize(
    "line",
    [
        [1],
        3,
        {"kind": "summary", "asked": "x"},
        {"kind": "summary", "dropped": [1]},
        {"kind": "summary", "dropped": {"a": "b"}},
        {"kind": "split", "world_size": "2"},
        {"kind": "summary", "world_size": [2]},
    ],
)
def test_other_lines_of_wrong_types_are_damage_with_their_line(folder, line):
    change_lines(folder, lambda lines: [*lines, line])
    with pytest.raises(KitError, match=r"manifest\.jsonl line 4 is damaged"):
        open_shards(folder)
