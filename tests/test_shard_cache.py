"""Reading shards of an object store through a cache of bounded size, which processes share."""

import multiprocessing
import os
import pickle

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from many_writers import hashed_row
from store_writers import write_to_store

from dflash_kit.errors import KitError
from dflash_kit.shard_cache import ShardCache
from dflash_kit.shard_remote import RemoteShards
from dflash_kit.shard_store import ShardStore, read_store_manifests
from dflash_kit.shards import open_shards

NUM_ROWS = 24


@pytest.fixture
def url(tmp_path, monkeypatch):
    """A store of some ten shards of at least 2,500 bytes each."""
    monkeypatch.setenv("DFLASH_KIT_CACHE", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    write_to_store("memory://bucket/run", tmp_path / "staging", range(NUM_ROWS))
    return "memory://bucket/run"


def entries(url):
    store = ShardStore(url)
    return read_store_manifests(store, list(store.sizes())).shards


def cached(cache: ShardCache) -> list[str]:
    return sorted(path.name.split("-", 1)[1] for path in cache.folder.glob("*/*"))


def cached_bytes(cache: ShardCache) -> int:
    return sum(path.stat().st_size for path in cache.folder.glob("*/*"))


def fetch(cache: ShardCache, url: str, entry):
    return cache.fetch(ShardStore(url), entry.file, entry.bytes, entry.checksum)


def test_rows_are_read_in_any_order_within_the_limit(url, tmp_path, monkeypatch):
    sizes = [entry.bytes for entry in entries(url)]
    cache = ShardCache(tmp_path / "small", 2 * max(sizes) + 10)
    assert sum(sizes) > 3 * cache.max_bytes
    real, most = MemoryFileSystem.get_file, []

    def get_file(self, path, file, **settings):
        real(self, path, file, **settings)
        most.append(cached_bytes(cache))

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    shards = RemoteShards(url, cache=cache)
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0)).tolist()
    by_id = {hashed_row(i).id: hashed_row(i) for i in range(NUM_ROWS)}
    kept = [shards[i] for i in order]  # their shards are deleted meanwhile, and the rows stay valid
    for row in kept:
        assert torch.equal(row.hidden_states, by_id[row.id].hidden_states.bfloat16())
    assert len({row.id for row in kept}) == NUM_ROWS
    assert len(most) > len(sizes)  # some were fetched again
    assert max(most) <= cache.max_bytes
    assert all(file.path.exists() for file in list(shards._files.values())[-2:])
    assert len(shards._files) <= 3  # mappings of deleted files would keep their room


def test_each_shard_is_fetched_once_where_the_cache_holds_all(url, monkeypatch):
    real, fetched = MemoryFileSystem.get_file, []

    def get_file(self, path, file, **settings):
        fetched.append(path)
        real(self, path, file, **settings)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    assert open_shards(url).ids == [row.id for row in open_shards(url)]
    assert len(open_shards(url)[::-1]) == NUM_ROWS
    assert len(fetched) == len(set(fetched)) == len(entries(url))


def test_the_shard_used_longest_ago_goes_first(url, tmp_path):
    first, second, third, *_ = entries(url)
    cache = ShardCache(tmp_path / "small", first.bytes + second.bytes + third.bytes - 1)
    for entry in (first, second, first, third):
        assert fetch(cache, url, entry).stat().st_size == entry.bytes
    assert cached(cache) == [first.file, third.file]


def test_what_a_killed_process_left_is_cleared_and_what_a_live_one_fetches_is_counted(url, tmp_path):
    first, second, third, *_ = entries(url)
    cache = ShardCache(tmp_path / "small", first.bytes + max(second.bytes, third.bytes))
    target = fetch(cache, url, first)
    left = target.with_name(f"0123-shard-00077.arrow.{second.bytes}.incomplete")
    left.write_bytes(b"half of it")
    fetch(cache, url, second)
    assert cached(cache) == [first.file, second.file]
    descriptor = cache._reserve(target.with_name("99-another"), third.bytes)  # as a process does that fetches
    assert descriptor is not None
    fetch(cache, url, first)
    assert cached(cache) == [f"another.{third.bytes}.incomplete", first.file]
    os.close(descriptor)


def test_a_shard_larger_than_the_cache_is_refused_with_the_setting(url, monkeypatch):
    monkeypatch.setenv("DFLASH_KIT_CACHE_BYTES", "100")
    with pytest.raises(KitError, match=r"more than the cache .* may hold \(100\); raise DFLASH_KIT_CACHE_BYTES"):
        open_shards(url)
    monkeypatch.setenv("DFLASH_KIT_CACHE_BYTES", "20 GB")
    with pytest.raises(KitError, match="DFLASH_KIT_CACHE_BYTES is '20 GB'; it must be a whole number of bytes"):
        open_shards(url)


def test_a_flipped_bit_is_named_in_the_store_and_in_the_cache(url, tmp_path):
    path = "/bucket/run/shard-00000.arrow"
    sound = fsspec.filesystem("memory").cat_file(path)
    flipped = bytearray(sound)
    states = hashed_row(0).hidden_states.bfloat16().view(torch.uint8).numpy().tobytes()
    flipped[sound.index(states) + 5] ^= 4
    fsspec.filesystem("memory").pipe_file(path, bytes(flipped))
    with pytest.raises(KitError, match=rf"shard {url}/shard-00000.arrow is damaged"):
        open_shards(url)[0]
    fsspec.filesystem("memory").pipe_file(path, sound)
    assert open_shards(url)[0].id == hashed_row(0).id
    (file,) = (tmp_path / "cache").glob("*/*shard-00000.arrow")
    file.write_bytes(bytes(flipped))
    with pytest.raises(KitError, match=f"row {hashed_row(0).id} does not match its checksum"):
        open_shards(url)[0]


def test_shards_extracted_anew_under_the_same_names_are_not_taken_from_the_cache(url, tmp_path):
    assert len(list(open_shards(url))) == NUM_ROWS
    MemoryFileSystem.store.clear()
    write_to_store(url, tmp_path / "staging", range(100, 104))
    assert [row.id for row in open_shards(url)] == [hashed_row(i).id for i in range(100, 104)]


def read_all(shards, seed: int, queue) -> None:
    order = torch.randperm(len(shards), generator=torch.Generator().manual_seed(seed)).tolist()
    queue.put({shards[i].id: shards[i].hidden_states.view(torch.uint8).sum().item() for i in order})


def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path, url):
    """Forked from one that has read, they map, fetch and delete the same files."""
    place = f"file://{tmp_path}/run"
    write_to_store(place, tmp_path / "staging", range(NUM_ROWS))
    cache = ShardCache(tmp_path / "shared", 3 * max(entry.bytes for entry in entries(place)))
    shards = RemoteShards(place, cache=cache)
    want = {
        hashed_row(i).id: hashed_row(i).hidden_states.bfloat16().view(torch.uint8).sum().item() for i in range(NUM_ROWS)
    }
    assert pickle.loads(pickle.dumps(shards))[3].id == shards[3].id  # noqa: S301
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=read_all, args=(shards, seed, queue)) for seed in range(3)]
    for child in children:
        child.start()
    assert [queue.get(timeout=240) for _ in children] == [want] * 3
    for child in children:
        child.join()
    assert cached_bytes(cache) <= cache.max_bytes
