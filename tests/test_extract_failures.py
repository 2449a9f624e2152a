"""Samples at which an engine fails: counted and left out if asked for, else the run ends when what is in flight is done."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_shards import make_header

from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards, verify_shards
from extract import hf_capture, vllm_capture
from extract.capture import Job
from extract.cli import main
from extract.failures import MAX_IN_A_ROW
from extract.prefill import prefill_arguments
from extract.prompts import Sample

BAD = 4
"""The token of "%", at which the targets of these tests fail."""


@pytest.fixture
def fragile(monkeypatch):
    """transformers engines whose target fails at a token, as torch does at an index out of range."""
    load = hf_capture.load_target

    def load_fragile(*args, **settings):
        def refuse(module, inputs):
            if (inputs[0] == BAD).any():
                raise RuntimeError("index out of range in self")

        target = load(*args, **settings)
        target.get_input_embeddings().register_forward_pre_hook(refuse)
        return target

    monkeypatch.setattr(hf_capture, "load_target", load_fragile)


def arguments(target, folder, *more: str, bad=(2, 5), count=9) -> list[str]:
    """Prompts, every second with a response; the target fails at the bad ones."""
    lines = []
    for index in range(count):
        messages = [{"role": "user", "content": f"question {index}" + "%" * (index in bad)}]
        if index % 2:
            messages.append({"role": "assistant", "content": "so"})
        lines.append({"messages": messages})
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--model", str(target), "--prompts", str(folder / "p.jsonl"), "--out", str(folder / "s")]
    argv += ["--engine", "transformers", "--target_layer_ids", "[1, 3]", "--sampling.max_new_tokens", "3"]
    return [*argv, "--max_num_seqs", "3", "--parity", "0", *more]


def test_failed_samples_are_left_out_and_counted(fragile, tiny_target, tmp_path, capsys):
    assert main(arguments(tiny_target, tmp_path, "--skip_errors", "--verify")) == 0
    said = capsys.readouterr()
    last = json.loads(said.out.splitlines()[-1])
    assert (last["asked"], last["rows"], last["dropped"]) == (9, 7, {"engine_failed": 2})
    assert "dropped: {'engine_failed': 2}" in said.out
    for line in (3, 6):
        assert f"p.jsonl:{line}: the engine failed at this sample (index out of range in self)" in said.err
    assert open_shards(tmp_path / "s").summary == {"asked": 9, "dropped": {"engine_failed": 2}}
    assert all(BAD not in row.input_ids for row in open_shards(tmp_path / "s"))
    assert verify_shards(tmp_path / "s").ok


def test_the_first_failure_ends_the_run_when_its_batch_is_done(fragile, tiny_target, tmp_path, monkeypatch):
    with pytest.raises(KitError, match=r"p\.jsonl:6: the engine failed .*--skip_errors"):
        main(arguments(tiny_target, tmp_path, bad=(5,)))
    assert len(open_shards(tmp_path / "s")) == 5  # the batch before, what was left of its own, and no further one
    assert verify_shards(tmp_path / "s").problems == verify_shards(tmp_path / "s").notes == []
    monkeypatch.undo()  # the cause is mended
    assert main(arguments(tiny_target, tmp_path, bad=(5,))) == 0
    assert len(open_shards(tmp_path / "s")) == 9


def test_an_engine_that_fails_at_everything_is_no_fault_of_the_samples(fragile, tiny_target, tmp_path):
    few = MAX_IN_A_ROW - 1
    with pytest.raises(KitError, match=f"the engine failed at all {few} samples"):
        main(arguments(tiny_target, tmp_path, "--skip_errors", bad=range(few), count=few))
    with pytest.raises(KitError, match=f"as at the {few} before it"):
        main(arguments(tiny_target, tmp_path, "--skip_errors", bad=range(20), count=20))


# vLLM's driver, before an engine that answers as vLLM's does


class Engine:
    """Takes requests, ends two a step, and has a writer; ``refused`` are not taken, ``ended`` end with an error."""

    def __init__(self, refused=(), ended=(), dies_at=None):
        self.refused, self.ended, self.dies_at = refused, ended, dies_at
        self.running, self.accepted, self.num_taken = [], [], 0

    def add_request(self, request_id, prompt, params):
        if request_id in self.refused:
            raise ValueError("the prompt is too long")
        self.running.append(request_id)
        self.num_taken += 1

    output_processor = SimpleNamespace(request_states={})

    def get_num_unfinished_requests(self):
        return len(self.running)

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        if self.dies_at in self.running:
            raise RuntimeError("EngineCore died")
        ended, self.running = self.running[:2], self.running[2:]
        self.accepted += [(row_id, 5) for row_id in ended if row_id not in self.ended]
        reasons = [(row_id, "error" if row_id in self.ended else "stop") for row_id in ended]
        return [
            SimpleNamespace(request_id=i, finished=True, outputs=[SimpleNamespace(token_ids=[1], finish_reason=reason)])
            for i, reason in reasons
        ]

    def collective_rpc(self, name, args=()):
        accepted, self.accepted = self.accepted, []
        return [None, {"accepted": accepted, "error": None, "bytes": 10}]


def drive(engine, monkeypatch, *, skip: bool, count=20, given=True):
    """Run the driver; returns it and the sums of what it reported."""
    monkeypatch.setattr(vllm_capture._Run, "_params", lambda self, sample: None)
    job = Job(
        spec=None,
        header=make_header(),
        folder=Path(),
        max_shard_bytes=1,
        max_num_seqs=1,
        longest_tokens=9,
        skip_errors=skip,
    )
    samples = [
        Sample(id=f"row{i}", source=f"p:{i}", token_ids=[1], loss_spans=[(0, 1)] if given else None, max_new_tokens=3)
        for i in range(count)
    ]
    run = vllm_capture._Run(engine, job, samples)
    reports = list(run.run())
    return run, sum(report.num_rows for report in reports), sum(report.num_failed for report in reports), reports


def test_vllm_samples_that_are_refused_or_end_in_an_error_are_counted(monkeypatch, capsys):
    run, num_rows, num_failed, _ = drive(Engine(refused={"row3"}, ended={"row9", "row12"}), monkeypatch, skip=True)
    rest = run.finish({})
    assert (num_rows + rest.num_rows, num_failed + rest.num_failed) == (17, 3)
    assert run.failures.settle({"asked": 20, "dropped": {"duplicate": 1}}) == {
        "asked": 20,
        "dropped": {"duplicate": 1, "engine_failed": 3},
    }
    assert "p:3: the engine failed at this sample (the prompt is too long)" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["refused", "ended"])
def test_vllm_finishes_what_is_in_flight_and_takes_no_more(monkeypatch, fault):
    engine = Engine(**{fault: {"row5"}})
    run, num_rows, *_ = drive(engine, monkeypatch, skip=False)
    assert not engine.running
    assert num_rows + run.finish({}).num_rows == engine.num_taken - (fault == "ended") < 19
    with pytest.raises(KitError, match="p:5: the engine failed"):
        run.failures.settle({"dropped": {}})


class Speaker(Engine):
    """Says a token of every request a step, and ends those of three."""

    def __init__(self):
        super().__init__()
        self.output_processor = SimpleNamespace(request_states={})

    def step(self):
        states = self.output_processor.request_states
        for request_id in self.running:
            count = states[request_id].detokenizer.num_output_tokens() + 1 if request_id in states else 1
            states[request_id] = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda n=count: n))
        ended = [i for i, state in states.items() if state.detokenizer.num_output_tokens() == 3]
        self.accepted += [(i, 5) for i in ended]
        for i in ended:
            del states[i]
            self.running.remove(i)
        token_ids = [1, 2, 3]
        said = [SimpleNamespace(token_ids=token_ids, finish_reason="length")]
        return [SimpleNamespace(request_id=i, finished=True, outputs=said) for i in ended]


def test_tokens_of_unfinished_answers_are_reported_once(monkeypatch):
    monkeypatch.setattr(vllm_capture, "STATUS_EVERY_S", 0.0)  # a report after every step
    run, _, _, reports = drive(Speaker(), monkeypatch, skip=False, count=6, given=False)
    # Four requests at a time speak, and then the two that waited.
    assert [report.num_said for report in [*reports, run.finish({})] if report.num_said] == [4, 4, 4, 2, 2, 2]


def test_an_engine_that_dies_names_what_it_worked_on(monkeypatch):
    with pytest.raises(KitError, match=r"EngineCore died.* worked on 4 samples \(p:6, p:7, p:8, …\).*to resume"):
        drive(Engine(dies_at="row9"), monkeypatch, skip=True)


def test_sampled_prompts_are_prefilled_whole_on_a_cpu_unless_the_user_decides():
    sampled = make_header(sampling={**make_header().sampling, "temperature": 0.7})
    job = Job(spec=None, header=sampled, folder=Path(), max_shard_bytes=1, max_num_seqs=1, longest_tokens=99)
    whole = {"enable_chunked_prefill": False}
    assert prefill_arguments(job, on_cpu=True) == whole
    assert prefill_arguments(replace(job, max_num_batched_tokens=100), on_cpu=True) == whole
    with pytest.raises(
        KitError, match=r"max_num_batched_tokens is 99, .* may have 100 tokens; raise it, or leave it out"
    ):
        prefill_arguments(replace(job, max_num_batched_tokens=99), on_cpu=True)
    decided = {"max_num_batched_tokens": 99, "engine_args": {"enable_chunked_prefill": True}}
    assert prefill_arguments(replace(job, **decided), on_cpu=True) == {}
    assert prefill_arguments(replace(job, max_num_batched_tokens=99), on_cpu=False) == {}
    greedy = replace(sampled, sampling={**sampled.sampling, "temperature": 0.0})
    assert prefill_arguments(replace(job, header=greedy, max_num_batched_tokens=9), on_cpu=True) == {}


def test_a_temperature_that_vllm_does_not_take_is_refused_before_it_starts():
    hot = make_header(sampling={**make_header().sampling, "temperature": 2.5})
    job = Job(spec=None, header=hot, folder=Path(), max_shard_bytes=1, max_num_seqs=1, longest_tokens=99)
    with pytest.raises(KitError, match=r"temperature is 2\.5; vLLM samples at 2\.0 at most: .*--engine transformers"):
        vllm_capture.start_engine(job, [])


# Draws


def test_answers_are_drawn_from_the_truncated_distribution_row_by_row():
    sampling = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "seed": 3}
    job = SimpleNamespace(header=SimpleNamespace(sampling=sampling))
    logits = torch.tensor([1.0, 0.2, -0.5, 0.8, -3.0, 0.5])
    samples = [SimpleNamespace(id=f"{i:032x}") for i in range(3)]
    draws = hf_capture._Draws(job, samples, torch.device("cpu"))
    said_TB = torch.stack([draws(None, logits.expand(3, -1)).argmax(-1) for _ in range(1000)])
    wanted = torch.softmax(logits / 0.7, 0)
    wanted[[2, 4]] = 0.0  # not among the four likeliest
    wanted /= wanted.sum()
    assert wanted.sort(descending=True).values[:3].sum() < 0.9  # so that top_p keeps all four
    for row in range(3):
        counts = torch.bincount(said_TB[:, row], minlength=6) / 1000
        assert (counts - wanted).abs().max() < 4 * 0.5 / 1000**0.5
    alone = hf_capture._Draws(job, samples[1:2], torch.device("cpu"))
    assert [int(alone(None, logits[None]).argmax()) for _ in range(50)] == said_TB[:50, 1].tolist()


def test_vllm_is_told_how_to_answer_and_a_seed_for_each_sample():
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "seed": 3}
    spec = SimpleNamespace(eos_token_ids=(2, 5))
    job = SimpleNamespace(spec=spec, header=SimpleNamespace(sampling=sampling))
    asked = [Sample(id=f"{i:x}" * 16, source="", token_ids=[1], loss_spans=None, max_new_tokens=30) for i in (1, 2)]
    one, two = (vllm_capture.sampling_arguments(job, sample) for sample in asked)
    assert (one["temperature"], one["top_p"], one["top_k"], one["max_tokens"]) == (0.7, 0.9, 4, 30)
    assert one["stop_token_ids"] == [2, 5] and one["ignore_eos"]  # the target's end tokens, no others
    assert one["seed"] != two["seed"] and one == {**two, "seed": one["seed"]}
    assert vllm_capture.sampling_arguments(job, asked[0]) == one
    other = SimpleNamespace(spec=spec, header=SimpleNamespace(sampling=sampling | {"seed": 4}))
    assert vllm_capture.sampling_arguments(other, asked[0])["seed"] != one["seed"]
    given = vllm_capture.sampling_arguments(job, replace(asked[0], loss_spans=[(0, 1)], max_new_tokens=0))
    assert (given["temperature"], given["max_tokens"], given["seed"]) == (0.0, 1, None)
