"""Shards: bit-exact storage, refusal of broken captures, survival of kills, full disks and flipped bits."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_kit import shards as shards_module
from dflash_kit.errors import KitError
from dflash_kit.shards import Row, Shards, ShardsHeader, ShardWriter, open_shards, verify_shards

REPO = Path(__file__).resolve().parents[1]
D, LAYERS, VOCAB = 8, (1, 3, 6), 100


def make_header(**changes) -> ShardsHeader:
    fields = {
        "target_name": "t",
        "target_revision": None,
        "config_hash": "c",
        "tokenizer_hash": "k",
        "template_hash": None,
        "vocab_size": VOCAB,
        "hidden_size": D,
        "target_layer_ids": LAYERS,
        "num_taps": len(LAYERS),
        "compute_dtype": "float32",
        "engine": "test",
        "engine_version": "0",
        "sampling": {"temperature": 0.0},
        "checksum": "xxh3_64",
    }
    return ShardsHeader(**{**fields, **changes})


def make_row(index: int, num_tokens: int | None = None) -> Row:
    """A row that depends on its index only, so that a rerun makes the same one."""
    num_tokens = num_tokens or 3 + index % 7
    random = torch.Generator().manual_seed(index)
    return Row(
        id=f"row{index}",
        input_ids=torch.randint(0, VOCAB, (num_tokens,), generator=random),
        loss_mask=torch.arange(num_tokens) >= 2,
        hidden_states=torch.randn(num_tokens, len(LAYERS) * D, generator=random),
        next_token=index % VOCAB,
    )


def write(folder, rows, **settings) -> None:
    with ShardWriter(folder, make_header(), **settings) as writer:
        for row in rows:
            writer.add(row)


def assert_rows_are(folder, indices) -> None:
    """Each index once, bit-identical to the row that was written."""
    found = {row.id: row for row in open_shards(folder)}
    assert sorted(found) == sorted(f"row{i}" for i in indices)
    assert len(open_shards(folder)) == len(found)
    for index in indices:
        want, got = make_row(index), found[f"row{index}"]
        assert torch.equal(got.input_ids, want.input_ids.int())
        assert torch.equal(got.loss_mask, want.loss_mask)
        assert torch.equal(got.hidden_states, want.hidden_states.bfloat16())
        assert got.next_token == want.next_token
    assert verify_shards(folder).problems == []


def test_every_bfloat16_pattern_survives_bit_for_bit(tmp_path):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    states = bits[bits.view(torch.bfloat16).isfinite()].view(torch.bfloat16)
    states = states[: len(states) // (3 * D) * 3 * D].view(-1, 3 * D)
    states = states[(states.view(-1, 3, D).amin(-1) != states.view(-1, 3, D).amax(-1)).all(-1)]  # ±0 in one tap
    num_tokens = len(states)
    row = Row(
        id="bits",
        input_ids=torch.arange(num_tokens) % VOCAB,
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        hidden_states=states,
    )
    write(tmp_path / "s", [row])
    got = open_shards(tmp_path / "s")[0].hidden_states
    assert num_tokens > 2600
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.view(torch.int16), states.view(torch.int16))


def test_float32_storage_is_exact(tmp_path):
    with ShardWriter(tmp_path / "s", make_header(dtype="float32")) as writer:
        writer.add(make_row(1))
    assert torch.equal(open_shards(tmp_path / "s")[0].hidden_states, make_row(1).hidden_states)


def test_rows_read_back_in_any_order_and_from_a_pickle(tmp_path):
    write(tmp_path / "s", [make_row(i) for i in range(20)], max_shard_bytes=5000)
    shards = open_shards(tmp_path / "s")
    assert len(list((tmp_path / "s").glob("shard-*.arrow"))) > 3
    assert shards.lengths == [3 + i % 7 for i in range(20)]
    assert shards.ids[7] == "row7"
    assert torch.equal(shards[-1].input_ids, make_row(19).input_ids.int())
    assert [row.id for row in shards[3:5]] == ["row3", "row4"]
    copy = pickle.loads(pickle.dumps(shards))  # noqa: S301 - our own bytes, as a DataLoader does it
    assert torch.equal(copy[7].hidden_states, shards[7].hidden_states)
    assert_rows_are(tmp_path / "s", range(20))


def test_token_ids_add_the_last_token(tmp_path):
    write(tmp_path / "s", [make_row(5), replace(make_row(6), next_token=-1)])
    generated, given = open_shards(tmp_path / "s")
    assert generated.is_generated
    assert not given.is_generated
    assert generated.token_ids().tolist() == [*generated.input_ids.tolist(), 5]
    assert generated.token_mask().tolist() == [*generated.loss_mask.tolist(), True]
    assert given.token_ids().tolist() == given.input_ids.tolist()


def test_reading_shares_the_file_and_never_writes_to_it(tmp_path):
    write(tmp_path / "s", [make_row(1)])
    before = (tmp_path / "s" / "shard-00000.arrow").read_bytes()
    row = open_shards(tmp_path / "s")[0]
    row.hidden_states.zero_()
    assert (tmp_path / "s" / "shard-00000.arrow").read_bytes() == before


def test_opening_reads_the_manifest_only(tmp_path, monkeypatch):
    write(tmp_path / "s", [make_row(i) for i in range(12)], max_shard_bytes=1)
    opened = []
    real = shards_module.ShardFile
    monkeypatch.setattr(shards_module, "ShardFile", lambda path: opened.append(path.name) or real(path))
    shards = open_shards(tmp_path / "s")
    assert len(shards) == 12
    assert sum(shards.lengths) > 0
    assert opened == []
    assert shards[4].id == "row4"
    assert opened == ["shard-00004.arrow"]


def test_datasets_opens_the_shards(tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "s", [make_row(i) for i in range(5)], max_shard_bytes=3000)
    files = [str(p) for p in sorted((tmp_path / "s").glob("*.arrow"))]
    data = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert data["id"][:] == [f"row{i}" for i in range(5)]
    bits = torch.tensor(data[2]["hidden_states"], dtype=torch.int32).to(torch.int16)
    assert torch.equal(bits.view(torch.bfloat16), make_row(2).hidden_states.bfloat16())


# What a writer refuses


def refused(row: Row, tmp_path, *words: str) -> None:
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        with pytest.raises(KitError) as error:
            writer.add(row)
        for word in words:
            assert word in str(error.value), error.value
        writer.add(make_row(2))  # the writer is still sound
    assert open_shards(tmp_path / "s").ids == ["row2"]


def test_short_states_are_refused_by_sample_id(tmp_path):
    row = make_row(1, num_tokens=40)
    refused(replace(row, hidden_states=row.hidden_states[:24]), tmp_path, "row1", "(24, 24)", "40 tokens")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_states_are_refused(tmp_path, value):
    row = make_row(1)
    row.hidden_states[2, 2 * D + 3] = value
    refused(row, tmp_path, "row1", "layer 6", "NaN or infinite", "token 2")


def test_an_all_zero_tap_is_refused(tmp_path):
    row = make_row(1)
    row.hidden_states[:, D : 2 * D] = 0
    refused(row, tmp_path, "row1", "layer 3", "all zero")


def test_a_single_zero_row_as_padding_leaves_is_refused(tmp_path):
    row = make_row(1)
    row.hidden_states[-1, :D] = 0
    refused(row, tmp_path, "row1", "layer 1", "all zero", "1 of 4")


def test_a_tap_that_ignores_its_token_is_refused(tmp_path):
    row = make_row(1)
    row.hidden_states[:, :D] = row.hidden_states[0, :D].clone()
    refused(row, tmp_path, "row1", "layer 1", "constant over all")


def test_equal_tokens_may_have_equal_states(tmp_path):
    row = make_row(1)
    states = row.hidden_states[:1].expand(4, -1)
    write(tmp_path / "s", [replace(row, input_ids=torch.full((4,), 7), hidden_states=states)])
    assert len(open_shards(tmp_path / "s")) == 1


def test_ids_outside_the_vocabulary_and_wrong_masks_are_refused(tmp_path):
    refused(replace(make_row(1), input_ids=torch.tensor([0, 1, 2, VOCAB])), tmp_path, "row1", "0..99")
    (tmp_path / "s" / "shard-00000.arrow").unlink(), (tmp_path / "s" / "manifest.jsonl").unlink()
    refused(replace(make_row(1), loss_mask=torch.ones(3, dtype=torch.bool)), tmp_path, "row1", "3 entries for 4")


def test_a_second_row_with_the_same_id_is_refused(tmp_path):
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        writer.add(make_row(1))
        with pytest.raises(KitError, match="row1 was captured twice"):
            writer.add(make_row(1))
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        assert writer.done_ids == {"row1"}
        with pytest.raises(KitError, match="row1 was captured twice"):
            writer.add(make_row(1))


def test_other_targets_and_settings_are_refused(tmp_path):
    write(tmp_path / "s", [make_row(1)])
    for changes, word in (
        ({"config_hash": "other"}, "config_hash"),
        ({"sampling": {"temperature": 1.0}}, "sampling"),
    ):
        with pytest.raises(KitError, match=word):
            ShardWriter(tmp_path / "s", make_header(**changes))
    header = open_shards(tmp_path / "s").header
    with pytest.raises(KitError, match='tokenizer_hash is "k" in the shards but "z" here'):
        header.require_compatible(make_header(tokenizer_hash="z"))
    header.require_compatible(make_header(target_name="moved/elsewhere"))


def test_foreign_folders_are_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KitError, match="not empty and not a shards folder"):
        ShardWriter(tmp_path, make_header())
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(KitError, match="is a file"):
        ShardWriter(tmp_path / "notes.txt", make_header())
    with pytest.raises(KitError, match="not a shards folder"):
        open_shards(tmp_path)


def test_two_writers_at_once_are_refused(tmp_path):
    with (
        ShardWriter(tmp_path / "s", make_header()),
        pytest.raises(KitError, match="another process is writing"),
    ):
        ShardWriter(tmp_path / "s", make_header(), lock_wait_s=0.2)


# Damaged manifests


def test_a_torn_manifest_line_is_tolerated_and_mended(tmp_path):
    write(tmp_path / "s", [make_row(i) for i in range(8)], max_shard_bytes=4000)
    manifest = tmp_path / "s" / "manifest.jsonl"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-20])
    assert 0 < len(open_shards(tmp_path / "s")) < 8
    write(tmp_path / "s", [])
    assert_rows_are(tmp_path / "s", range(8))
    assert manifest.read_bytes() == whole


def test_a_damaged_manifest_is_refused_with_its_line(tmp_path):
    write(tmp_path / "s", [make_row(i) for i in range(8)], max_shard_bytes=4000)
    manifest = tmp_path / "s" / "manifest.jsonl"
    lines = manifest.read_text().splitlines()
    lines[1] = lines[1].replace('"rows":', '"rows":1')
    manifest.write_text("\n".join(lines) + "\n")
    for action in (open_shards, verify_shards, lambda folder: ShardWriter(folder, make_header())):
        with pytest.raises(KitError, match="line 2 is damaged"):
            action(tmp_path / "s")


def test_a_missing_shard_is_refused(tmp_path):
    write(tmp_path / "s", [make_row(i) for i in range(8)], max_shard_bytes=4000)
    (tmp_path / "s" / "shard-00001.arrow").unlink()
    with pytest.raises(KitError, match=r"shard-00001\.arrow is missing"):
        ShardWriter(tmp_path / "s", make_header())
    assert any("shard-00001.arrow" in problem for problem in verify_shards(tmp_path / "s").problems)
    with pytest.raises(KitError, match=r"shard-00001\.arrow"):
        list(open_shards(tmp_path / "s"))


def test_any_flipped_bit_is_found(tmp_path):
    """Every 37th byte, one at a time: verification names the shard, and no reader gives a wrong row."""
    write(tmp_path / "s", [make_row(i) for i in range(3)])
    path = tmp_path / "s" / "shard-00000.arrow"
    sound = path.read_bytes()
    refused_reads = 0
    for position in range(0, len(sound), 37):
        data = bytearray(sound)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        assert any("shard-00000.arrow" in problem for problem in verify_shards(tmp_path / "s").problems), position
        try:
            rows = list(open_shards(tmp_path / "s"))
        except KitError as error:
            refused_reads += "shard-00000.arrow" in str(error)
        else:
            assert all(
                torch.equal(row.hidden_states, make_row(i).hidden_states.bfloat16()) for i, row in enumerate(rows)
            )
    assert refused_reads > 10
    path.write_bytes(sound)
    assert_rows_are(tmp_path / "s", range(3))


# Full disks

LIMITED = """
import resource, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import test_shards as t
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
t.write({folder!r}, [t.make_row(i, {lengths}[i]) for i in range(6)], max_shard_bytes=4000)
"""


def run_limited(folder, lengths) -> subprocess.CompletedProcess:
    code = LIMITED.format(repo=str(REPO), folder=str(folder), lengths=lengths)
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_a_full_disk_is_a_clear_error_and_leaves_finished_shards(tmp_path):
    lengths = [30, 40, 50, 2000, 30, 40]  # the fourth row does not fit
    result = run_limited(tmp_path / "s", lengths)
    assert result.returncode == 1, result.stderr
    assert "KitError: cannot write to" in result.stderr
    assert "make room and run the same command again" in result.stderr
    assert not list((tmp_path / "s").glob("*.incomplete"))
    before = open_shards(tmp_path / "s").ids
    assert before == ["row0", "row1", "row2"]
    assert verify_shards(tmp_path / "s").ok
    with ShardWriter(tmp_path / "s", make_header()) as writer:  # with room again
        for i in range(6):
            if f"row{i}" not in writer.done_ids:
                writer.add(make_row(i, lengths[i]))
    assert sorted(open_shards(tmp_path / "s").ids) == [f"row{i}" for i in range(6)]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_file_system(small_disk):
    with pytest.raises(KitError, match=r"cannot write to|needs .* bytes"):
        write(small_disk / "s", [make_row(i, 3000) for i in range(60)], max_shard_bytes=400_000)
    shards: Shards = open_shards(small_disk / "s")
    assert len(shards) >= 3
    assert verify_shards(small_disk / "s").ok
    assert not list((small_disk / "s").glob("*.incomplete"))


def test_summary_lines_are_kept(tmp_path):
    with ShardWriter(tmp_path / "s", make_header()) as writer:
        writer.add(make_row(1))
        writer.flush()
        writer.write_summary({"asked": 3, "dropped": {"too_long": 2}})
    assert open_shards(tmp_path / "s").summary == {"asked": 3, "dropped": {"too_long": 2}}
    lines = (tmp_path / "s" / "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "shard", "summary"]
