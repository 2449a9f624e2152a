"""Extraction by several processes: shares of one prompts file, and the launcher that starts, merges and ends them."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shard_share import Share
from dflash_kit.shards import open_shards, verify_shards
from extract import launcher
from extract.cli import main
from extract.places import Place
from helpers import REPO, until


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Twelve prompts, one of them twice, and one that is too long."""
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    texts = ["question " * (1 + 3 * i % 7) + str(i) for i in range(12)]
    texts[6:6] = [texts[2], "x" * 600]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def arguments(target, prompts, out, *more: str) -> list[str]:
    return [
        *("--model", str(target), "--prompts", str(prompts), "--out", str(out), "--engine", "transformers"),
        *("--target_layer_ids", "[1, 3]", "--sampling.max_new_tokens", "6", "--max_num_seqs", "4", "--skip_long"),
        *more,
    ]


def extract(capsys, *argv) -> dict:
    assert main(list(argv)) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def rows(folder) -> dict[str, list[int]]:
    found = {row.id: row.token_ids().tolist() for row in open_shards(folder)}
    assert len(found) == len(open_shards(folder))
    return found


# Shares


@pytest.mark.parametrize("limit", [None, 5])
def test_ranks_write_together_what_one_process_writes(tiny_target, prompts, tmp_path, capsys, limit):
    more = [] if limit is None else ["--limit", str(limit)]
    alone = extract(capsys, *arguments(tiny_target, prompts, tmp_path / "one", *more))
    told = [
        extract(capsys, *arguments(tiny_target, prompts, tmp_path / "s", "--world_size=3", f"--rank={rank}", *more))
        for rank in (2, 0, 1)
    ]
    assert rows(tmp_path / "s") == rows(tmp_path / "one")
    for name in ("asked", "rows", "rows_added"):
        assert sum(one[name] for one in told) == alone[name]
    assert alone["rows"] == (limit or 12)
    if limit is None:
        dropped = [(reason, count) for one in told for reason, count in one["dropped"].items()]
        assert sorted(dropped) == [("duplicate", 1), ("too_long", 1)]
        assert open_shards(tmp_path / "s").summary["asked"] == 14
    again = extract(capsys, *arguments(tiny_target, prompts, tmp_path / "s", *more))
    assert (again["rows"], again["rows_added"]) == (limit or 12, 0)
    assert verify_shards(tmp_path / "s").notes == verify_shards(tmp_path / "s").problems == []


def test_ranks_count_every_line_once_whatever_becomes_of_it(tiny_target, prompts, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    broken = ["not JSON", json.dumps({"text": 7}), json.dumps({"messages": [{"role": "nobody", "content": "x"}]})]
    path.write_text(prompts.read_text() + "\n".join(broken) + "\n" + json.dumps({"text": "plain text"}) + "\n")
    more = ["--skip_errors", "--min_tokens=50", "--num_samples=3", "--sampling.temperature=1.0"]
    alone = extract(capsys, *arguments(tiny_target, path, tmp_path / "one", *more))
    told = [
        extract(capsys, *arguments(tiny_target, path, tmp_path / "s", "--world_size=3", f"--rank={rank}", *more))
        for rank in range(3)
    ]
    assert rows(tmp_path / "s").keys() == rows(tmp_path / "one").keys()
    for name in ("asked", "rows"):
        assert sum(one[name] for one in told) == alone[name] > 0
    summed = Counter()
    for one in told:
        summed.update(one["dropped"])
    assert summed == alone["dropped"]
    assert alone["dropped"].keys() == {"duplicate", "too_long", "under_min_tokens", "malformed"}


def test_another_split_and_then_one_process_finish_what_was_begun(tiny_target, prompts, tmp_path, capsys):
    first = extract(capsys, *arguments(tiny_target, prompts, tmp_path, "--world_size=2", "--rank=1"))
    assert 0 < first["rows"] < 12
    second = extract(capsys, *arguments(tiny_target, prompts, tmp_path, "--world_size=3", "--rank=0"))
    last = extract(capsys, *arguments(tiny_target, prompts, tmp_path, "--verify"))
    assert first["rows"] + second["rows_added"] + last["rows_added"] == last["rows"] == 12
    assert len(rows(tmp_path)) == 12


def test_a_rank_without_samples_is_done_at_once(tiny_target, prompts, tmp_path, capsys):
    told = [
        extract(capsys, *arguments(tiny_target, prompts, tmp_path, "--limit=1", "--world_size=4", f"--rank={rank}"))
        for rank in range(4)
    ]
    assert sorted(one["rows_added"] for one in told) == [0, 0, 0, 1]
    assert len(open_shards(tmp_path)) == 1


def test_a_dry_run_of_several_processes_counts_their_samples(tiny_target, prompts, tmp_path, capsys):
    whole = extract(capsys, *arguments(tiny_target, prompts, tmp_path / "s", "--num_workers=3", "--dry_run"))
    assert (whole["asked"], whole["to_do"]) == (14, 12)
    argv = arguments(tiny_target, prompts, tmp_path / "s", "--num_workers=2", "--world_size=4", "--dry_run")
    halves = [extract(capsys, *argv, f"--rank={rank}") for rank in (0, 2)]
    assert sum(half["to_do"] for half in halves) == 12
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--rank=2", "--world_size=2"], r"rank is 2; .* 0\.\.1"),
        (["--rank=-1", "--world_size=2"], r"rank is -1; .* 0\.\.1"),
        (["--rank=1"], r"world_size of 1 .* 0\.\.0"),
        (["--world_size=0"], r"world_size is 0; allowed: 1\.\.100000"),
        (["--num_workers=0"], "num_workers is 0"),
        (["--num_workers=4", "--world_size=2"], "world_size 2 is less than num_workers 4"),
        (["--num_workers=4", "--world_size=8", "--rank=5"], r"rank 5 is outside of 0\.\.4"),
    ],
)
def test_ranks_outside_of_the_world_are_refused(tmp_path, more, said):
    with pytest.raises(KitError, match=said):
        main(arguments(tmp_path, tmp_path, tmp_path, *more))


