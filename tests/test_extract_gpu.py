"""The connector on a GPU: copies on a stream of their own, pinned memory, vLLM's CUDA layout of the cache."""

from pathlib import Path

import pytest
import torch

from dflash_kit.shards import ShardsHeader, open_shards, verify_shards
from dflash_kit.target import TargetSpec, load_target
from extract import vllm_capture
from extract.capture import Job
from extract.prompts import Sample
from helpers import make_tiny_target, requires_vllm

pytestmark = [pytest.mark.gpu, requires_vllm]

LAYERS = [1, 3, 4]
NUM_SAMPLES = 40


def make_samples(vocab_size: int) -> list[Sample]:
    """Random prompts of very different lengths; every third has a given response and finishes at once."""
    random = torch.Generator().manual_seed(0)
    samples = []
    for index in range(NUM_SAMPLES):
        length = 20 + 37 * (index * 7 % 11)
        ids = torch.randint(0, vocab_size, (length,), generator=random).tolist()
        spans = [(length // 2, length)] if index % 3 == 0 else None
        new = 0 if spans else 24 + index % 9
        samples.append(Sample(id=f"{index:032x}", source="", token_ids=ids, loss_spans=spans, max_new_tokens=new))
    return samples


def test_rows_captured_on_a_gpu_are_those_of_transformers(tmp_path: Path):
    target = make_tiny_target(
        tmp_path / "target", model_type="llama", tied=True, initializer_range=0.05, hidden_size=256, num_attention_heads=2, num_key_value_heads=1,
        head_dim=128, max_position_embeddings=1024,
    )  # fmt: skip
    spec = TargetSpec.from_pretrained(target)
    samples = make_samples(250)
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=LAYERS,
        compute_dtype="bfloat16",
        engine="vllm",
        engine_version=vllm_capture.engine_version(),
        sampling={"temperature": 2.0, "top_p": 1.0, "top_k": 2, "seed": 0},
    )
    job = Job(
        spec=spec,
        header=header,
        folder=tmp_path / "shards",
        max_shard_bytes=1 << 20,
        max_num_seqs=8,
        longest_tokens=max(sample.max_tokens for sample in samples),
        gpu_memory_utilization=0.2,
        max_num_batched_tokens=256,
    )
    reports = list(vllm_capture.capture(job, samples, {"asked": NUM_SAMPLES, "dropped": {}}))
    assert sum(report.num_rows for report in reports) == NUM_SAMPLES
    assert verify_shards(job.folder).problems == []
    shards = open_shards(job.folder)
    assert sorted(shards.ids) == sorted(sample.id for sample in samples)
    assert shards.ids != [sample.id for sample in samples]  # they finished out of order
    by_id = {sample.id: sample for sample in samples}
    answers = [row.token_ids()[len(by_id[row.id].token_ids) :] for row in shards if by_id[row.id].loss_spans is None]
    # Where a token is said twice running, vLLM's "draft" of it is right: its positions went wrong there once.
    assert sum(bool((answer[1:] == answer[:-1]).any()) for answer in answers) > len(answers) // 2
    exact, rounded = (load_target(target, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16))
    ratios = []
    for row in shards:
        sample = by_id[row.id]
        assert row.input_ids[: len(sample.token_ids)].tolist() == sample.token_ids
        assert len(row.token_ids()) <= sample.max_tokens
        want, peer = (states(model, row.input_ids) for model in (exact, rounded))
        ours_error, peer_error = ((s - want).norm(dim=-1) for s in (row.hidden_states.float(), peer))
        ratios.append(float(ours_error.mean() / peer_error.mean()))
        assert float(ours_error.max()) < 3 * float(peer_error.max())  # no single token is out of place
    print(f"error to float32 over that of transformers in bfloat16: {min(ratios):.2f} to {max(ratios):.2f}")
    assert max(ratios) < 2


def states(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """(T, K * D) float32: what transformers has at the tapped layers."""
    with torch.inference_mode():
        output = model(input_ids[None].long().cuda(), output_hidden_states=True)
    return torch.cat([output.hidden_states[k + 1][0] for k in LAYERS], dim=-1).float().cpu()
