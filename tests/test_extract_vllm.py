"""Extraction by a real vLLM engine from real weights: one engine for all tests."""

import os
import random
from dataclasses import replace

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader, open_shards, verify_shards
from dflash_kit.target import TargetSpec, load_target, load_tokenizer, tap_layer_ids
from dflash_kit.vllm_calls import stop
from dflash_kit.vllm_environment import prepare_environment
from extract import vllm_capture
from extract.capture import Job
from extract.conversations import Conversation
from extract.plan import make_plan
from helpers import requires_vllm

pytestmark = [requires_vllm, pytest.mark.slow]

SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 9, "seed": 0, "template_args": {}}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "counted",
    "seven",
    "green",
    "apples",
    "before",
    "noon",
    "while",
    "it",
    "rained",
    "in",
    "Paris",
]


def make_conversations() -> list[Conversation]:
    """Forty conversations of very different lengths; every third has a response, and so finishes at once."""
    draw = random.Random(0)
    conversations = []
    for index in range(40):
        text = f"{index}: " + " ".join(draw.choices(WORDS, k=draw.choice([3, 10, 30, 80])))
        messages = [{"role": "user", "content": text}]
        if index % 3 == 2:
            messages.append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=9))})
        conversations.append(Conversation(source=f"p:{index + 1}", messages=messages))
    return conversations


@pytest.fixture(scope="module")
def environment():
    """What the capture sets for vLLM's processes must not reach the other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def capture(smollm2, environment, tmp_path_factory):
    """Forty samples in batches of eight, four again one by one, four beside samples that the engine refuses, and one that
    the writer refuses; one engine."""
    spec, tokenizer = TargetSpec.from_pretrained(smollm2), load_tokenizer(smollm2)
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=tap_layer_ids(spec.num_layers, 5),
        compute_dtype="float32",
        dtype="float32",
        engine="vllm",
        engine_version=vllm_capture.engine_version(),
        sampling=SAMPLING,
    )
    plan = make_plan(
        make_conversations(),
        tokenizer,
        spec,
        header,
        set(),
        generate=None,
        template_args={},
    )
    job = Job(
        spec=spec,
        header=header,
        folder=tmp_path_factory.mktemp("vllm") / "shards",
        max_shard_bytes=4 << 20,
        max_num_seqs=8,
        longest_tokens=plan.longest_tokens,
        max_num_batched_tokens=64,  # long prompts are prefilled in chunks
    )
    prepare_environment()
    engine = vllm_capture.start_engine(job, plan.samples)
    try:
        reports = list(vllm_capture._Run(engine, job, plan.samples).run())
        for sample in plan.samples[:4]:
            list(vllm_capture._Run(engine, job, [replace(sample, id="single-" + sample.id)]).run())
        refused = {skip: run_with_refused(engine, job, plan.samples[4:8], skip=skip) for skip in (True, False)}
        engine.collective_rpc("shard_writer_flush")
        repeated = vllm_capture._Run(engine, job, plan.samples[:1])
        with pytest.raises(KitError, match=f"sample {plan.samples[0].id} was captured twice"):
            list(repeated.run())
    finally:
        stop(engine, finish="shard_writer_finish")
    return plan, reports, open_shards(job.folder), refused


def run_with_refused(engine, job, samples, *, skip):
    """Two samples with one between them that is longer than the engine takes; returns its rows, failures and summary."""
    first, last = (replace(sample, id="single-" + sample.id) for sample in (samples[:2] if skip else samples[2:]))
    long = replace(first, id=f"long-{skip}", source="p:long", token_ids=[1] * (job.longest_tokens + 2))
    run = vllm_capture._Run(engine, replace(job, skip_errors=skip), [first, long, last])
    reports = list(run.run())
    try:
        summary = run.failures.settle({"asked": 3, "dropped": {}})
    except KitError as error:
        summary = str(error)
    return sum(report.num_rows for report in reports), sum(report.num_failed for report in reports), summary


def rows_of(plan, shards):
    """Each sample's row beside the sample."""
    samples = {sample.id: sample for sample in plan.samples}
    return [(row, samples[row.id]) for row in shards if row.id in samples]


