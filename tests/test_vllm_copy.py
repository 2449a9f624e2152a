"""Copies out of the engine's paged cache: the right tokens in the right order, in the form in which they are stored."""

import pytest
import torch
from test_shard_forms import FORMS, forms
from test_shards import LAYERS, D, make_header

from dflash_kit import vllm_copy
from dflash_kit.shard_states import dequantise
from dflash_kit.vllm_copy import StateCopier

BLOCKS = [7, 2, 9, 0]
"""Of a request of ten tokens, four in a block: the last one is a spare."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_last_tapped", [False, True])
@forms
def test_a_request_is_gathered_from_its_blocks(form, is_last_tapped, device, monkeypatch):
    monkeypatch.setattr(vllm_copy, "PIECE_BYTES", 1)  # a piece is one block
    header = make_header(**FORMS[form])
    num_layers = LAYERS[-1] + (1 if is_last_tapped else 2)
    captured = header.captured_layer_ids(num_layers)
    assert captured == [*LAYERS, *([num_layers - 1] if header.has_last_hidden and not is_last_tapped else [])]
    cache = torch.randn(12, 4, len(captured), D, generator=torch.Generator().manual_seed(0))
    copied = StateCopier(cache.to(device), header).copy(BLOCKS, 10)
    if copied.wait is not None:
        copied.wait()
    assert copied.is_done()
    assert copied.taps_are_sound is None if device == "cpu" else bool(copied.taps_are_sound)
    assert copied.num_bytes == 10 * (header.bytes_per_token - 5)
    want = torch.cat([cache[7], cache[2], cache[9, :2]])
    taps = want[:, : len(LAYERS)].flatten(1)
    got = copied.parts["hidden_states"]
    if header.dtype == "fp8":
        assert (dequantise(got, copied.parts["scales"]).float() - taps).norm() < 0.04 * taps.norm()
    else:
        assert torch.equal(got, taps.bfloat16())
    if header.has_last_hidden:
        assert torch.equal(copied.parts["last_hidden"], want[:, -1].bfloat16())
    assert ("last_hidden" in copied.parts, "scales" in copied.parts) == (header.has_last_hidden, header.dtype == "fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [0, len(LAYERS)])
def test_the_device_finds_a_broken_state(layer):
    header = make_header(has_last_hidden=True)
    cache = torch.randn(12, 4, len(LAYERS) + 1, D, device="cuda")
    cache[2, 1, layer, 3] = float("inf")
    copied = StateCopier(cache, header).copy(BLOCKS, 10)
    copied.wait()
    assert not bool(copied.taps_are_sound)
