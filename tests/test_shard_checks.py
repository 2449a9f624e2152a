"""The checks of hidden states on the device: they must find what the full check finds."""

import json
from dataclasses import replace

import pytest
import torch
from test_hybrid import LINEAR
from test_shards import LAYERS, D, make_header, make_row, write

from dflash_kit.errors import KitError
from dflash_kit.shard_checks import check_row, sound_tokens, varying_rows
from dflash_kit.shards import open_shards, verify_shards
from dflash_kit.target import load_target
from extract.cli import main
from helpers import make_tiny_target


def looks_sound(taps: torch.Tensor) -> bool:
    """What the device says of one row."""
    return bool(sound_tokens(taps).all() & varying_rows(taps[:1], taps[-1:]).all())


@pytest.mark.parametrize("fault", ["none", "nan", "infinite", "zero", "constant", "same at every token"])
def test_the_devices_inspection_finds_what_check_row_finds(fault):
    row = make_row(3, 11)
    taps = row.hidden_states.view(11, len(LAYERS), D)
    if fault == "same at every token":
        taps[:, 1] = taps[0, 1].clone()
    elif fault != "none":
        token = {"nan": 0, "infinite": 5, "zero": 10, "constant": 7}[fault]
        taps[token, 2] = {"nan": float("nan"), "infinite": float("inf"), "zero": 0.0, "constant": 1.5}[fault]
    assert looks_sound(taps.bfloat16()) == (fault == "none")
    if fault == "none":
        check_row(row, make_header())
    else:
        with pytest.raises(KitError, match="tap of layer"):
            check_row(row, make_header())


def test_a_conversation_of_one_token_repeated_is_no_fault(tmp_path):
    row = replace(make_row(1, 4), input_ids=torch.full((4,), 7))
    states = row.hidden_states[:1].expand(4, -1).contiguous()
    assert not looks_sound(states.view(4, len(LAYERS), D))  # a false alarm, which the full check clears
    write(tmp_path / "s", [replace(row, hidden_states=states)])


# A token whose embedding is all zero

PAD = 9


def padded_row(*positions: int, zero_taps: int = 1):
    """Eleven tokens, with the token PAD at these positions and its states zero in the first taps."""
    row = make_row(3, 11)
    ids = row.input_ids.clone()
    ids[ids == PAD] = PAD + 1
    ids[list(positions)] = PAD
    row.hidden_states[list(positions), : zero_taps * D] = 0
    return replace(row, input_ids=ids)


@pytest.mark.parametrize("zero_taps", [1, 2])
@pytest.mark.parametrize("positions", [[0], [4], [9], [2, 3, 10]])
def test_a_token_that_is_zero_in_the_lower_taps_wherever_it_stands_is_no_fault(tmp_path, positions, zero_taps):
    row = padded_row(*positions, zero_taps=zero_taps)
    assert not looks_sound(row.hidden_states.view(11, len(LAYERS), D))  # the full check decides
    write(tmp_path / "s", [row])
    assert verify_shards(tmp_path / "s").ok


def whole_tap(row):
    row.hidden_states[:, :D] = 0


def in_all_taps(row):
    row.hidden_states[[2, 3, 10]] = 0


def not_each_time(row):
    row.hidden_states[2, :D] = 1 + torch.rand(D)


def behind_a_tap_that_is_not_zero(row):
    row.hidden_states[[2, 3, 10], : 2 * D] = torch.cat([torch.rand(3, D), torch.zeros(3, D)], dim=-1)


def another_token_as_well(row):
    row.hidden_states[5, :D] = 0


@pytest.mark.parametrize(
    "spoil", [whole_tap, in_all_taps, not_each_time, behind_a_tap_that_is_not_zero, another_token_as_well]
)
def test_zero_states_that_an_embedding_cannot_explain_are_refused(spoil):
    row = padded_row(2, 3, 10)
    check_row(row, make_header())
    spoil(row)
    with pytest.raises(KitError, match="sample row3: tap of layer [13] is all zero at token"):
        check_row(row, make_header())


@pytest.mark.parametrize("positions", [[10], [9, 10]])
def test_zero_states_at_the_end_alone_look_like_a_short_capture_and_are_refused(positions):
    with pytest.raises(KitError, match=f"layer 1 is all zero at token {positions[0]}"):
        check_row(padded_row(*positions), make_header())


def test_the_only_token_of_a_row_is_not_excused():
    row = padded_row(0)
    short = replace(row, input_ids=row.input_ids[:1], loss_mask=row.loss_mask[:1], hidden_states=row.hidden_states[:1])
    with pytest.raises(KitError, match="layer 1 is all zero"):
        check_row(short, make_header())


def test_a_hybrid_with_an_empty_padding_embedding_is_extracted(tmp_path, capsys):
    """Linear layers, then full attention: the real states of a prompt that holds the padding token."""
    target = make_tiny_target(tmp_path / "target", model_type="qwen3_5_text", **LINEAR)
    ids = [5, 6, 256, 7, 8, 256, 256, 9]
    (tmp_path / "p.jsonl").write_text(json.dumps({"input_ids": ids}) + "\n")
    argv = ["--model", str(target), "--prompts", str(tmp_path / "p.jsonl"), "--engine", "transformers"]
    taps = ["--target_layer_ids", "[0, 1, 2, 4]", "--storage", "float32"]
    assert main([*argv, *taps, "--out", str(tmp_path / "s"), "--verify"]) == 0
    (row,) = open_shards(tmp_path / "s")
    zero_TK = (row.hidden_states.view(8, 4, 64) == 0).all(-1)
    assert zero_TK.nonzero().tolist() == [[t, k] for t in (2, 5, 6) for k in (0, 1)]  # as the target computes them
    with torch.inference_mode():
        states = load_target(target)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert torch.equal((states[2][0] == 0).all(-1), zero_TK[:, 1])
    with pytest.raises(KitError, match="layer 0 is all zero at token 2"):  # no deeper tap tells it from a lost state
        main([*argv, "--target_layer_ids", "[0, 1]", "--out", str(tmp_path / "t")])
