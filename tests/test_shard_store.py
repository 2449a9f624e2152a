"""Shards in an object store: the same objects as files in a folder, each row once whatever dies, refusals in one line."""

import json
import signal
import threading

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from many_writers import hashed_row
from store_writers import FAULTS, NUM_ROWS, SHARD_BYTES, write_to_store
from test_shards import make_header

from dflash_kit import shard_store, shard_upload
from dflash_kit.errors import KitError
from dflash_kit.shard_share import Share
from dflash_kit.shard_store import ShardStore, is_url
from dflash_kit.shard_store_journal import StoreJournal
from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from extract import places
from extract.places import place_of
from extract.settings import ExtractConfig
from extract.verify import main as verify_main
from helpers import REPO, run_command


@pytest.fixture(autouse=True)
def cache_of_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_store, "RETRY_WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(shard_upload, "POLL_S", 0.01)


@pytest.fixture
def url(tmp_path):
    """A new place in a store that lives in this process."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return "memory://bucket/run"


def objects(url: str) -> dict[str, bytes]:
    store = ShardStore(url)
    names = sorted(store.sizes())
    return dict(zip(names, store.read(names), strict=True))


def assert_rows_are(place, indices) -> None:
    """Each index once, bit-identical to the row that was written, and sound by every check."""
    found = {row.id: row for row in open_shards(place)}
    assert len(open_shards(place)) == len(found) == len(indices)
    for index in indices:
        want = hashed_row(index)
        assert torch.equal(found[want.id].input_ids, want.input_ids.int())
        assert torch.equal(found[want.id].hidden_states, want.hidden_states.bfloat16())
    assert verify_shards(place).problems == []


# What is in the store


def test_a_store_holds_the_files_of_a_folder(url, tmp_path):
    assert len(write_to_store(url, tmp_path / "st", range(30))) == 30
    with ShardWriter(tmp_path / "folder", make_header(), max_shard_bytes=SHARD_BYTES) as writer:
        for index in range(30):
            writer.add(hashed_row(index))
    shards = {path.name: path.read_bytes() for path in (tmp_path / "folder").glob("*.arrow")}
    found = objects(url)
    assert {name: data for name, data in found.items() if name != "manifest.jsonl"} == shards
    assert len(shards) > 5
    (tmp_path / "copy").mkdir()
    for name, data in found.items():
        (tmp_path / "copy" / name).write_bytes(data)
    for place in (url, tmp_path / "copy", tmp_path / "folder"):
        assert_rows_are(place, range(30))
    assert [row.id for row in open_shards(url)] == open_shards(tmp_path / "folder").ids
    assert open_shards(url).summary == {"asked": 30, "dropped": {}}
    assert not [path for path in (tmp_path / "st").rglob("*") if path.suffix != ".lock"]  # nothing stays behind


def test_a_fresh_host_goes_on_from_the_store_alone(url, tmp_path):
    write_to_store(url, tmp_path / "one", range(20))
    before = objects(url)
    assert write_to_store(url, tmp_path / "two", range(30)) == [hashed_row(i).id for i in range(20, 30)]
    after = objects(url)
    assert all(after[name] == data for name, data in before.items() if name.endswith(".arrow"))
    assert after["manifest.jsonl"].startswith(before["manifest.jsonl"])
    assert_rows_are(url, range(30))


def test_ranks_write_under_names_of_their_own_and_another_split_goes_on(url, tmp_path):
    for rank in range(2):
        write_to_store(url, tmp_path / "st", range(30), rank=rank, world_size=2)
    names = set(objects(url))
    assert {"manifest-r00000.jsonl", "manifest-r00001.jsonl", "shard-r00000-00000.arrow"} <= names
    assert open_shards(url).summary == {"asked": 30, "dropped": {}, "world_size": 2}
    assert len(write_to_store(url, tmp_path / "st", range(40))) == 10
    assert names < set(objects(url))
    assert_rows_are(url, range(40))
    assert verify_shards(url, Share(1, 2)).rows == sum(Share(1, 2).takes(hashed_row(i).id) for i in range(30))


# Kills


def test_writers_killed_at_the_worst_moments_leave_each_row_once(tmp_path):
    result = run_command("tests/store_writers.py", tmp_path, PYTHONPATH=str(REPO), timeout_s=240)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told == {name: [signal.SIGKILL, 0, 0] for name in told}, result.stderr
    assert len(told) == 3 * len(FAULTS)
    for name in {name if name[0].isdigit() else "four" for name in told}:
        assert_rows_are(f"file://{tmp_path}/{name}", range(NUM_ROWS))
        assert verify_shards(f"file://{tmp_path}/{name}").notes == []
    entries = [json.loads(line) for line in (tmp_path / "four" / "manifest-r00001.jsonl").read_text().splitlines()]
    assert {e["file"][:13] for e in entries if e["kind"] == "shard"} == {"shard-r00001-"}
    assert not list(tmp_path.glob("staging*/**/*.arrow"))  # what was uploaded, or captured by others, is deleted


def interrupted_run(url, staging) -> None:
    config = ExtractConfig(model="m", prompts="p", out=url, staging=str(staging))
    with place_of(config, Share()) as place:
        place.open(make_header())
        with ShardWriter(place.folder, make_header()) as writer:
            for index in range(5):
                writer.add(hashed_row(index))
            raise KeyboardInterrupt


def test_an_interrupted_run_uploads_the_shards_that_it_finishes(url, tmp_path, capsys, monkeypatch):
    told, real = threading.Event(), MemoryFileSystem.put_file

    def put_file(self, *arguments, **settings):  # the uploader may be done before the run is left
        assert told.wait(240)
        return real(self, *arguments, **settings)

    def tell(*words, **settings):
        print(*words, **settings)
        told.set()

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    monkeypatch.setattr(places, "print", tell, raising=False)
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(url, tmp_path / "st")
    assert "uploading the finished shards that wait in" in capsys.readouterr().err
    assert_rows_are(url, range(5))
    assert len(write_to_store(url, tmp_path / "st", range(9))) == 4
    assert_rows_are(url, range(9))


# Uploads that fail


@pytest.fixture
def uploads(monkeypatch):
    """Calls of the driver's upload; errors put into ``fail`` are raised by the next of them."""
    real, calls, fail = MemoryFileSystem.put_file, [], []

    def put_file(self, file, path, **settings):
        calls.append(path)
        if fail:
            raise fail.pop(0)
        return real(self, file, path, **settings)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return calls, fail


