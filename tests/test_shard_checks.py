"""The checks of hidden states on the device: they must find what the full check finds."""

from dataclasses import replace

import pytest
import torch
from test_shards import LAYERS, D, make_header, make_row, write

from dflash_kit.errors import KitError
from dflash_kit.shard_checks import TapInspection, check_row


@pytest.mark.parametrize("piece", [3, 5, 100])
@pytest.mark.parametrize("fault", ["none", "nan", "infinite", "zero", "constant", "same at every token"])
def test_the_devices_inspection_finds_what_check_row_finds(fault, piece):
    row = make_row(3, 11)
    taps = row.hidden_states.view(11, len(LAYERS), D)
    if fault == "same at every token":
        taps[:, 1] = taps[0, 1].clone()
    elif fault != "none":
        token = {"nan": 0, "infinite": 5, "zero": 10, "constant": 7}[fault]
        taps[token, 2] = {"nan": float("nan"), "infinite": float("inf"), "zero": 0.0, "constant": 1.5}[fault]
    inspection = TapInspection()
    for start in range(0, 11, piece):
        inspection.add(taps[start : start + piece].bfloat16())
    assert bool(inspection.result()) == (fault == "none")
    if fault == "none":
        check_row(row, make_header())
    else:
        with pytest.raises(KitError, match="tap of layer"):
            check_row(row, make_header())


def test_a_conversation_of_one_token_repeated_is_no_fault(tmp_path):
    row = replace(make_row(1, 4), input_ids=torch.full((4,), 7))
    states = row.hidden_states[:1].expand(4, -1).contiguous()
    inspection = TapInspection()
    inspection.add(states.view(4, len(LAYERS), D))
    assert not inspection.result()  # a false alarm, which the full check clears
    write(tmp_path / "s", [replace(row, hidden_states=states)])
