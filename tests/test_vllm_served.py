"""Sessions of the served connector, without an engine: takeovers, rows that come twice or late, and what is malformed."""

from types import SimpleNamespace

import pytest
import torch

from dflash_kit.shards import ShardsHeader, open_shards
from dflash_kit.target import TargetSpec
from helpers import requires_vllm

pytestmark = requires_vllm
BLOCK_TOKENS = 16


@pytest.fixture
def connector(tiny_target, tmp_path, monkeypatch):
    """On a rank that writes, as ``register_kv_caches`` leaves it."""
    from dflash_kit import vllm_served
    from dflash_kit.vllm_copy import StateCopier

    watched = []
    monkeypatch.setattr(vllm_served, "end_with_driver", lambda pid, finish: watched.append(pid))
    header = ShardsHeader.from_target(
        TargetSpec.from_pretrained(tiny_target), target_layer_ids=[0, 2], compute_dtype="float32", dtype="float32",
        engine="vllm", engine_version="",
    )  # fmt: skip
    connector = object.__new__(vllm_served.ServedShardConnector)
    connector._session, connector._captured, connector._repeated = 0, set(), []
    connector._sink, connector._error, connector._copies = None, None, {}
    connector._finished = []
    connector._block_size, connector._num_lanes = BLOCK_TOKENS, 1
    connector.cache = torch.randn(4, BLOCK_TOKENS, header.num_taps, header.hidden_size)
    connector._copier = StateCopier(connector.cache, header)
    connector._header = header
    connector._extra = {
        "folder": str(tmp_path / "shards"),
        "writer": {"rank": 0, "world_size": 1, "max_shard_bytes": 1 << 20, "lock_wait_s": 0.1},
        "max_pending_bytes": 1 << 20,
    }
    connector._start()
    connector.watched = watched
    yield connector
    connector.shutdown()


def capture(connector, *sample_ids):
    """Requests that finished in one step."""
    from dflash_kit.vllm_connector import FinishedRequest

    tokens = list(range(20))
    requests = [FinishedRequest(f"r{i}", name, tokens, 7, [[5, 20]], [1, 2]) for i, name in enumerate(sample_ids)]
    tests = connector._capture(requests)
    assert [is_done() for is_done in tests.values()] == [True] * len(sample_ids)


def test_nothing_is_opened_before_a_client_asks_and_all_is_released_after(connector, tmp_path):
    from dflash_kit.vllm_version import installed_vllm

    folder = tmp_path / "shards"
    found = connector.describe()
    assert (found["folder"], found["rank"], found["world_size"]) == (str(folder), 0, 1)
    assert found["header"]["engine_version"] == installed_vllm()
    capture(connector, "before")  # nobody has asked for rows: it is no row, and its blocks are free
    assert not folder.exists()
    session = connector.open_session(42)["session"]
    capture(connector, "a")
    assert connector.finish_session(session, {"asked": 1, "dropped": {}})["accepted"] == [("a", 20)]
    capture(connector, "late")
    assert open_shards(folder).ids == ["a"]
    assert open_shards(folder).summary == {"asked": 1, "dropped": {}}
    second = connector.open_session(42)
    assert second["error"] is None
    capture(connector, "late")  # it was no row, and is one now
    connector.finish_session(second["session"], None)
    assert sorted(open_shards(folder).ids) == ["a", "late"]
    assert connector.watched == [42]


def test_a_takeover_makes_rows_durable_and_repeats_none(connector, tmp_path):
    first = connector.open_session(42)["session"]
    capture(connector, "a")
    second = connector.open_session(42)["session"]
    assert open_shards(tmp_path / "shards").ids == ["a"]  # the second client sees it, and does not ask again
    capture(connector, "b", "b")  # the first one's, late; the second one has asked for it, too
    capture(connector, "b")
    assert "another client" in connector.session_status(first)["error"]
    assert "another client" in connector.finish_session(first, None)["error"]
    status = connector.finish_session(second, None)
    assert status["error"] is None
    assert [sample_id for sample_id, _ in status["accepted"]] == ["b", "b", "b"]
    assert sorted(open_shards(tmp_path / "shards").ids) == ["a", "b"]


def test_after_a_failure_a_new_session_begins_anew(connector, tmp_path):
    session = connector.open_session(42)["session"]
    states = connector.cache.clone()
    connector.cache.fill_(float("nan"))
    capture(connector, "a")
    connector.cache.copy_(states)
    error = connector.finish_session(session, {"asked": 1})["error"]
    assert "sample a" in error
    session = connector.open_session(42)["session"]
    capture(connector, "a")
    assert connector.finish_session(session, None)["error"] is None
    assert open_shards(tmp_path / "shards").ids == ["a"]


def test_a_folder_that_cannot_be_written_is_told(connector, tmp_path):
    (tmp_path / "shards").write_text("")
    assert "is a file" in connector.open_session(42)["error"]
    (tmp_path / "shards").unlink()
    assert connector.open_session(42)["error"] is None


def test_ranks_that_do_not_write_say_nothing(connector):
    connector._copier = None
    assert connector.describe() is None
    assert connector.open_session(42) is None
    assert connector.session_status(0) is None
    assert connector.finish_session(0, None) is None


@pytest.mark.parametrize(
    ("params", "is_row"),
    [
        (None, False),
        ({"sample_id": 3, "include_output_tokens": True}, False),
        ({"sample_id": ""}, False),
        ({"sample_id": "a"}, False),
        ({"sample_id": "a", "loss_spans": [[0, 3], [4, 21]]}, False),
        ({"sample_id": "a", "loss_spans": [["0", 3]]}, False),
        ({"sample_id": "a", "loss_spans": [[2, 1]]}, False),
        ({"sample_id": "a", "loss_spans": [[0, 3], [4, 20]]}, True),
        ({"sample_id": "a", "include_output_tokens": True}, True),
    ],
)
def test_requests_become_rows_when_they_are_well_formed(connector, params, is_row):
    request = SimpleNamespace(
        kv_transfer_params=params, num_prompt_tokens=20, prompt_token_ids=list(range(20)), request_id="r",
        all_token_ids=list(range(25)), status=SimpleNamespace(name="FINISHED_STOPPED"),
    )  # fmt: skip
    keeps_blocks, _ = connector.request_finished(request, [1, 2])
    assert keeps_blocks == is_row
    assert len(connector._finished) == is_row
