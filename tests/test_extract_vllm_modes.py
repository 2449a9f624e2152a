"""vLLM with prefix caching and chunked prefill, and with tensor parallelism: the rows are those of transformers."""

import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dflash_kit.shards import ShardsHeader, ShardWriter, open_shards, verify_shards
from dflash_kit.target import TargetSpec
from extract import hf_capture, vllm_capture
from extract.capture import Job
from extract.prompts import Sample
from helpers import make_tiny_target, requires_vllm

pytestmark = [requires_vllm, pytest.mark.slow]

SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 9, "seed": 0, "template_args": {}}
PREFIX_TOKENS, CHUNK_TOKENS = 300, 96


def make_samples() -> list[Sample]:
    """Prompts that begin alike for 300 tokens or not at all, one of them twice; every third has its response."""
    draw = torch.Generator().manual_seed(0)
    words = [torch.randint(0, 250, (PREFIX_TOKENS,), generator=draw).tolist() for _ in range(2)]
    samples = []
    for index in range(14):
        rest = torch.randint(0, 250, (1 + 11 * index,), generator=draw).tolist()
        ids = rest if index in (4, 9) else words[index % 2] + rest
        spans = [(len(ids) // 2, len(ids))] if index % 3 == 0 and len(ids) > 1 else None
        samples.append(
            Sample(id=f"{index:016x}", source="", token_ids=ids, loss_spans=spans, max_new_tokens=0 if spans else 9)
        )
    return [*samples, replace(samples[1], id="f" * 16)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A job for a tiny target with eight heads, its samples, and the rows of transformers by id."""
    folder = tmp_path_factory.mktemp("modes")
    target = make_tiny_target(
        folder / "target", num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=768
    )
    spec = TargetSpec.from_pretrained(target)
    header = ShardsHeader.from_target(
        spec, target_layer_ids=[0, 2, 4], compute_dtype="float32", dtype="float32", engine="vllm", engine_version="0",
        sampling=SAMPLING,
    )  # fmt: skip
    job = Job(
        spec=spec, header=header, folder=folder / "expected", max_shard_bytes=1 << 20, max_num_seqs=4,
        longest_tokens=700, max_num_batched_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    samples = make_samples()
    for _ in hf_capture.capture(replace(job, header=replace(header, engine="transformers")), samples, {}):
        pass
    before = dict(os.environ)
    yield job, samples, {row.id: row for row in open_shards(job.folder)}
    os.environ.clear()
    os.environ.update(before)


def require_equal_rows(folder, samples, expected):
    """Each sample once, the same tokens and mask, states within float32's tolerance of another order of sums."""
    shards = open_shards(folder)
    assert sorted(shards.ids) == sorted(sample.id for sample in samples)
    assert verify_shards(folder).problems == []
    for row in shards:
        want = expected[row.id]
        assert row.token_ids().tolist() == want.token_ids().tolist()
        assert torch.equal(row.loss_mask, want.loss_mask)
        assert row.hidden_states.shape == want.hidden_states.shape
        difference = (row.hidden_states - want.hidden_states).norm(dim=-1) / want.hidden_states.norm(dim=-1)
        assert float(difference.max()) < 1e-4


def test_shared_prefixes_are_restored_and_no_row_is_short(setting, tmp_path, monkeypatch):
    job, samples, expected = setting
    num_cached = {}
    take = vllm_capture._Run._take_outputs

    def take_and_note(self, outputs):
        num_cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        take(self, outputs)

    monkeypatch.setattr(vllm_capture._Run, "_take_outputs", take_and_note)
    job = replace(job, folder=tmp_path / "shards", prefix_caching=True)
    reports = list(vllm_capture.capture(job, samples, {"asked": len(samples), "dropped": {}}))
    assert sum(report.num_rows for report in reports) == len(samples)
    assert sum(cached > 0 for cached in num_cached.values()) >= 8, num_cached  # it did happen
    require_equal_rows(job.folder, samples, expected)


@pytest.mark.parametrize("block_ids", [[3, 1], [3, 0, 1]])
def test_a_request_without_all_its_states_stops_the_run_and_names_the_setting(setting, tmp_path, block_ids):
    """As where an engine does not restore shared prefixes: too few blocks, or a placeholder (block 0) for one."""
    from dflash_kit.shard_sink import ShardSink
    from dflash_kit.vllm_connector import FinishedRequest, ShardConnector
    from dflash_kit.vllm_copy import StateCopier

    header = setting[0].header
    connector = object.__new__(ShardConnector)
    connector._sink, connector._block_size = ShardSink(ShardWriter(tmp_path / "shards", header)), 16
    cache = torch.randn(4, 16, header.num_taps, header.hidden_size)
    connector._copier = StateCopier(cache, header)
    whole = FinishedRequest("r1", "whole", list(range(40)), 7, [[20, 40]], [3, 2, 1])
    assert connector._capture([whole])["r1"]()
    assert connector.flush()["error"] is None
    assert connector._capture([replace(whole, sample_id="short", block_ids=block_ids)])["r1"]()
    error = connector.finish(None)["error"]
    assert re.search(
        r"sample short: vLLM .* kept no states for part of its 40 tokens.*; set prefix_caching false", error
    )
    assert open_shards(tmp_path / "shards").ids == ["whole"]


def test_a_rank_that_does_not_write_ends_with_the_driver_and_leaves_the_writer_time(monkeypatch):
    from dflash_kit import vllm_connector

    watched, waited = [], []
    monkeypatch.setattr(vllm_connector, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(vllm_connector, "end_with_driver", lambda pid, finish: watched.append((pid, finish)))
    monkeypatch.setattr(vllm_connector, "time", SimpleNamespace(sleep=waited.append))
    connector = object.__new__(vllm_connector.ShardConnector)
    connector._copier = None
    connector._kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"driver_pid": 42})
    connector.register_kv_caches({})
    ((pid, finish),) = watched
    finish()
    assert (pid, waited) == (42, [vllm_connector.CLOSE_S])


def test_two_ranks_write_each_row_once_and_free_its_blocks(setting, tmp_path, monkeypatch):
    """The cache has room for a few requests: blocks that one rank kept for ever would stop the engine.

    Answers are sampled, from the likeliest token alone, and several prompts do not fit a step together: prefilled in pieces,
    they would end the engine (see ``extract.prefill``).
    """
    job, samples, expected = setting
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    header = replace(job.header, sampling={**SAMPLING, "temperature": 1.0, "top_k": 1})
    job = replace(
        job, folder=tmp_path / "shards", header=header, tensor_parallel_size=2, max_num_batched_tokens=701,
        engine_args={"num_gpu_blocks_override": 24},
    )  # fmt: skip
    num_rows, deadline_s = 0, None
    for report in vllm_capture.capture(job, samples, {"asked": len(samples), "dropped": {}}):
        num_rows += report.num_rows
        deadline_s = deadline_s or time.monotonic() + 240  # the engine is up; the work takes seconds
        assert time.monotonic() < deadline_s, f"stopped at {num_rows} rows"
    assert num_rows == len(samples)
    require_equal_rows(job.folder, samples, expected)
    assert len(list(job.folder.glob("manifest*.jsonl"))) == 1
