"""Names that are neither here nor to be had from the hub are refused within seconds; a hub that answers is asked."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import serve_hub

from dflash_kit import hub_connection
from dflash_kit.errors import KitError
from dflash_kit.hub import checkpoint_folder
from dflash_kit.hub_connection import load_dataset
from dflash_kit.target import TargetSpec


@pytest.fixture(autouse=True)
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, nobody at the hub's address, and nothing remembered."""
    point_to(monkeypatch, "http://127.0.0.1:9")  # the port of discard: closed
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield
    os.environ.pop("HF_HUB_OFFLINE", None)


def point_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    from huggingface_hub import constants

    hub_connection._hub_answers.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def refusal(name: str | Path, read: Any = TargetSpec.from_pretrained) -> str:
    t0_s = time.monotonic()
    with pytest.raises(KitError) as refused:
        read(name)
    assert time.monotonic() - t0_s < 3
    return str(refused.value)


@pytest.mark.parametrize("read", [TargetSpec.from_pretrained, checkpoint_folder])
def test_a_path_is_never_asked_for(tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_connection, "_hub_answers", None)  # not to be called
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("./m", "../m", "~/m", "/m", "a/b/c", tmp_path / "absent", "org/"):
        assert "no such folder" in refusal(name, read)
    assert "no such folder (runs holds model)" in refusal("./runs/modle", read)
    assert "write the whole path" in refusal("~/m", read)


@pytest.mark.parametrize("read", [TargetSpec.from_pretrained, checkpoint_folder])
def test_without_a_hub_both_possibilities_are_named(tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    message = refusal("runs/modle", read)
    assert "no such folder (runs holds model); and the hub http://127.0.0.1:9 cannot be reached" in message
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "no such folder (runs holds model); HF_HUB_OFFLINE is set" in refusal("runs/modle", read)


def test_a_hub_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_to(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        assert "cannot be reached within 1 s" in refusal("org/name")


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub() as hub:
        point_to(monkeypatch, hub.url)
        assert "no such folder; on the hub: " in refusal("org/name")  # which the stand-in does not know


def test_what_the_cache_holds_is_taken_without_a_hub(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny_target, repository / "snapshots" / commit)
    t0_s = time.monotonic()
    spec = TargetSpec.from_pretrained("org/name")
    assert time.monotonic() - t0_s < 5
    assert spec.config_hash == TargetSpec.from_pretrained(tiny_target).config_hash
    assert "org/name is taken from its cache" in capsys.readouterr().err


def test_data_sets_are_not_waited_for_either() -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    t0_s = time.monotonic()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        load_dataset("org/name", split="train")
    assert time.monotonic() - t0_s < 10
    assert not datasets.config.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
