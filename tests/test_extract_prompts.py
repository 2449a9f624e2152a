"""Prompts: malformed files are refused with their line, masks are derived and checked, ids are stable."""

import json

import pytest

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec
from extract.plan import make_plan
from extract.prompts import read_prompts, to_sample
from extract.spans import encode_conversation, encode_prompt
from helpers import make_byte_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking stands in the last turn and in the generation prompt only, as in Qwen3.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SHOUTING = CHATML.replace("m.content", "(m.content | upper)")
EVERYTHING_TAGGED = (
    "{% generation %}{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}{% endgeneration %}"
)
BACKWARDS = "{% for m in messages | reverse %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, naïvely.\nReally."},
]


def tokenizer_with(template):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def spans_of(template, talk=TALK, **template_args):
    tokenizer = tokenizer_with(template)
    ids, spans = encode_conversation(tokenizer, talk, (tokenizer.eos_token_id,), **template_args)
    return ids, [tokenizer.decode(ids[start:end]) for start, end in spans]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_the_mask_covers_what_the_assistant_said_and_its_end_token(template):
    ids, said = spans_of(template)
    assert said == ["It is 4.<|im_end|>", "6, naïvely.\nReally.<|im_end|>"]
    whole = tokenizer_with(template).apply_chat_template(TALK, return_dict=False)
    assert ids == whole[: len(ids)]
    assert len(whole) - len(ids) == 1  # only the newline behind the last end token is dropped


def test_a_turn_that_later_renders_differently_is_found_by_its_content():
    for thinking in (False, True):
        _, said = spans_of(THINKING, enable_thinking=thinking)
        assert said[0] == "It is 4.<|im_end|>"
        assert said[1].endswith("6, naïvely.\nReally.<|im_end|>")
        assert said[1].startswith("<think>") == thinking


def test_words_of_the_markup_are_not_taken_for_the_content():
    talk = [*TALK[:2], {"role": "assistant", "content": "assistant"}, *TALK[3:]]
    ids, said = spans_of(THINKING, talk, enable_thinking=False)
    assert said[0] == "assistant<|im_end|>"
    before_it = tokenizer_with(THINKING).decode(ids).split("assistant<|im_end|>")[0]
    assert before_it.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [SHOUTING, EVERYTHING_TAGGED, BACKWARDS])
def test_a_mask_that_cannot_be_derived_is_refused_and_never_all_ones(template):
    with pytest.raises(KitError, match=r"generation %\} tags|marks no prompt|turns were found"):
        spans_of(template)


def test_the_real_template_of_smollm2(smollm2):
    from dflash_kit.target import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    assert "generation %}" not in tokenizer.chat_template
    ids, spans = encode_conversation(tokenizer, TALK, (tokenizer.eos_token_id,))
    assert [tokenizer.decode(ids[a:b]) for a, b in spans] == ["It is 4.<|im_end|>", "6, naïvely.\nReally.<|im_end|>"]
    prompt = encode_prompt(tokenizer, TALK[:-1])
    assert ids[: spans[-1][0]] == prompt  # the response follows the very prompt that generation would see


def write_lines(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "JSON list"),
        ('{"question": "?"}', "neither"),
        ('{"prompt": "  "}', "neither"),
        ('{"prompt": 3}', "neither"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "message 1 needs a role"),
        ('{"messages": [{"role": "user", "content": 7}]}', "message 1 needs `content`"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}', "message 2 needs"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "only the assistant"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, words):
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "fine"}', "", line, '{"prompt": "never read"}')
    with pytest.raises(KitError, match=rf"p\.jsonl:3: .*{words}"):
        list(read_prompts(path))


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(KitError, match=r"p\.jsonl:2: not JSON"):
        list(read_prompts(tmp_path / "p.jsonl"))


def test_empty_and_missing_files_are_refused(tmp_path):
    with pytest.raises(KitError, match="is empty"):
        list(read_prompts(write_lines(tmp_path / "p.jsonl", "", "  ")))
    with pytest.raises(KitError, match="cannot be read"):
        list(read_prompts(tmp_path / "absent.jsonl"))
    with pytest.raises(KitError, match="cannot be read"):
        list(read_prompts(tmp_path))