def test_an_upload_is_tried_again(url, tmp_path, uploads):
    calls, fail = uploads
    fail += [ConnectionResetError("reset by peer"), TimeoutError()]
    write_to_store(url, tmp_path / "st", range(4))
    assert calls[:3] == ["/bucket/run/shard-00000.arrow"] * 3
    assert_rows_are(url, range(4))


@pytest.mark.parametrize(
    ("error", "num_attempts", "said"),
    [
        (ConnectionResetError("reset by peer"), 3, "ConnectionResetError: reset by peer (3 attempts)"),
        (PermissionError("Access Denied\nand more"), 1, "PermissionError: Access Denied;"),
    ],
)
def test_an_upload_that_fails_is_one_line_and_a_rerun_uploads_the_shard(
    url, tmp_path, uploads, error, num_attempts, said
):
    calls, fail = uploads
    fail += [error] * 3
    with pytest.raises(KitError) as raised:
        write_to_store(url, tmp_path / "st", range(8))
    fail.clear()
    assert len(calls) == num_attempts
    (staging,) = [path for path in (tmp_path / "st").iterdir() if path.is_dir()]
    left = list(staging.glob("*.arrow"))
    for part in (f"{url}: cannot write shard-00000.arrow: {said}", "finished shards wait in", str(staging)):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)
    assert left
    again = write_to_store(url, tmp_path / "st", range(8))
    assert len(again) < 8  # the rows of shards that had waited are not captured again
    assert_rows_are(url, range(8))


def test_capture_waits_while_too_much_waits_for_upload(url, tmp_path, monkeypatch):
    gate, real = threading.Event(), MemoryFileSystem.put_file

    def put_file(self, file, path, **settings):
        gate.wait(240)
        return real(self, file, path, **settings)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    config = ExtractConfig(model="m", prompts="p", out=url, staging=str(tmp_path), staging_bytes=2 * SHARD_BYTES)
    with place_of(config, Share()) as place:
        place.open(make_header())
        with ShardWriter(place.folder, make_header(), max_shard_bytes=SHARD_BYTES) as writer:
            writer.add(hashed_row(0))
            place.keep_pace()  # at most one shard is there
            for index in range(1, 9):
                writer.add(hashed_row(index))
            waiting = threading.Thread(target=place.keep_pace)
            waiting.start()
            waiting.join(0.2)
            is_held = waiting.is_alive()
            gate.set()
            assert is_held
            waiting.join(240)
            assert not waiting.is_alive()
        place.settle()
    assert_rows_are(url, range(9))


# Refusals


def test_the_earlier_of_two_processes_of_one_rank_stops_before_it_writes(url, tmp_path):
    config = ExtractConfig(model="m", prompts="p", out=url, staging=str(tmp_path / "one"))
    with place_of(config, Share()) as place:
        place.open(make_header())
        with ShardWriter(place.folder, make_header(), max_shard_bytes=1) as writer:
            write_to_store(url, tmp_path / "two", range(10, 14))
            before = objects(url)
            writer.add(hashed_row(1))
        with pytest.raises(KitError, match=r"another process has written .*manifest.jsonl since .* rank 0 of 1"):
            place.settle()
    assert objects(url) == before
    write_to_store(url, tmp_path / "one", range(1, 2))
    assert_rows_are(url, [1, *range(10, 14)])


