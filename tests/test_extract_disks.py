"""Full disks and flipped bits, met by extractions as users run them."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards, verify_shards
from extract.cli import main
from helpers import REPO, run_command

NUM_ROWS = 40


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB, of which a run here takes 4."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def arguments(target, tmp_path, out) -> list[str]:
    random = torch.Generator().manual_seed(0)
    lines = [{"input_ids": torch.randint(0, 250, (200,), generator=random).tolist()} for _ in range(NUM_ROWS)]
    path = tmp_path / "p.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--model", str(target), "--prompts", str(path), "--out", str(out), "--engine", "transformers"]
    return [*argv, "--target_layer_ids", "[1, 3]", "--storage", "float32", "--max_shard_bytes", "1"]


FILLED = """
import sys
sys.path[:0] = [".", {tests!r}]
from dflash_kit.errors import run_cli
from dflash_kit.shard_writer import ShardWriter
from extract.cli import main
from test_extract_disks import fill
real = ShardWriter.flush_lane
def flush_lane(writer, lane):
    real(writer, lane)
    if writer.num_rows == 3:
        fill({disk!r})
ShardWriter.flush_lane = flush_lane
sys.exit(run_cli(main, sys.argv[1:]))
"""
"""The command, with a disk that another program fills up after the third shard."""


def fill(disk) -> None:
    """Take all space, as another program would."""
    with (Path(disk) / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_disk_that_fills_up_under_a_run_is_one_line_and_the_run_resumes(tiny_target, tmp_path, small_disk):
    out = small_disk / "s"
    argv = arguments(tiny_target, tmp_path, out)
    result = run_command("-c", FILLED.format(tests=str(REPO / "tests"), disk=str(small_disk)), *argv)
    told = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 2
    assert len(told) == 1
    assert str(out) in told[0] and "bytes" in told[0] and "free" in told[0], told
    finished = {path: path.read_bytes() for path in out.glob("*.arrow")}
    assert len(finished) == 3
    assert not list(out.glob("*.incomplete"))
    assert all(len(open_shards(out)[i].input_ids) == 200 for i in range(len(open_shards(out))))
    with pytest.raises(KitError, match=r"bytes.* free"):  # still no room
        main(argv)
    (small_disk / "filler").unlink()
    assert main(argv) == 0
    assert all(path.read_bytes() == data for path, data in finished.items())
    assert len(set(open_shards(out).ids)) == len(open_shards(out)) == NUM_ROWS
    assert verify_shards(out).problems == verify_shards(out).notes == []


def test_a_disk_without_room_for_a_first_line_is_one_line(tiny_target, tmp_path, small_disk):
    fill(small_disk)
    result = run_command("extract/dump.py", *arguments(tiny_target, tmp_path, small_disk / "s"))
    assert result.returncode == 2
    told = result.stderr.splitlines()
    assert len(told) == 1
    assert str(small_disk / "s") in told[0] and "No space left" in told[0] and "0 bytes free" in told[0], told


def test_a_flipped_bit_is_named_by_verify_and_by_the_reader_with_its_row(tiny_target, tmp_path):
    """The reader checks a row against its checksum the first time that it reads it, so it names the row as well."""
    out = tmp_path / "s"
    argv = arguments(tiny_target, tmp_path, out)
    assert main([*argv, "--limit", "4", "--max_shard_bytes", "250000"]) == 0
    shards = open_shards(out)
    row = shards[2]
    (path,) = [path for path in out.glob("*.arrow") if row.hidden_states.numpy().tobytes() in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(row.hidden_states.numpy().tobytes()) + 1001] ^= 1 << 3
    path.write_bytes(data)
    result = run_command("-m", "extract.verify", out)
    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if path.name in line and row.id in line]
    damaged = open_shards(out)
    with pytest.raises(KitError, match=f"{path.name} is damaged: row {row.id} does not match its checksum"):
        damaged[2]
    for index in (0, 1, 3):  # the others are read as before, those of the same file included
        assert damaged[index].id == shards.ids[index]
    with pytest.raises(KitError, match="damaged"):
        list(damaged)
