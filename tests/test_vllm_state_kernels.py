"""States stored in the paged cache by our kernel are those that vLLM's own indexing stores; its place in vLLM is taken once."""

from pathlib import Path

import pytest
import torch
from kernel_compiling import interpret_and_compile

from helpers import HAS_GPU, HAS_TRITON, INTERPRETED, runs_kernels

DEVICE = "cuda" if HAS_GPU else "cpu"
BLOCKS, S = 9, 4


def indexed(states, cache, slots):
    """What vLLM 0.26 does."""
    slots = slots.clamp_min(0)
    cache[slots // S, slots % S] = states


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [5, 2048, 5000])
@pytest.mark.parametrize("num_tokens", [0, 1, 21])
def test_the_kernel_stores_what_indexing_does(dtype, width, num_tokens):
    from dflash_kit.vllm_state_kernels import store_states

    random = torch.Generator().manual_seed(num_tokens)
    states = torch.randn(num_tokens, 2, width, generator=random).to(dtype).to(DEVICE)
    slots = (torch.randperm(BLOCKS * S - 1, generator=random)[:num_tokens] + 1).to(DEVICE)
    ours, theirs = (torch.zeros(BLOCKS, S, 2, width, dtype=dtype, device=DEVICE) for _ in range(2))
    store_states(states, ours, slots)
    indexed(states, theirs, slots)
    assert torch.equal(ours, theirs)


@runs_kernels
def test_padding_goes_to_the_first_slot():
    from dflash_kit.vllm_state_kernels import store_states

    states, cache = torch.ones(2, 1, 8, device=DEVICE), torch.zeros(BLOCKS, S, 1, 8, device=DEVICE)
    store_states(states, cache, torch.tensor([-1, 6], device=DEVICE))
    written = cache.flatten(0, 1).sum(dim=(1, 2)).nonzero().flatten()
    assert written.tolist() == [0, 6]


@pytest.mark.skipif(HAS_GPU or INTERPRETED or not HAS_TRITON, reason="starts the interpreter; needs triton and no GPU")
def test_the_kernel_runs_in_the_interpreter_and_compiles(tmp_path):
    words, kernels = interpret_and_compile(Path(__file__), "kernel_stores or padding", tmp_path)
    assert "19 passed" in words, words
    assert len(kernels) == 1


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_vllms_place_is_taken_once_and_keeps_its_way_for_other_tensors(monkeypatch):
    extract_hidden_states = pytest.importorskip("vllm.model_executor.models.extract_hidden_states")
    from dflash_kit.vllm_state_kernels import use_store_states

    called = []
    monkeypatch.setattr(extract_hidden_states, "basic_cache", lambda *tensors: called.append(tensors))
    use_store_states()
    taken = extract_hidden_states.basic_cache
    use_store_states()
    assert extract_hidden_states.basic_cache is taken
    taken(torch.ones(1, 1, 8), torch.zeros(BLOCKS, S, 1, 8), torch.tensor([6]))
    assert len(called) == 1
