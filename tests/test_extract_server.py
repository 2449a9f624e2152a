"""The client of a running server, against one that speaks our protocol, writes real shards, and fails as asked."""

import hashlib
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import Row, ShardsHeader, ShardWriter, open_shards
from dflash_kit.target import TargetSpec
from dflash_kit.vllm_environment import cpu_environment
from extract import server_capture
from extract.cli import main
from extract.server import Server
from helpers import requires_vllm

SAMPLING = {
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 6, "seed": 0,
    "template_args": {"enable_thinking": False},
}  # fmt: skip


class FakeServer(ThreadingHTTPServer):
    """States are random; ``fault`` says what goes wrong once ``fault_after`` requests were answered."""

    def __init__(self, header, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.header, self.folder = header, folder
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.fault, self.fault_after = None, 0
        self.asked, self.accepted, self.keys = [], [], set()
        self.writer, self.session, self.lock = None, 0, threading.Lock()

    def answer(self, path, body):
        with self.lock:
            return {
                "/v1/shards": self.describe,
                "/v1/shards/open": self.open_session,
                "/v1/shards/status": self.status,
                "/v1/shards/finish": self.finish,
                "/v1/completions": self.complete,
            }[path](body)

    def describe(self, _):
        return {"header": self.header.to_dict(), "folder": str(self.folder), "rank": 0, "world_size": 1}

    def open_session(self, _):
        self.session += 1
        self.writer = self.writer or ShardWriter(self.folder, self.header, max_shard_bytes=1)
        manifest = (self.folder / "manifest.jsonl").read_bytes()
        found = {"manifest_bytes": len(manifest), "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
        return {"error": None, "session": self.session, "notes": [], **found}

    def status(self, body):
        accepted, self.accepted = self.accepted, []
        error = None if body["session"] == self.session else "another client has begun"
        if self.fault == "full" and len(self.asked) > self.fault_after:
            error = "cannot write: No space left on device"
        return {"accepted": accepted, "error": error, "bytes": self.writer.num_bytes, "pending_bytes": 0}

    def finish(self, body):
        if self.writer is not None:
            if body["summary"] is not None:
                self.writer.write_summary(body["summary"])
            self.writer.close()
            self.writer = None
        return {"accepted": [], "error": None, "bytes": 0, "pending_bytes": 0}

    def complete(self, body):
        params = body["kv_transfer_params"]
        self.asked.append(params["sample_id"])
        if self.fault in ("gone", 400, 500) and len(self.asked) > self.fault_after:
            return self.fault
        said = [7] * body["max_tokens"] if params.get("include_output_tokens") else []
        ids = body["prompt"] + said[:-1]
        mask = torch.arange(len(ids)) >= len(body["prompt"])
        for start, end in params.get("loss_spans", []):
            mask[start:end] = True
        states = torch.randn(len(ids), self.header.row_width)
        row = Row(
            id=params["sample_id"], input_ids=torch.tensor(ids, dtype=torch.int32), loss_mask=mask, hidden_states=states,
            next_token=said[-1] if said else -1,
        )  # fmt: skip
        if self.writer is not None and row.id not in self.writer.done_ids:  # an ended client's requests may come late
            self.writer.add(row)
        if self.fault != "silent":
            self.accepted.append((row.id, len(ids)))
        return {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": body["max_tokens"]}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        self.server.keys.add(self.headers.get("Authorization"))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        answer = self.server.answer(self.path, body) if self.server.header is not None else 404
        if answer == "gone":
            self.close_connection = True
            return
        text = json.dumps(answer if isinstance(answer, dict) else {"error": {"message": "that is too long"}}).encode()
        self.send_response(200 if isinstance(answer, dict) else answer)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of that."}]
    lines = [{"prompt": f"question {index}"} for index in range(8)] + [{"messages": talk}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def server(tiny_target, tmp_path):
    spec = TargetSpec.from_pretrained(tiny_target)
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=[0, 2, 4],
        compute_dtype="float32",
        engine="vllm",
        engine_version="0.99",
        sampling=SAMPLING,
    )
    with FakeServer(header, tmp_path / "shards") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def arguments(target, prompts, server, *more):
    return [
        *("--model", str(target), "--prompts", str(prompts), "--out", str(server.folder), "--server", server.url),
        *("--target_layer_ids", "[0,2,4]", "--sampling.max_new_tokens", "6", "--max_num_seqs", "1", "--parity", "0"),
        *more,
    ]


def test_rows_of_a_server_are_complete_and_not_asked_for_again(tiny_target, prompts, server, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    assert main(arguments(tiny_target, prompts, server, "--limit", "5")) == 0
    assert len(server.asked) == 5
    assert main(arguments(tiny_target, prompts, server, "--verify")) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["rows"], last["rows_added"]) == (9, 4)
    assert len(server.asked) == len(set(server.asked)) == 9
    shards = open_shards(server.folder)
    assert sorted(shards.ids) == sorted(server.asked)
    assert shards.header == server.header
    assert shards.summary == {"asked": 9, "dropped": {}}
    assert sorted(len(row.token_ids()[row.token_mask()]) for row in shards) == sorted([6] * 8 + [17])
    assert server.writer is None  # the folder is free
    assert server.keys == {"Bearer key"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gone", r"does not answer \(.*\); finished shards are intact"),
        (500, r"has failed \(that is too long\); finished shards are intact"),
        (400, r"p\.jsonl:\d: the server .* refuses /v1/completions: that is too long"),
        ("full", "the server says: cannot write: No space left"),
    ],
)
def test_a_server_that_fails_is_one_line_and_the_same_command_resumes(tiny_target, prompts, server, fault, words):
    server.fault, server.fault_after = fault, 4
    with pytest.raises(KitError, match=words):
        main(arguments(tiny_target, prompts, server))
    for thread in threading.enumerate():  # the run is over, its process is not
        if thread.name == "server-requests":
            thread.join()
    server.finish({"summary": None})  # as if it was started anew
    kept = {path: path.read_bytes() for path in server.folder.glob("*.arrow")}
    assert len(kept) >= 4
    server.fault, server.asked, server.accepted = None, [], []
    assert main(arguments(tiny_target, prompts, server)) == 0
    assert len(server.asked) == 9 - len(kept)
    assert len(set(open_shards(server.folder).ids)) == 9
    assert all(path.read_bytes() == data for path, data in kept.items())


def test_a_server_of_other_shards_is_refused_with_both_values(tiny_target, prompts, server, tmp_path):
    for more, words in (
        (["--target_layer_ids", "[1,2]"], r"target_layer_ids is \[0, ?2, ?4\], but here it is \[1, ?2\]"),
        (["--sampling.seed", "3"], r"sampling is .*\"seed\": 0.*, but here it is .*\"seed\": 3"),
        (["--dtype", "bfloat16"], 'compute_dtype is "float32", but here it is "bfloat16"'),
        (["--world_size", "2"], "rank of world_size is 0 of 1, but here it is 0 of 2"),
        (["--num_workers", "2"], "does not go with num_workers above 1"),
        (["--engine", "transformers"], "server http.* does not go with engine transformers"),
        (
            ["--engine", "transformers", "--server=null", "--print_serve_command"],
            "print_serve_command does not go with",
        ),
    ):
        with pytest.raises(KitError, match=words):
            main(arguments(tiny_target, prompts, server, *more))
    assert not server.folder.exists()


def test_another_folder_and_other_servers_are_refused(tiny_target, prompts, server, tmp_path, monkeypatch):
    monkeypatch.setattr("extract.server.FOLDER_WAIT_S", 0.3)
    elsewhere = ["--out", str(tmp_path / "elsewhere")]
    with pytest.raises(KitError, match=r"writes into .*/shards of its host, but .*/elsewhere here is another folder"):
        main(arguments(tiny_target, prompts, server, *elsewhere))
    assert server.writer is None
    server.header = None
    with pytest.raises(KitError, match="started without our connector"):
        main(arguments(tiny_target, prompts, server))
    server.shutdown()
    server.server_close()
    with pytest.raises(KitError, match="does not answer"):
        main(arguments(tiny_target, prompts, server))
    with pytest.raises(KitError, match="allowed: http://host:port"):
        main(arguments(tiny_target, prompts, server, "--server", "127.0.0.1:8000"))


def test_states_that_never_come_end_the_run(tiny_target, prompts, server, monkeypatch):
    monkeypatch.setattr(server_capture, "STALL_S", 0.3)
    server.fault = "silent"
    with pytest.raises(KitError, match=r"no states arrived for 9 samples"):
        main(arguments(tiny_target, prompts, server))


def test_a_client_that_was_overtaken_ends(server):
    first, _ = Server.connect(server.url).open(server.folder)
    second, _ = Server.connect(server.url).open(server.folder)
    assert first.status()["error"] == "another client has begun"
    assert second.status()["error"] is None


@requires_vllm
def test_the_printed_command_is_that_of_the_command_line(tiny_target, prompts, tmp_path, capsys):
    """What it does is tested with a real server; here, that each setting reaches it."""
    common = ["--model", str(tiny_target), "--prompts", str(prompts), "--out", str(tmp_path / "out with spaces")]
    settings = [
        *(
            "--target_layer_ids",
            "[0,2]",
            "--prefix_caching",
            "true",
            "--tensor_parallel_size",
            "2",
            "--max_num_seqs",
            "7",
        ),
        *("--world_size", "4", "--rank", "3", "--engine_args.max_model_len", "300", "--sampling.seed", "5"),
    ]
    assert main([*common, *settings, "--print_serve_command"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert "--no-enable-chunked-prefill" not in words
    assert words[0] == "env" and "VLLM_USE_V2_MODEL_RUNNER=0" in words[: words.index("--host")]
    value = {name: words[i + 1] for i, name in enumerate(words[:-1]) if name.startswith("--")}
    assert (value["--host"], value["--tensor-parallel-size"], value["--max-model-len"]) == ("127.0.0.1", "2", "300")
    assert (value["--max-num-seqs"], "--enable-prefix-caching" in words) == ("7", True)
    method = json.loads(value["--speculative-config"])["draft_model_config"]["hf_config"]
    assert method["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    extra = json.loads(value["--kv-transfer-config"])["kv_connector_extra_config"]
    assert extra["folder"] == str(tmp_path / "out with spaces")
    assert (extra["writer"]["rank"], extra["writer"]["world_size"]) == (3, 4)
    assert extra["header"]["sampling"]["seed"] == 5
    assert not (tmp_path / "out with spaces").exists()
    assert main([*common, *settings, "--sampling.temperature", "1", "--print_serve_command"]) == 0
    assert "--no-enable-chunked-prefill" in capsys.readouterr().out
    for more, words in (
        (["--engine_args.max_modl_len", "300"], "no argument 'max_modl_len'; did you mean max_model_len"),
        (["--engine_args.dtype", "half"], r"engine_args\.dtype is set by extraction itself"),
        (
            ["--tensor_parallel_size", "3"],
            r"3 does not divide the target's 4 attention heads \(2 .*\); allowed: 1, 2, 4",
        ),
    ):
        with pytest.raises(KitError, match=words):
            main([*common, "--target_layer_ids", "[0,2]", *more, "--print_serve_command"])


@requires_vllm
def test_a_rank_on_a_cpu_gets_cores_of_its_own(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 5, 7})
    one, two = (cpu_environment(count)["VLLM_CPU_OMP_THREADS_BIND"] for count in (1, 2))
    assert (one, two) == ("2,3,5,7", "2,3|5,7")