def test_forty_samples_that_finish_out_of_order_give_forty_rows(capture):
    plan, reports, shards, _ = capture
    ids = [row_id for row_id in shards.ids if not row_id.startswith("single-")]
    asked = [sample.id for sample in plan.samples]
    assert len(asked) == 40
    assert sorted(ids) == sorted(asked)
    assert ids != asked  # they did finish out of order
    assert sum(report.num_rows for report in reports) == 40
    assert sum(report.num_tokens for report in reports) == sum(shards.lengths[:40])
    said = [len(row.token_ids()) - len(plan_sample.token_ids) for row, plan_sample in rows_of(plan, shards)]
    assert sum(report.num_said for report in reports) == sum(said)
    assert verify_shards(shards.folder).problems == []


def test_rows_are_the_prompt_the_greedy_answer_and_their_states(capture, smollm2):
    """Each row against one unbatched transformers pass: its answer is greedy, its states are hidden_states[k + 1]."""
    plan, _, shards, _ = capture
    model = load_target(smollm2)
    samples = {sample.id: sample for sample in plan.samples}
    worst = 0.0
    for row in shards:
        sample = samples[row.id.removeprefix("single-")]
        with torch.inference_mode():
            output = model(row.input_ids[None].long(), output_hidden_states=True)
        want = torch.stack([output.hidden_states[k + 1][0] for k in shards.header.target_layer_ids], dim=1)
        got = row.hidden_states.view(want.shape)
        worst = max(worst, float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()))
        num_fed = len(sample.token_ids)
        assert row.input_ids[:num_fed].tolist() == sample.token_ids
        if sample.loss_spans is not None:
            assert (len(row.input_ids), row.next_token) == (num_fed, -1)
            assert row.loss_mask.nonzero().flatten().tolist() == [i for a, b in sample.loss_spans for i in range(a, b)]
            continue
        assert row.loss_mask.tolist() == [i >= num_fed for i in range(len(row.input_ids))]
        said = row.token_ids()[num_fed:]
        logits = output.logits[0, num_fed - 1 :]
        chosen = logits.gather(1, said[:, None])[:, 0]
        assert (chosen >= logits.amax(-1) - 1e-3).all()  # ties may break either way
        ends = [i for i, token in enumerate(said.tolist()) if token == model.config.eos_token_id]
        assert ends == [len(said) - 1] or (ends == [] and len(said) == SAMPLING["max_new_tokens"])
    assert worst < 1e-4, worst


def test_batched_and_single_captures_are_the_same(capture):
    _, _, shards, _ = capture
    rows = {row.id: row for row in shards}
    for row_id in [row_id for row_id in rows if row_id.startswith("single-")]:
        single, batched = rows[row_id], rows[row_id.removeprefix("single-")]
        assert torch.equal(single.token_ids(), batched.token_ids())
        difference = (single.hidden_states - batched.hidden_states).norm()
        assert difference <= 1e-4 * batched.hidden_states.norm()


def test_a_prompt_that_the_engine_refuses_costs_no_other_sample(capture):
    """The real refusal of a prompt beyond the engine's context: left out and counted, or the end after what is in flight."""
    plan, _, shards, refused = capture
    assert refused[True] == (2, 1, {"asked": 3, "dropped": {"engine_failed": 1}})
    num_rows, num_failed, error = refused[False]
    assert (num_rows, num_failed) == (1, 1)  # nothing is taken up behind it
    assert error.startswith("p:long: the engine failed at this sample (") and "--skip_errors" in error
    done = [sample.id for sample in plan.samples[4:8] if "single-" + sample.id in shards.ids]
    assert done == [sample.id for sample in plan.samples[4:7]] and not [i for i in shards.ids if i.startswith("long")]
