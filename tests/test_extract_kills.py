"""Extractions that are killed, and the same command afterwards: each sample once, bit for bit what an undisturbed run writes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_kit.shard_journal import is_being_written
from dflash_kit.shards import open_shards, verify_shards
from helpers import REPO, make_tiny_target, requires_vllm, run_command, until

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


# vLLM


def start(argv, *, method: str = "fork") -> subprocess.Popen:
    """The command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "extract/dump.py" if method == "spawn" else "tests/forked_vllm.py", *argv],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until_shards(child, folder, count) -> dict[str, bytes]:
    """Wait for so many finished shards; returns them."""
    until(lambda: len(list(folder.glob("*.arrow"))) >= count, child)
    return shards_in(folder)


def shards_in(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.arrow")}


def descendants(pid: int) -> dict[int, str]:
    """Names of a process's children and of theirs, by id."""
    found = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child: Path(f"/proc/{child}/comm").read_text().strip(), **descendants(child)}
    return found


@requires_vllm
@pytest.mark.slow
def test_vllm_whose_driver_all_of_which_and_whose_worker_is_killed_is_finished_by_the_same_command(
    tiny_target, tmp_path
):
    """One request at a time, so that no other row has a part in the order of its sums.

    There are far more prompts than are done when a kill comes; the last runs do a few more than have been. The last one
    of all starts its engine as users do; the others fork theirs off, which saves it from importing everything anew.
    """
    prompts, out = tmp_path / "p.jsonl", tmp_path / "s"
    num_prompts = 5000
    prompts.write_text(
        "".join(json.dumps({"prompt": "why " * (1 + i % 9) + str(i)}) + "\n" for i in range(num_prompts))
    )
    argv = ["--model", str(tiny_target), "--prompts", str(prompts), "--storage", "float32", "--max_num_seqs", "1"]
    argv += ["--target_layer_ids", "[1, 3]", "--sampling.max_new_tokens", "5", "--max_shard_bytes", "1"]

    # The driver alone, whose engine has to notice; then everything at once.
    zeroth = dict[str, bytes]()
    for kill in (os.kill, os.killpg):
        child = start([*argv, "--out", str(out)])
        until_shards(child, out, len(zeroth) + 3)
        kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        until(lambda: not is_being_written(out / "manifest.jsonl"))  # its engine has let the folder go
        child.communicate()
        first = shards_in(out)
        assert len(zeroth) + 3 <= len(first) < num_prompts
        assert all(first[name] == data for name, data in zeroth.items())
        zeroth = first

    child = start([*argv, "--out", str(out)])
    until_shards(child, out, len(first) + 3)
    engine = descendants(child.pid)
    workers = [pid for name in ("VLLM::Worker", "VLLM::EngineCor") for pid in engine if engine[pid] == name]
    os.kill(workers[0], signal.SIGKILL)
    _, stderr = child.communicate(timeout=240)
    told = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert child.returncode == 2
    assert len(told) == 1 and "engine died" in told[0] and "p.jsonl:" in told[0] and "to resume" in told[0], stderr
    second = shards_in(out)
    assert len(first) + 3 <= len(second) < num_prompts
    assert all(second[name] == data for name, data in first.items())

    num_rows = len(second) + 10
    for folder, method in ((out, "fork"), (tmp_path / "whole", "spawn")):
        child = start([*argv, "--out", str(folder), "--limit", str(num_rows), "--verify"], method=method)
        stdout, stderr = child.communicate(timeout=400)
        assert child.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["rows"] == num_rows
    assert open_shards(out).summary == {"asked": num_rows, "dropped": {}}
    last = shards_in(out)
    assert all(last[name] == data for name, data in second.items())
    assert_bit_identical(out, tmp_path / "whole")
    # What is said beside the rows is progress, no remarks of libraries on themselves.
    odd = ("Warning", "NUMA", "safetensors checkpoint shards", "INFO")
    assert not [line for line in stderr.splitlines() if any(word in line for word in odd)], stderr
