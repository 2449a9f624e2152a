"""Extractions that are killed, and the same command afterwards: each sample once, bit for bit what an undisturbed run writes."""

import json

import pytest
import torch

from dflash_kit.shards import open_shards, verify_shards
from helpers import REPO, make_tiny_target, run_command

NUM_ROWS = 16


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts of different lengths; every third has a response."""
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = []
    for index in range(NUM_ROWS):
        messages = [{"role": "user", "content": "question " * (1 + 3 * index % 7) + str(index)}]
        if index % 3 == 2:
            messages.append({"role": "assistant", "content": "an answer"})
        lines.append({"messages": messages})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def assert_bit_identical(folder, whole) -> None:
    """Each id of an undisturbed run once, with the same tokens, masks and states to the bit."""
    found, wanted = open_shards(folder), {row.id: row for row in open_shards(whole)}
    assert sorted(found.ids) == sorted(wanted)
    for row in found:
        want = wanted[row.id]
        assert torch.equal(row.token_ids(), want.token_ids())
        assert torch.equal(row.loss_mask, want.loss_mask)
        assert torch.equal(row.hidden_states.view(torch.int32), want.hidden_states.view(torch.int32))


@pytest.mark.slow
def test_a_run_killed_at_random_instants_is_finished_by_the_same_command(prompts, tmp_path):
    """Sampled answers: they have to come out the same in whichever batch a resumed run puts them."""
    target = make_tiny_target(tmp_path / "target", num_hidden_layers=4, hidden_size=32)
    argv = ["--model", str(target), "--prompts", str(prompts), "--engine", "transformers", "--storage", "float32"]
    argv += ["--target_layer_ids", "[1, 3]", "--sampling.max_new_tokens", "4", "--sampling.temperature", "1.0"]
    argv += ["--max_num_seqs", "4", "--max_shard_bytes", "1", "--parity", "0"]
    result = run_command("tests/kill_runs.py", tmp_path, json.dumps(argv), str(NUM_ROWS), PYTHONPATH=str(REPO))
    assert result.returncode == 0, result.stderr[-2000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert len(told) == 20
    assert sum(one["killed"] for one in told) >= 10  # the others had ended when the signal came
    assert len({one["held"] for one in told}) >= 5  # early and late
    assert all(one["intact"] for one in told)
    for number in range(5):
        folder = tmp_path / f"killed-{number}"
        assert_bit_identical(folder, tmp_path / "whole")
        report = verify_shards(folder)
        assert report.problems == report.notes == []
        assert open_shards(folder).summary == {"asked": NUM_ROWS, "dropped": {}}
