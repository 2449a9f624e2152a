"""A real vLLM server on the loopback device, started with the printed command: two clients, one killed, then the server itself."""

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shard_journal import is_being_written
from dflash_kit.shards import open_shards, verify_shards
from extract.cli import main
from extract.server import call
from helpers import REPO, make_tiny_target, requires_vllm, until

pytestmark = [requires_vllm, pytest.mark.slow]

START_S = 400.0
NUM_ROWS = 32
NUM_HELD = 20
"""Requests after which a client is held: the work is not over when it, or its server, is killed."""
SETTINGS = ["--target_layer_ids", "[0,2,4]", "--storage", "float32", "--max_shard_bytes", "1", "--max_num_seqs", "4"]
LONG_ANSWER = ["--sampling.max_new_tokens", "120"]


class Case:
    """A target, prompts, a folder, and a server that was started for them."""

    def __init__(self, folder: Path) -> None:
        self.target = make_tiny_target(folder / "target")
        self.prompts, self.out, self.log = folder / "p.jsonl", folder / "shards", folder / "server.log"
        draw = random.Random(0)
        lines = [{"prompt": f"{i} " + "word " * draw.randint(1, 50)} for i in range(NUM_ROWS - 1)]
        talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of that."}]
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"messages": talk}]))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def arguments(self, *more: str) -> list[str]:
        where = ["--model", str(self.target), "--prompts", str(self.prompts), "--out", str(self.out)]
        return [*where, *SETTINGS, *LONG_ANSWER, *more]

    def start(self) -> None:
        command = [
            sys.executable,
            "extract/dump.py",
            *self.arguments("--print_serve_command", "--prefix_caching", "true"),
        ]
        printed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        words = shlex.split(printed.splitlines()[-1].replace("--port 8000", f"--port {self.port}"))
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        with self.log.open("w") as log:
            self.server = subprocess.Popen(
                words, cwd="/", env=environment, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip

    def wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            assert self.server.poll() is None and time.monotonic() < deadline_s, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def client(self) -> subprocess.Popen:
        argv = self.arguments("--server", self.url)
        command = [sys.executable, "tests/held_extraction.py", str(NUM_HELD), *argv]
        return subprocess.Popen(
            command, cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def wait_for_shards(self, count: int, process: subprocess.Popen) -> None:
        until(lambda: len(list(self.out.glob("*.arrow"))) >= count, process)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    case = Case(tmp_path_factory.mktemp("server"))
    case.start()
    try:
        case.wait()
        yield case
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(case.server.pid, signal.SIGKILL)


def test_other_requests_are_served_and_become_no_rows(case):
    request = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
    for params in ({}, {"sample_id": 3}, {"sample_id": "x"}, {"sample_id": "x", "loss_spans": [[0, 99]]}):
        answer = call(case.url, "/v1/completions", {**request, "kv_transfer_params": params})
        assert answer["usage"]["completion_tokens"] == 2
    assert not case.out.exists()


def test_other_taps_are_refused_with_both_values(case):
    with pytest.raises(KitError, match=r"target_layer_ids is \[0, ?2, ?4\], but here it is \[1, ?3\]"):
        main(case.arguments("--server", case.url, "--target_layer_ids", "[1,3]"))
    assert not case.out.exists()


def test_a_killed_client_leaves_the_server_to_the_next_which_repeats_nothing(case, tmp_path, capsys):
    first = case.client()
    case.wait_for_shards(1, first)
    first.kill()
    first.wait()
    assert main(case.arguments("--server", case.url)) == 0
    printed = capsys.readouterr().out.splitlines()
    last = json.loads(printed[-1])
    assert last["rows"] == NUM_ROWS
    assert NUM_ROWS - NUM_HELD <= last["rows_added"] <= NUM_ROWS - 1
    assert any(line.startswith("parity   2 rows") for line in printed)
    assert verify_shards(case.out).problems == []
    shards = open_shards(case.out)
    assert len(set(shards.ids)) == NUM_ROWS
    assert main(case.arguments("--server", case.url)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows_added"] == 0
    # The same rows as those of transformers.
    other = ["--out", str(tmp_path / "expected"), "--engine", "transformers", "--parity", "0"]
    assert main(case.arguments(*other)) == 0
    expected = {row.input_ids.numpy().tobytes(): row for row in open_shards(tmp_path / "expected")}
    assert len(expected) == NUM_ROWS
    for row in shards:
        want = expected[row.input_ids.numpy().tobytes()]
        assert (row.id, row.next_token) == (want.id, want.next_token)
        assert torch.equal(row.loss_mask, want.loss_mask)
        difference = (row.hidden_states - want.hidden_states).norm(dim=-1) / want.hidden_states.norm(dim=-1)
        assert float(difference.max()) < 1e-4


def test_a_killed_server_is_one_line_and_started_again_it_adds_the_rest(case, capsys):
    """Runs last. The engine notices that its server is gone, and frees the folder."""
    for path in case.out.glob("*"):
        path.unlink()
    client = case.client()
    case.wait_for_shards(2, client)
    os.kill(case.server.pid, signal.SIGKILL)
    _, told = client.communicate(timeout=240)
    assert client.returncode == 2, told
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in told
    assert f"the server at {case.url} does not answer" in errors[0]
    until(lambda: not is_being_written(case.out / "manifest.jsonl"))  # its engine has let the folder go
    assert verify_shards(case.out).problems == []
    kept = {path: path.read_bytes() for path in case.out.glob("*.arrow")}
    assert 2 <= len(kept) <= NUM_HELD
    case.start()
    case.wait()
    assert main(case.arguments("--server", case.url)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows_added"] == NUM_ROWS - len(kept)
    assert len(set(open_shards(case.out).ids)) == NUM_ROWS
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert verify_shards(case.out).problems == []
