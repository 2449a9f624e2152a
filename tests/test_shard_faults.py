"""Damaged, lost and left-over parts of a shards folder: told in one line, never taken for sound."""

import json
import os

import pytest
import torch
from test_shards import D, make_header, make_row, write

from dflash_kit.errors import KitError
from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from helpers import run_command


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
    ("name", "value"),
    [
        ("hidden_size", "8"),
        ("vocab_size", None),
        ("target_layer_ids", 5),
        ("target_layer_ids", "136"),
        ("sampling", []),
    ],
)
def test_a_header_of_wrong_types_is_damage_of_line_1(folder, name, value):
    change_lines(folder, lambda lines: lines[0].update({name: value}))
    for use in (open_shards, verify_shards, lambda f: ShardWriter(f, make_header())):
        with pytest.raises(KitError, match=r"manifest\.jsonl line 1 is damaged"):
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


# Lost lines, unlisted shards


def verify(folder, *words) -> None:
    """``python -m extract.verify`` ends with status 2 and one line on stderr that says these words."""
    result = run_command("-m", "extract.verify", folder)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_shard_that_no_manifest_lists_is_a_problem_unless_its_writer_is_at_work(folder):
    change_lines(folder, lambda lines: lines[:2])
    verify(folder, "shard-00001.arrow: not in a manifest")
    (folder / "shard-x.arrow").write_bytes(b"")
    assert len(verify_shards(folder).problems) == 2
    (folder / "shard-x.arrow").unlink()
    with ShardWriter(folder, make_header()):  # takes the shard over
        assert verify_shards(folder).ok
        (folder / "shard-00007.arrow").write_bytes(b"")
        (folder / "shard-r00001-00000.arrow").write_bytes(b"")
        report = verify_shards(folder)
        assert len(report.notes) == 1 and "shard-00007.arrow" in report.notes[0]
        assert len(report.problems) == 1 and "shard-r00001-00000.arrow" in report.problems[0]


def test_rows_that_a_finished_run_had_are_missed(folder):
    with ShardWriter(folder, make_header()) as writer:
        writer.write_summary({"asked": 5, "dropped": {"too_long": 2, "malformed": 1}})
    assert verify_shards(folder).ok
    (folder / "shard-00001.arrow").unlink()
    change_lines(folder, lambda lines: [lines[0], lines[1], lines[3]])
    verify(folder, "1 rows are listed", "had 2")
    assert open_shards(folder).ids == ["row1"]


def test_rows_are_missed_where_several_processes_have_finished(tmp_path):
    for rank in range(2):
        with ShardWriter(tmp_path, make_header(), rank=rank, world_size=2) as writer:
            writer.add(make_row(rank))
            writer.write_summary({"asked": 2 - rank, "dropped": {}})
    assert ["2 rows are listed" in problem for problem in verify_shards(tmp_path).problems] == [True]
    assert verify_shards(tmp_path, Share(0, 2)).ok


def test_verify_explains_itself():
    result = run_command("-m", "extract.verify", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Exit status" in result.stdout


def test_a_damaged_shard_is_not_taken_over(folder):
    change_lines(folder, lambda lines: lines[:2])
    path = folder / "shard-00001.arrow"
    data = path.read_bytes()
    states = make_row(2).hidden_states.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    position = data.index(states)
    path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    with pytest.raises(KitError, match=r"shard-00001\.arrow is damaged: row row2 .*delete it and run again"):
        ShardWriter(folder, make_header())
    path.unlink()
    write(folder, [make_row(2)])
    assert verify_shards(folder).ok


# A start that failed


def test_a_folder_without_shards_may_be_begun_anew(tmp_path):
    for rank in range(3):
        write(tmp_path, [], rank=rank, world_size=3)
    other = make_header(engine_version="9", target_name="elsewhere")
    with ShardWriter(tmp_path, other, rank=0, world_size=3) as writer:
        writer.add(make_row(1))
    assert open_shards(tmp_path).header == other
    assert verify_shards(tmp_path).ok
    with ShardWriter(tmp_path, other, rank=1, world_size=3) as writer:
        writer.add(make_row(2))
    assert open_shards(tmp_path).ids == ["row1", "row2"]
    with pytest.raises(KitError, match="engine_version"):
        ShardWriter(tmp_path, make_header(), rank=2, world_size=3)


def test_two_kinds_that_begin_at_once_are_refused(tmp_path):
    with ShardWriter(tmp_path, make_header(), rank=0, world_size=2), pytest.raises(KitError, match="engine_version"):
        ShardWriter(tmp_path, make_header(engine_version="9"), rank=1, world_size=2)


def test_a_shard_that_is_not_journalled_keeps_its_header(folder):
    change_lines(folder, lambda lines: lines[:1])
    with pytest.raises(KitError, match="engine_version"):
        ShardWriter(folder, make_header(engine_version="9"))


# Rounding


@pytest.mark.parametrize(("value", "words"), [(3.4e38, "NaN or infinite"), (1e-41, "all zero"), (1.0001, "constant")])
def test_what_rounding_spoils_is_refused(tmp_path, value, words):
    row = make_row(1, 5)
    taps = row.hidden_states.view(5, -1, D)
    taps[3, 1] = value * torch.linspace(0.99999, 1.0, D) if value < 2 else value
    with pytest.raises(KitError, match=f"row1: tap of layer 3 is {words} at token 3"):
        write(tmp_path / "s", [row])


# Under a reader's feet


def test_a_file_that_is_cut_while_it_is_read_is_an_error_not_the_end_of_the_process(tmp_path):
    folder = tmp_path / "s"
    write(folder, [make_row(1, num_tokens=300), make_row(2, num_tokens=300)])
    shards = open_shards(folder)
    assert shards[0].id == "row1"  # the file is mapped
    os.truncate(folder / "shard-00000.arrow", 4096)
    with pytest.raises(KitError, match=r"shard-00000\.arrow row 1 .*was cut to 4,096 of [\d,]+ bytes while in use"):
        shards[1]
