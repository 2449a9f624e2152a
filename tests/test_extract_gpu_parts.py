"""Several engines on one GPU: how they divide its memory, which settings they go with, and (on a GPU) the rows they write."""

import json
import struct
from dataclasses import replace

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader, open_shards
from dflash_kit.target import TargetSpec
from extract import gpu_part
from extract.capture import Job
from extract.cli import main
from extract.settings import ExtractConfig
from helpers import make_tiny_target, requires_vllm, run_command

GIB = 1 << 30
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 9, "seed": 0, "template_args": {}}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def job(request, tmp_path_factory):
    """Four engines on a GPU, for a target of which the embedding is most."""
    folder = tmp_path_factory.mktemp("parts")
    target = make_tiny_target(folder / "target", tied=request.param)
    spec = TargetSpec.from_pretrained(target)
    header = ShardsHeader.from_target(
        spec, target_layer_ids=[0, 2, 4], compute_dtype="float32", engine="vllm", engine_version="0", sampling=SAMPLING
    )
    return Job(
        spec=spec, header=header, folder=folder / "shards", max_shard_bytes=1 << 20, max_num_seqs=512, longest_tokens=64,
        max_num_batched_tokens=2048, workers_per_gpu=4, gpu_memory_utilization=0.8,
    )  # fmt: skip


def stored_bytes(folder) -> int:
    """Of the weights in the safetensors file, by its own header."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(
        end - start
        for name, entry in header.items()
        if name != "__metadata__"
        for start, end in [entry["data_offsets"]]
    )


def test_caches_weights_and_reserves_fill_the_part_of_the_gpu_and_no_more(job):
    total_bytes = 40 * GIB
    weight_bytes = stored_bytes(job.folder.parent / "target")
    # 6 layers, hidden 64, MLP 128, vocabulary 300; three taps are kept, float32.
    reserve_bytes = 2 * GIB + 2048 * (14 * 64 + 3 * 128) * 4 + 512 * 300 * 32
    assert gpu_part.reserve_bytes(job) == reserve_bytes
    assert gpu_part.cache_bytes(job, total_bytes) == 8 * GIB - weight_bytes - reserve_bytes
    bfloat16 = replace(job, header=replace(job.header, compute_dtype="bfloat16"))
    saved = gpu_part.cache_bytes(bfloat16, total_bytes) - gpu_part.cache_bytes(job, total_bytes)
    assert saved == weight_bytes // 2 + 2048 * (14 * 64 + 3 * 128) * 2


def test_the_reserve_grows_with_what_a_step_may_hold(job):
    least = gpu_part.reserve_bytes(job)
    for change in ({"max_num_batched_tokens": None}, {"max_num_batched_tokens": 4096}, {"max_num_seqs": 4096}):
        assert gpu_part.reserve_bytes(replace(job, **change)) > least, change
    given = replace(job, max_num_batched_tokens=None, engine_args={"max_num_batched_tokens": 2048})
    assert gpu_part.reserve_bytes(given) == least


def test_an_engine_alone_measures_for_itself_and_the_user_has_the_last_word(job, monkeypatch):
    monkeypatch.setattr(gpu_part, "_total_bytes", lambda: 40 * GIB)
    assert gpu_part.memory_arguments(replace(job, workers_per_gpu=1)) == {"gpu_memory_utilization": 0.8}
    assert gpu_part.memory_arguments(job) == {
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": gpu_part.cache_bytes(job, 40 * GIB),
    }
    given = replace(job, engine_args={"kv_cache_memory_bytes": 1 << 20})
    assert gpu_part.memory_arguments(given) == {"gpu_memory_utilization": 0.2}


def test_a_gpu_too_small_for_all_is_refused_with_what_takes_the_room(job):
    words = r"workers_per_gpu is 4: each may take 1\.6 GiB of the GPU's 8\.0 GiB.* weights take 0\.0 GiB and 2\.0 GiB are reserved"
    with pytest.raises(KitError, match=words):
        gpu_part.cache_bytes(job, 8 * GIB)


def config(**settings) -> ExtractConfig:
    return ExtractConfig(model="m", prompts="p", out="o", **settings)


def test_processes_and_gpus_follow_from_two_settings():
    assert (config().num_processes, config().num_devices) == (1, 1)
    assert (config(workers_per_gpu=4).num_processes, config(workers_per_gpu=4).num_devices) == (4, 1)
    assert [share.world_size for share in config(workers_per_gpu=4).shares] == [4] * 4
    assert config(workers_per_gpu=4, num_workers=10).num_devices == 3
    assert config(tensor_parallel_size=2, num_workers=3).num_devices == 6
    one_of_them = config(workers_per_gpu=4, num_workers=1, world_size=8, rank=7)
    assert (one_of_them.num_processes, one_of_them.num_devices) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers_per_gpu": 0}, "workers_per_gpu is 0; at least 1"),
        ({"tensor_parallel_size": 2}, "workers_per_gpu is 2 with tensor_parallel_size 2;"),
        ({"engine": "transformers"}, "workers_per_gpu is 2 with engine transformers, on which it has no effect"),
        ({"server": "http://h:1"}, "server http://h:1 does not go with workers_per_gpu above 1"),
        ({"print_serve_command": True}, "print_serve_command does not go with workers_per_gpu above 1"),
        ({"num_workers": 1}, "num_workers is 1, but workers_per_gpu 2 share a GPU"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        config(**{"workers_per_gpu": 2, **settings})


@requires_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("more", [[], ["--dry_run"]])
def test_it_is_refused_where_no_gpu_is(tiny_target, tmp_path, more):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n')
    argv = ["--model", str(tiny_target), "--prompts", str(path), "--out", str(tmp_path / "s"), "--workers_per_gpu=2"]
    argv += ["--target_layer_ids", "[1, 3]"]
    with pytest.raises(KitError, match="workers_per_gpu is 2, but no GPU is visible here; leave it out"):
        main([*argv, *more])
    assert not (tmp_path / "s").exists()


@requires_vllm
@pytest.mark.gpu
def test_two_engines_on_one_gpu_write_together_what_one_writes(tmp_path):
    target = make_tiny_target(
        tmp_path / "target", model_type="llama", hidden_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=128
    )  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(40)))
    argv = ["extract/dump.py", "--model", target, "--prompts", path, "--sampling.max_new_tokens", "24"]
    argv += ["--target_layer_ids", "[1, 3]", "--max_num_seqs", "8", "--gpu_memory_utilization", "0.4", "--verify"]
    ids = []
    for more in ([], ["--workers_per_gpu", "2"]):
        out = tmp_path / f"shards{len(more)}"
        done = run_command(*argv, "--out", out, *more)
        assert done.returncode == 0, done.stderr[-3000:]
        ids.append(sorted(open_shards(out).ids))
    assert ids[0] == ids[1]
    assert len(ids[0]) == 40
    assert json.loads(done.stdout.splitlines()[-1])["workers"] == 2