# The launcher with processes that only pretend to work

PRETEND = """
import json, os, select, signal, sys, time
rank, what = int(sys.argv[1]), sys.argv[2]
tell = lambda event, **values: print(json.dumps(dict(values, event=event)), flush=True)
def stop(*_):
    tell("progress", rows=2, tokens=20, bytes=200)
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)
def wait_for_the_end():
    if not select.select([0], [], [], 240)[0]:
        sys.exit(3)
    stop()
tell("plan", to_do=3, max_bytes=10**18 if what == "huge" else 1000, dropped={"too_long": rank})
tell("progress", rows=1, tokens=10, bytes=100)
print("a remark on stdout"); print("a remark on stderr", file=sys.stderr, flush=True)
if what in ("wait", "huge"):
    wait_for_the_end()
elif what == "fail":
    print("error: sample 7 is broken", file=sys.stderr)
    sys.exit(2)
elif what == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "hang":
    time.sleep(600)
tell("progress", rows=3, tokens=30, bytes=300)
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
tell("done", result=dict(asked=3, rows=3, rows_added=3, dropped={"too_long": rank}))
print(f"gpus {gpus}, cores {sorted(os.sched_getaffinity(0))}", file=sys.stderr)
"""


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Launch processes of which each does what its name says."""

    def launch(*names, **more):
        monkeypatch.setattr(
            launcher,
            "worker_command",
            lambda share, _: [sys.executable, "-c", PRETEND, str(share.rank), names[share.rank]],
        )
        shares = [Share(rank, len(names)) for rank in range(len(names))]
        return launcher.launch(shares, [], Place(tmp_path, shares[0]), **{"gpus_each": 1, **more})

    return launch


def test_totals_add_up_and_remarks_carry_the_rank(pretend, capsys):
    totals = pretend("work", "work", "work")
    assert {name: totals[name] for name in ("asked", "rows", "rows_added", "tokens_added", "bytes", "workers")} == {
        "asked": 9, "rows": 9, "rows_added": 9, "tokens_added": 90, "bytes": 900, "workers": 3,
    }  # fmt: skip
    assert totals["dropped"] == {"too_long": 3}
    assert "errors" not in totals
    said = capsys.readouterr().err
    for rank in range(3):
        assert f"[rank {rank}] a remark on stdout" in said
        assert f"[rank {rank}] a remark on stderr" in said


def test_each_process_has_gpus_of_its_own(pretend, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend("work", "work", gpus_each=2)
    said = capsys.readouterr().err
    assert "[rank 0] gpus 0,1," in said
    assert "[rank 1] gpus 2,3," in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3,5")
    assert launcher.gpu_groups(3, 1) == ["6", "3", "5"]
    assert launcher.gpu_groups(1, 2) == ["6,3"]
    words = "num_workers 2 with 2 GPUs each .* need 4; 3 are visible here: allowed are up to 1 workers"
    with pytest.raises(KitError, match=words):
        launcher.gpu_groups(2, 2)


def test_processes_that_share_a_gpu_follow_each_other_and_have_cores_of_their_own(pretend, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3,5")
    assert launcher.gpu_groups(9, 1, 3) == ["6"] * 3 + ["3"] * 3 + ["5"] * 3
    assert launcher.gpu_groups(5, 1, 4) == ["6"] * 4 + ["3"]
    words = (
        r"num_workers 7 with 1 GPU for 2 of them \(workers_per_gpu\) need 4; 3 are visible here: allowed are up to 6"
    )
    with pytest.raises(KitError, match=words):
        launcher.gpu_groups(7, 1, 2)
    cores = sorted(os.sched_getaffinity(0))
    pretend("work", "work", "work", workers_per_gpu=2)
    said = capsys.readouterr().err
    expected = launcher.core_slices(3)
    for rank, gpu in enumerate(("6", "6", "3")):
        assert f"[rank {rank}] gpus {gpu}, cores {expected[rank]}" in said
    pretend("work", "work")
    assert capsys.readouterr().err.count(f"cores {cores}") == 2


def test_without_gpus_each_process_has_cores_of_its_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 8, 9})
    assert launcher.core_slices(2) == [[3, 4], [5, 8, 9]]
    assert launcher.core_slices(7) == [[3], [4], [5], [8], [9], [3], [4]]


@pytest.mark.parametrize(("name", "error"), [("fail", "sample 7 is broken"), ("crash", "it ended with status -11")])
def test_when_one_fails_the_others_finish_their_shards_and_end(pretend, killed, name, error):
    totals = pretend("wait", name, "wait")
    assert killed == []  # they end of their own
    assert list(totals["errors"]) == ["1"]
    assert totals["errors"]["1"].startswith(error)
    assert (totals["rows_added"], totals["tokens_added"]) == (5, 50)  # with what the others told while they ended


def test_an_error_of_several_ranks_is_said_once(pretend, monkeypatch):
    monkeypatch.setattr(launcher.Worker, "stop", lambda self: None)  # all fail before they are asked to end
    assert pretend("fail", "fail", "fail")["errors"] == {"0, 1, 2": "sample 7 is broken"}


def test_too_little_disk_for_all_together_ends_them(pretend):
    with pytest.raises(KitError, match="needs .* bytes .* are free"):
        pretend("wait", "huge")


@pytest.fixture
def killed(monkeypatch):
    """Processes that the launcher kills."""
    real, found = launcher.Worker.kill, []
    monkeypatch.setattr(launcher.Worker, "kill", lambda worker: (found.append(worker), real(worker)))
    return found


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C as soon as a process has said something: raised where a signal would be, without one that could hit others."""
    shown, said = launcher.ExtractionProgress.note, []

    def note(progress, text):
        shown(progress, text)
        said.append(text)
        if len(said) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(launcher.ExtractionProgress, "note", note)