def test_a_rank_that_runs_on_this_host_is_not_started_again(url, tmp_path):
    config = ExtractConfig(model="m", prompts="p", out=url, staging=str(tmp_path))
    with place_of(config, Share()) as place:
        place.open(make_header())
        other = place_of(config, Share())
        with pytest.raises(KitError, match="another process is writing by way of"):
            other._staging.take(wait_s=0.1)
        place.settle()


def test_other_shards_other_objects_and_lost_shards_are_refused_unchanged(url, tmp_path):
    write_to_store(url, tmp_path / "st", range(4))
    before = objects(url)
    with pytest.raises(KitError, match=rf'cannot add to {url}: engine_version is "0" in the shards but "9" here'):
        StoreJournal(ShardStore(url), make_header(engine_version="9"), Share(1, 2))
    assert objects(url) == before
    MemoryFileSystem.store.pop("/bucket/run/shard-00000.arrow")
    with pytest.raises(KitError, match=rf"shard {url}/shard-00000.arrow is missing"):
        write_to_store(url, tmp_path / "st", range(4))
    assert any("shard-00000.arrow" in problem for problem in verify_shards(url).problems)
    fsspec.filesystem("memory").pipe_file("/bucket/photos/cat.jpg", b"meow")
    for action in (lambda place: write_to_store(place, tmp_path / "st", range(4)), open_shards, verify_shards):
        with pytest.raises(KitError, match="memory://bucket/photos holds no shards"):
            action("memory://bucket/photos")


@pytest.mark.parametrize("action", [open_shards, verify_shards, lambda url: verify_main([url])])
def test_a_missing_driver_is_named(monkeypatch, action):
    entry = {"class": "stars3fs.StarFileSystem", "err": "Install stars3fs"}
    monkeypatch.setitem(shard_store.known_implementations, "stars", entry)
    with pytest.raises(
        KitError, match="stars:// needs the package stars3fs, which is not installed: pip install stars3fs"
    ):
        action("stars://bucket/run")
    with pytest.raises(KitError, match="comet://x cannot be opened: ValueError: Protocol not known: comet"):
        action("comet://x")


def test_missing_credentials_are_one_line_at_once(url, monkeypatch):
    class NoCredentialsError(Exception):
        """As that of botocore, which is no OSError."""

    calls = []

    def ls(*_, **__):
        calls.append(1)
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(KitError, match=rf"{url}: cannot list: NoCredentialsError: Unable to locate credentials"):
        open_shards(url)
    assert len(calls) == 1


def test_what_is_a_url():
    assert is_url("s3://bucket/run") and is_url("memory://x") and is_url("file:///tmp/x")
    assert not any(map(is_url, ("shards/", "/tmp/a://b", "C:shards", "s3:/x")))
    with pytest.raises(ValueError, match="staging is 'x', but out 'shards/' is a folder"):
        ExtractConfig(model="m", prompts="p", out="shards/", staging="x")


def test_a_mistyped_url_becomes_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KitError, match="out is 's3:/bucket/run', which is no folder .a URL has two slashes"):
        ExtractConfig(model="m", prompts="p", out="s3:/bucket/run")
    for out in ("./s3:/bucket/run", "C:shards", "a b/c:d/"):
        assert ExtractConfig(model="m", prompts="p", out=out).out == out
    with pytest.raises(KitError, match="file://bucket/run has no absolute path.*write file:///bucket/run"):
        ShardStore("file://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("staging", ["run", "run/staging"])
def test_a_staging_folder_in_the_store_is_refused(tmp_path, staging):
    with pytest.raises(KitError, match=rf"staging .*/{staging} lies in the store .* name a folder elsewhere"):
        write_to_store(f"file://{tmp_path}/run/", tmp_path / staging, range(2))
    assert list(tmp_path.iterdir()) == []
    assert len(write_to_store(f"file://{tmp_path}/run", tmp_path / "run-staging", range(2))) == 2


# Verification


def test_verify_names_damage_lost_manifests_and_uploads_that_were_not_journalled(url, tmp_path, capsys):
    write_to_store(url, tmp_path / "st", range(9))
    assert verify_main([url]) == 0
    assert "9 rows" in capsys.readouterr().out
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/run/shard-00099.arrow", b"left by a killed run")
    report = verify_shards(url)
    assert (report.problems, len(report.notes)) == ([], 1)
    data = bytearray(files.cat_file("/bucket/run/shard-00001.arrow"))
    data[len(data) // 2] ^= 1
    files.pipe_file("/bucket/run/shard-00001.arrow", bytes(data))
    (problem,) = verify_shards(url).problems
    assert problem.startswith("shard-00001.arrow: ")
    lines = files.cat_file("/bucket/run/manifest.jsonl").splitlines(keepends=True)
    files.pipe_file("/bucket/run/manifest.jsonl", b"".join(line for line in lines if b"shard-00002" not in line))
    assert any("rows are listed, but the last run" in problem for problem in verify_shards(url).problems)