SAMPLING = {"temperature": 0.0, "max_new_tokens": 20}


def sample_of(value, tmp_path, *, sampling=SAMPLING, target=None, generate=None, template=CHATML, max_tokens=512):
    (conversation,) = read_prompts(write_lines(tmp_path / "p.jsonl", json.dumps(value)))
    tokenizer = tokenizer_with(template)
    return to_sample(
        conversation,
        tokenizer,
        sampling=sampling,
        target=target or {"config": "c"},
        eos_token_ids=(tokenizer.eos_token_id,),
        generate=generate,
        max_tokens=max_tokens,
        template_args={},
    )


def test_the_id_is_a_hash_of_what_is_asked(tmp_path):
    first = sample_of({"prompt": "Hi", "id": "a"}, tmp_path)
    assert first.id == sample_of({"id": "b", "messages": [{"role": "user", "content": "Hi"}]}, tmp_path).id
    others = [
        sample_of({"prompt": "Ho"}, tmp_path),
        sample_of({"prompt": "Hi"}, tmp_path, sampling={**SAMPLING, "temperature": 1.0}),
        sample_of({"prompt": "Hi"}, tmp_path, target={"config": "other"}),
    ]
    assert len({first.id, *(other.id for other in others)}) == 4


def test_responses_are_given_or_asked_for(tmp_path):
    value = {"messages": TALK}
    given = sample_of(value, tmp_path)
    assert given.max_new_tokens == 0
    assert len(given.loss_spans) == 2
    answered = sample_of(value, tmp_path, generate=True)
    assert answered.loss_spans is None
    assert answered.token_ids == encode_prompt(tokenizer_with(CHATML), TALK[:-1])
    assert answered.id != given.id
    with pytest.raises(KitError, match=r"p\.jsonl:1: no response is given"):
        sample_of({"prompt": "Hi"}, tmp_path, generate=False)


def test_an_answer_stays_inside_the_context(tmp_path):
    sample = sample_of({"prompt": "Hi"}, tmp_path, max_tokens=40)
    assert len(sample.token_ids) + sample.max_new_tokens == 40


def test_without_a_template_plain_prompts_are_used_as_they_stand(tmp_path):
    sample = sample_of({"prompt": "Hi"}, tmp_path, template=None)
    assert sample.token_ids == tokenizer_with(None)("Hi")["input_ids"]
    with pytest.raises(KitError, match=r"p\.jsonl:1: the target has no chat template"):
        sample_of({"messages": TALK[:2]}, tmp_path, template=None)


def plan_for(tiny_target, path, **changes):
    spec = TargetSpec.from_pretrained(tiny_target)
    header = ShardsHeader.from_target(
        spec, target_layer_ids=[1], compute_dtype="float32", engine="e", engine_version="0", sampling=SAMPLING
    )
    settings = {"limit": None, "generate": None, "skip_long": False, "template_args": {}, "done_ids": set()}
    settings |= changes
    done_ids = settings.pop("done_ids")
    return make_plan(read_prompts(path), make_byte_tokenizer(), spec, header, done_ids, **settings)


def test_the_plan_counts_repeated_long_and_finished_lines(tiny_target, tmp_path):
    long = json.dumps({"prompt": "x" * 600})
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "a"}', long)
    with pytest.raises(KitError, match=r"p\.jsonl:4: .* tokens are more than the target's context of 512"):
        plan_for(tiny_target, path)
    plan = plan_for(tiny_target, path, skip_long=True)
    assert [sample.source[-2:] for sample in plan.samples] == [":1", ":2"]
    assert plan.summary() == {"asked": 4, "dropped": {"duplicate": 1, "too_long": 1}}
    rest = plan_for(tiny_target, path, skip_long=True, done_ids={plan.samples[0].id})
    assert (rest.num_done, [sample.id for sample in rest.samples]) == (1, [plan.samples[1].id])
    assert rest.summary() == plan.summary()


def test_the_limit_counts_samples_and_stops_reading(tiny_target, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', '{"prompt": "a"}', '{"prompt": "b"}', "not JSON")
    plan = plan_for(tiny_target, path, limit=2)
    assert len(plan.samples) == 2
    assert plan.drops == {"duplicate": 1}
