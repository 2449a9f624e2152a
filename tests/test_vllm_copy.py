"""Copies out of the engine's paged cache: the right tokens in the right order, in the form in which they are stored."""

import pytest
import torch
from test_shard_forms import FORMS, forms
from test_shards import LAYERS, D, make_header

from dflash_kit import vllm_copy
from dflash_kit.shard_states import dequantise
from dflash_kit.vllm_copy import StateCopier

S = 4
"""Tokens in a block."""
REQUESTS = [([7, 2, 9, 0], 10), ([3, 11, 4, 8, 1], 17), ([5, 6, 10, 12], 16), ([13], 1)]
"""Blocks and tokens; the first request has a spare block."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PIECES = {"a block": 1, "two requests": 9, "all": 100}
"""Blocks that are copied at a time."""


def make_copier(form, device, piece_blocks, monkeypatch, *, num_layers=LAYERS[-1] + 2):
    header = make_header(**FORMS[form])
    captured = header.captured_layer_ids(num_layers)
    assert captured == [*LAYERS, *([num_layers - 1] if header.has_last_hidden and num_layers - 1 not in LAYERS else [])]
    cache = torch.randn(14, S, len(captured), D, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(vllm_copy, "PIECE_BYTES", piece_blocks * cache[0].nbytes * (4 if header.dtype == "fp8" else 1))
    return StateCopier(cache.to(device), header), cache, header


def on_cpu_as_on_a_device(copier):
    """What is queued on a GPU, run here."""
    return [copied for pack in copier._packs(REQUESTS_WITHOUT_SPARE) for copied in copier._copy_together(pack)]


REQUESTS_WITHOUT_SPARE = [(blocks[: -(-num_tokens // S)], num_tokens) for blocks, num_tokens in REQUESTS]


def assert_is(copied, request, cache, header):
    """The states of one request, token by token."""
    blocks, num_tokens = request
    want = torch.stack([cache[blocks[t // S], t % S] for t in range(num_tokens)])
    taps = want[:, : len(LAYERS)].flatten(1)
    got = copied.parts["hidden_states"]
    assert copied.num_bytes == num_tokens * (header.bytes_per_token - 5)
    assert got.is_contiguous()
    if header.dtype == "fp8":
        assert (dequantise(got, copied.parts["scales"]).float() - taps).norm() < 0.04 * taps.norm()
    else:
        assert torch.equal(got, taps.bfloat16())
    if header.has_last_hidden:
        assert torch.equal(copied.parts["last_hidden"], want[:, -1].bfloat16())
    assert ("last_hidden" in copied.parts, "scales" in copied.parts) == (header.has_last_hidden, header.dtype == "fp8")


@devices
@pytest.mark.parametrize("num_layers", [LAYERS[-1] + 1, LAYERS[-1] + 2])  # the last layer is tapped, or is not
@pytest.mark.parametrize("piece", PIECES)
@forms
def test_requests_are_gathered_from_their_blocks(form, piece, num_layers, device, monkeypatch):
    copier, cache, header = make_copier(form, device, PIECES[piece], monkeypatch, num_layers=num_layers)
    copies = list(copier.copy(REQUESTS))
    for copied, request in zip(copies, REQUESTS, strict=True):
        if copied.wait is not None:
            copied.wait()
        assert copied.is_done()
        assert copied.taps_are_sound() == (device == "cuda" and request[1] > 1)
        assert_is(copied, request, cache, header)


@pytest.mark.parametrize("piece", PIECES)
@forms
def test_what_a_device_does_is_right_on_a_cpu(form, piece, monkeypatch):
    copier, cache, header = make_copier(form, "cpu", PIECES[piece], monkeypatch)
    copies = on_cpu_as_on_a_device(copier)
    for copied, request in zip(copies, REQUESTS, strict=True):
        assert_is(copied, request, cache, header)
    assert [copied.taps_are_sound() for copied in copies] == [True, True, True, False]  # of one token: a false alarm


def test_requests_share_a_piece_where_they_fit(monkeypatch):
    sizes = {
        name: [len(pack) for pack in make_copier("plain", "cpu", blocks, monkeypatch)[0]._packs([([1] * n, n) for n in (4, 5, 4, 1, 4)])]
        for name, blocks in PIECES.items()
    }  # fmt: skip
    assert sizes == {"a block": [1, 1, 1, 1, 1], "two requests": [2, 1, 1, 1], "all": [3, 1, 1]}


@devices
@pytest.mark.parametrize("layer", [0, len(LAYERS)])
@pytest.mark.parametrize("fault", ["infinite", "constant", "the same at both ends"])
def test_the_device_finds_a_broken_state_in_the_request_that_holds_it(fault, layer, device, monkeypatch):
    copier, cache, _ = make_copier("last_hidden", device, 100, monkeypatch)
    cache = copier._cache_NSLD
    if fault == "infinite":
        cache[8, 1, layer, 3] = float("inf")
    elif fault == "constant":
        cache[11, 0, layer] = 0
    else:
        cache[1, 0, layer] = cache[3, 0, layer]
    copies = list(copier.copy(REQUESTS)) if device == "cuda" else on_cpu_as_on_a_device(copier)
    for copied in copies:
        if copied.wait is not None:
            copied.wait()
    assert [copied.taps_are_sound() for copied in copies[:3]] == [True, False, True]
