"""The three commands with an object store between them: extraction into it, training and replay out of it."""

import json
import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_extract_many import arguments
from train_helpers import make_shards, small_run

from decode.cli import main as evaluate
from dflash_kit.errors import run_cli
from dflash_kit.shard_store import ShardStore
from dflash_kit.shards import open_shards, verify_shards
from extract import cli, parity
from extract.cli import main
from train.cli import main as train


@pytest.fixture(autouse=True)
def places_of_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "question " * (1 + i % 5) + str(i)}) + "\n" for i in range(10)))
    return path


def rows(place) -> dict[str, tuple[list[int], list[int]]]:
    return {row.id: (row.token_ids().tolist(), row.hidden_states.view(-1).int().tolist()) for row in open_shards(place)}


def test_an_extraction_into_a_store_is_that_into_a_folder(tiny_target, prompts, tmp_path, capsys):
    url = "memory://bucket/run"
    assert main([*arguments(tiny_target, prompts, url), "--dry_run"]) == 0
    assert ShardStore(url).sizes() == {}
    assert main([*arguments(tiny_target, prompts, tmp_path / "folder"), "--max_shard_bytes=9000"]) == 0
    capsys.readouterr()
    assert main([*arguments(tiny_target, prompts, url), "--max_shard_bytes=9000", "--verify"]) == 0
    said, noted = capsys.readouterr()
    assert f"note: {url} lives in this process alone" in noted
    assert f"store    {url}, by way of {tmp_path / f'dflash-kit-staging-{os.getuid()}'}" in said
    assert "parity   2 rows" in said and "verified" in said
    result = json.loads(said.splitlines()[-1])
    assert (result["out"], result["rows"], result["rows_added"]) == (url, 10, 10)
    assert rows(url) == rows(tmp_path / "folder")
    sizes = ShardStore(url).sizes()
    assert set(sizes) == {path.name for path in (tmp_path / "folder").iterdir()}
    assert result["bytes"] == sum(size for name, size in sizes.items() if name.endswith(".arrow"))
    kinds = [json.loads(line)["kind"] for line in ShardStore(url).read(["manifest.jsonl"])[0].splitlines()]
    assert kinds == ["header", "split", *["shard"] * (len(sizes) - 2), "summary", "parity_passed"]
    assert main([*arguments(tiny_target, prompts, url), "--staging", str(tmp_path / "other-host")]) == 0
    assert "nothing to add: memory://bucket/run holds all 10 rows" in capsys.readouterr().out


def test_a_failed_parity_check_is_in_the_store(tiny_target, prompts, capsys, monkeypatch):
    monkeypatch.setitem(parity.LIMITS, "float32", -1.0)
    monkeypatch.setitem(parity.STORED_LIMITS, "bfloat16", 0.0)
    assert run_cli(cli.main, arguments(tiny_target, prompts, "memory://bucket/bad")) == 2
    assert "differs from transformers" in capsys.readouterr().err
    assert run_cli(cli.main, arguments(tiny_target, prompts, "memory://bucket/bad")) == 2
    assert "the shards in memory://bucket/bad failed their parity check" in capsys.readouterr().err


@pytest.mark.slow
def test_several_processes_of_a_host_write_into_one_store(tiny_target, prompts, tmp_path, capsys):
    url = f"file://{tmp_path}/bucket/run"
    argv = [*arguments(tiny_target, prompts, url), "--num_workers=2", "--verify", "--staging", str(tmp_path / "st")]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == len(open_shards(url)) == 10
    names = ShardStore(url).sizes().keys()
    assert {"manifest-r00000.jsonl", "manifest-r00001.jsonl", "extract.yaml"} <= names
    assert verify_shards(url).problems == verify_shards(url).notes == []


def test_training_and_replay_read_a_store_as_they_read_a_folder(tiny_target, tmp_path, monkeypatch, capsys):
    folder = make_shards(tmp_path / "bucket" / "run", tiny_target)
    for out, shards in (("one", folder), ("two", f"file://{folder}")):
        assert train(small_run(shards, tmp_path / out, optim__max_steps=3)) == 0
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    assert list((tmp_path / "cache").glob("*/*.arrow"))
    for out, shards in (("three", folder), ("four", f"file://{folder}")):
        assert (
            evaluate([f"--ckpt={tmp_path / 'one'}", f"--replay={shards}", f"--out={tmp_path / out}", "--limit=4"]) == 0
        )
    reports = [json.loads((tmp_path / out / "report.json").read_text())["results"] for out in ("three", "four")]
    assert reports[0] == reports[1]
    assert reports[0][0]["rounds"] > 0
    assert run_cli(train, small_run("memory://bucket/nothing", tmp_path / "five")) == 2
    assert "memory://bucket/nothing holds no shards" in capsys.readouterr().err