def test_an_interrupted_launcher_ends_its_processes_in_order(pretend, interrupted, capsys):
    with pytest.raises(KeyboardInterrupt):
        pretend("wait", "wait")
    assert "2 processes finish their shards" in capsys.readouterr().err


def test_a_process_that_does_not_end_is_killed(pretend, interrupted, killed, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    with pytest.raises(KeyboardInterrupt):
        pretend("hang", "wait")
    (hanging,) = [worker for worker in killed if worker.share.rank == 0]
    assert hanging.process.wait(timeout=240) == -signal.SIGKILL


# Real processes


@pytest.mark.slow
def test_two_processes_are_ended_in_order_and_the_same_command_finishes_the_job(tiny_target, prompts, tmp_path, capsys):
    out = tmp_path / "s"
    argv = arguments(tiny_target, prompts, out, "--max_num_seqs=1")
    marks = tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, "tests/held_extraction.py", "3", *argv, "--num_workers=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HELD_MARKS": str(marks)}
    with subprocess.Popen(
        command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            until(lambda: len(list(marks.iterdir())) == 2, child)
            assert not list(out.glob("*.arrow"))  # all rows are in shards that grow
            child.terminate()
            stdout, stderr = child.communicate(timeout=240)
        finally:
            child.kill()
    assert child.returncode == 130, (stdout, stderr)
    report = verify_shards(out)
    assert (report.problems, report.notes) == ([], [])
    assert report.rows == 2 * 3
    last = extract(capsys, *argv, "--num_workers=2", "--verify")
    assert (last["rows"], last["rows_added"], last["workers"]) == (12, 12 - report.rows, 2)
    assert (last["asked"], last["dropped"]) == (14, {"duplicate": 1, "too_long": 1})
    assert "num_workers: 2" in (out / "extract.yaml").read_text()
    extract(capsys, *arguments(tiny_target, prompts, tmp_path / "one"))
    assert rows(out) == rows(tmp_path / "one")


@pytest.mark.slow
def test_a_broken_line_is_one_error_that_names_the_ranks(tiny_target, prompts, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(prompts.read_text() + "not JSON\n")
    with pytest.raises(KitError, match=r"^rank (0|1|0, 1): .*p\.jsonl:15: not JSON[^;]*; each line[^;]*$"):
        main(arguments(tiny_target, path, tmp_path / "s", "--num_workers=2"))
    assert "errors" in json.loads(capsys.readouterr().out.splitlines()[-1])
