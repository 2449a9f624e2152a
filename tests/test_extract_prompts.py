"""Prompts: malformed files are refused with their line, masks are derived and checked, ids are stable."""

import json

import pytest

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec
from extract.plan import Limits, make_plan
from extract.prompts import LineErrors, read_prompts, to_sample
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
# Earlier turns lose their thinking, as in Qwen3.
DROPPING = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>\n')[-1])")
SHOUTING_EARLIER = CHATML.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content | upper)")
CALLS = "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + THINKING.replace(
    "{{ m.content + ", "{{ m.content }}" + CALLS + "{{ "
)
BACKWARDS = "{% for m in messages | reverse %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, naïvely.\nReally."},
]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Tromsø"}}}
TOOL_TALK = [
    {"role": "user", "content": "Is it cold?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "-3"},
    {"role": "assistant", "content": "Yes."},
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


@pytest.mark.parametrize("template", [CHATML, TAGGED, THINKING])
def test_the_last_turn_alone_can_be_learnt(template):
    ids, said = spans_of(template, enable_thinking=False)
    last_ids, last_said = spans_of(template, train_on="last", enable_thinking=False)
    assert (last_ids, last_said) == (ids, said[1:])


def test_earlier_turns_are_learnt_without_the_thinking_that_a_template_drops():
    talk = [*TALK[:2], {"role": "assistant", "content": "<think>\nhm</think>\n4"}, *TALK[3:]]
    _, said = spans_of(DROPPING, talk)
    assert said == ["4<|im_end|>", "6, naïvely.\nReally.<|im_end|>"]
    _, said = spans_of(DROPPING, talk[:3])
    assert said == ["<think>\nhm</think>\n4<|im_end|>"]


def test_where_earlier_turns_are_altered_the_last_one_can_be_learnt():
    with pytest.raises(KitError, match=r"message 3: .*--train_on last"):
        spans_of(SHOUTING_EARLIER)
    assert spans_of(SHOUTING_EARLIER, train_on="last")[1] == ["6, naïvely.\nReally.<|im_end|>"]


def test_a_quotation_further_on_is_not_taken_for_the_turn():
    quoting = {"role": "user", "content": "You " + "really " * 20 + "said: It is 4."}
    with pytest.raises(KitError, match=r"message 3: .*cannot be found"):
        spans_of(SHOUTING_EARLIER, [*TALK[:3], quoting, TALK[4]])


NO_ROLES = "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
EARLIER_LEFT_OUT = CHATML.replace(
    "{{ '<|im_start|>'", "{% if m.role != 'assistant' or loop.last %}{{ '<|im_start|>'"
).replace("{% endfor %}", "{% endif %}{% endfor %}")


@pytest.mark.parametrize("template", [EARLIER_LEFT_OUT, NO_ROLES])
@pytest.mark.parametrize("user", ["yes", "well, yes", "x" * 70 + "yes"])
def test_a_turn_that_the_template_leaves_out_is_not_found_in_what_the_user_says(template, user):
    said = ["hi", "yes", user, "hi " + user]
    talk = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
    with pytest.raises(KitError, match=r"message 2: .*cannot be found"):
        spans_of(template, talk)


def test_a_call_that_the_template_leaves_out_is_not_found_in_what_the_user_says():
    template = NO_ROLES.replace(
        "{{ m.content", "{{ m.content + (m.tool_calls[0].function.name if m.tool_calls else '')"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    answer = {"role": "assistant", "content": "ok"}
    with pytest.raises(KitError, match=r"message 2: .*cannot be found"):
        spans_of(template, [TALK[1], call, {"role": "user", "content": "look"}, answer])


def test_a_short_answer_is_not_found_in_the_next_question():
    """The template alters earlier turns so that the words are gone from their place, and the next message has them."""
    talk = [TALK[1], {"role": "assistant", "content": "ok"}, {"role": "user", "content": "ok"}, TALK[2]]
    with pytest.raises(KitError, match=r"message 2: .*cannot be found"):
        spans_of(SHOUTING_EARLIER, talk)


def test_two_turns_are_never_found_in_one_place():
    short = SHOUTING_EARLIER.replace("<|im_start|>", "[").replace("m.role + '\n'", "m.role[0] + ']'")
    talk = [TALK[1], {"role": "assistant", "content": "Yes."}, TALK[3], {"role": "assistant", "content": "Yes."}]
    with pytest.raises(KitError, match=r"message 2: .*cannot be found"):
        spans_of(short.replace("assistant\n", "a]"), talk)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_call_of_a_tool_is_learnt_as_it_is_rendered(thinking):
    ids, said = spans_of(TOOLS, TOOL_TALK, tools=[TOOL], enable_thinking=thinking)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø"}}\n</tool_call><|im_end|>'
    assert said[0] == call
    assert said[1].endswith("Yes.<|im_end|>")
    assert '"parameters"' in tokenizer_with(TOOLS).decode(ids)


def test_the_calls_of_an_earlier_question_are_found_without_their_thinking():
    """As in Qwen3: thinking is rendered behind the last question only, so no turn before it is a prefix any more."""
    latest = "(messages | map(attribute='role') | list)[loop.index:]"
    thinking = (
        "{% if m.reasoning_content and 'user' not in " + latest + " %}{{ m.reasoning_content + '</think>' }}{% endif %}"
    )
    template = TOOLS.replace("{{ m.content }}", thinking + "{{ m.content }}")
    talk = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in TOOL_TALK]
    _, said = spans_of(template, [*talk, TALK[1], TALK[2]], enable_thinking=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø"}}\n</tool_call><|im_end|>'
    assert said[:2] == [call, "Yes.<|im_end|>"]
    assert said[2].endswith("It is 4.<|im_end|>")


def test_reasoning_content_may_stand_in_front_of_what_was_said():
    template = CHATML.replace("m.content", "('<think>' + (m.reasoning_content or '-') + '</think>' + m.content)")
    talk = [TALK[1], {**TALK[2], "reasoning_content": "Two and two. " * 20}]
    _, said = spans_of(template, talk)
    assert said == ["<think>" + "Two and two. " * 20 + "</think>It is 4.<|im_end|>"]


@pytest.mark.parametrize("template", [SHOUTING, EVERYTHING_TAGGED, BACKWARDS])
def test_a_mask_that_cannot_be_derived_is_refused_and_never_all_ones(template):
    for train_on in ("all", "last"):
        with pytest.raises(KitError, match=r"generation %\} tags|marks no prompt|turns were found"):
            spans_of(template, train_on=train_on)


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
        ('{"question": "?"}', r"none of .*`text` holds anything.* found: \['question'\].*--prompt_column"),
        ('{"prompt": "  "}', "`prompt` needs text"),
        ('{"prompt": 3}', "at least one message"),
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


@pytest.mark.parametrize(
    "value",
    [
        r'{"prompt": "\ud800"}',
        r'{"text": "a \udc00 b"}',
        r'{"messages": [{"role": "user", "content": "x", "name": "\ud83d"}]}',
        r'{"prompt": "x", "tools": [{"name": "\ud83d"}]}',
        r'{"prompt": "x", "tools": "[{\"name\": \"\\ud83d\"}]"}',
        '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "x", "tools": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "x", "tools": "' + "[" * 100_000 + "]" * 100_000 + '"}',
    ],
)
def test_half_a_surrogate_pair_and_deep_nesting_are_malformed_lines(tmp_path, value, capsys):
    path = write_lines(tmp_path / "p.jsonl", r'{"prompt": "fine \ud83d\ude00"}', value)
    with pytest.raises(KitError, match=r"p\.jsonl:2: "):
        list(read_prompts(path))
    errors = LineErrors(skip=True)
    assert len(list(read_prompts(path, errors=errors))) == errors.num_lines == 1
    array = tmp_path / "p.json"
    array.write_text(f"[{value}]")
    with pytest.raises(KitError, match=r"p\.json"):
        list(read_prompts(array))


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.x.y() }}", TAGGED + "{{ 1 / 0 }}"])
def test_whatever_a_template_raises_is_told_with_the_line(tmp_path, template):
    with pytest.raises(KitError, match=r"p\.jsonl:1: the chat template rejects these messages: \S+"):
        sample_of({"messages": TALK}, tmp_path, template=template)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(KitError, match=r"p\.jsonl:2: not JSON"):
        list(read_prompts(tmp_path / "p.jsonl"))


def test_empty_and_missing_files_are_refused(tmp_path):
    with pytest.raises(KitError, match="is empty"):
        list(read_prompts(write_lines(tmp_path / "p.jsonl", "", "  ")))
    with pytest.raises(KitError, match="cannot be read"):
        list(read_prompts(tmp_path / "absent.jsonl"))
    with pytest.raises(KitError, match="is empty"):
        list(read_prompts(tmp_path))  # a folder with one empty file


SAMPLING = {"temperature": 0.0, "max_new_tokens": 20}


def sample_of(
    value, tmp_path, *, sampling=SAMPLING, target=None, generate=None, template=CHATML, max_tokens=512, train_on="all"
):
    (line,) = read_prompts(write_lines(tmp_path / "p.jsonl", json.dumps(value)))
    tokenizer = tokenizer_with(template)
    return to_sample(
        line,
        tokenizer,
        sampling=sampling,
        target=target or {"config": "c"},
        eos_token_ids=(tokenizer.eos_token_id,),
        vocab_size=300,
        generate=generate,
        max_tokens=max_tokens,
        template_args={},
        train_on=train_on,
    )


@pytest.mark.parametrize(
    ("value", "known_id"),
    [
        ({"prompt": "Hi"}, "f06fa127cb5d38272139d8d49753a8ae"),
        ({"messages": TALK}, "d62bb7d96076dbba1561a4b39506bcd5"),
        ({"messages": TALK[:-1]}, "bd588fcc830b31f43338ff05194c8742"),
    ],
)
def test_ids_are_those_of_earlier_versions(tmp_path, value, known_id):
    """Ids that the first version computed: a change would extract the prompts of finished shards once more."""
    assert sample_of(value, tmp_path).id == known_id


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


def test_text_is_fed_as_it_stands_and_learnt_behind_its_first_token(tmp_path):
    sample = sample_of({"text": "Once upon a time"}, tmp_path)
    assert tokenizer_with(None).decode(sample.token_ids) == "Once upon a time"
    assert (sample.loss_spans, sample.max_new_tokens) == ([(1, len(sample.token_ids))], 0)
    with pytest.raises(KitError, match="single token"):
        sample_of({"text": "a"}, tmp_path)
    with pytest.raises(KitError, match="are not answered"):
        sample_of({"text": "Once upon a time"}, tmp_path, generate=True)


def test_token_ids_are_taken_as_they_are_and_checked(tmp_path):
    sample = sample_of({"input_ids": [5, 6, 7, 299], "loss_mask": [0, 1, 0, 1]}, tmp_path)
    assert (sample.token_ids, sample.loss_spans) == ([5, 6, 7, 299], [(1, 2), (3, 4)])
    assert sample_of({"input_ids": [5, 6, 7, 299]}, tmp_path).loss_spans == [(1, 4)]
    with pytest.raises(KitError, match=r"p\.jsonl:1: .*300 at position 2, outside of the target's vocabulary 0\.\.299"):
        sample_of({"input_ids": [5, 6, 300]}, tmp_path)


def test_only_another_choice_of_turns_changes_the_id_of_a_given_response(tmp_path):
    everything, last = (sample_of({"messages": TALK}, tmp_path, train_on=which) for which in ("all", "last"))
    assert len(last.loss_spans) == 1
    assert last.id != everything.id
    asked = [sample_of({"messages": TALK[:-1]}, tmp_path, train_on=which) for which in ("all", "last")]
    assert asked[0] == asked[1]


def test_tools_reach_the_template_and_the_id(tmp_path):
    value = {"messages": TOOL_TALK[:3], "tools": [TOOL]}
    with_tools = sample_of(value, tmp_path, template=TOOLS)
    assert '"parameters"' in tokenizer_with(TOOLS).decode(with_tools.token_ids)
    assert with_tools.id != sample_of({"messages": TOOL_TALK[:3]}, tmp_path, template=TOOLS).id
    with pytest.raises(KitError, match="no place for `tools`"):
        sample_of(value, tmp_path)
    with pytest.raises(KitError, match="no place for `tool_calls`"):
        sample_of({"messages": TOOL_TALK[:3]}, tmp_path)


def plan_for(tiny_target, inputs, *, skip_errors=False, done_ids=(), sampling=SAMPLING, **limits):
    spec = TargetSpec.from_pretrained(tiny_target)
    header = ShardsHeader.from_target(
        spec, target_layer_ids=[1], compute_dtype="float32", engine="e", engine_version="0", sampling=sampling
    )
    errors = LineErrors(skip=skip_errors)
    lines = read_prompts(inputs, errors=errors)
    return make_plan(
        lines,
        make_byte_tokenizer(),
        spec,
        header,
        set(done_ids),
        limits=Limits(**limits),
        generate=None,
        template_args={},
        errors=errors,
    )


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


def test_the_same_content_is_taken_once_from_all_inputs_and_forms(tiny_target, tmp_path):
    write_lines(tmp_path / "a.jsonl", '{"prompt": "a"}', '{"conversations": [{"from": "human", "value": "b"}]}')
    parts = [{"type": "text", "text": "a"}]
    write_lines(tmp_path / "b.jsonl", json.dumps({"messages": [{"role": "user", "content": parts}]}), '{"prompt": "b"}')
    plan = plan_for(tiny_target, tmp_path)
    assert plan.summary() == {"asked": 4, "dropped": {"duplicate": 2}}


def test_lengths_filter_what_is_fed_and_are_counted(tiny_target, tmp_path):
    lines = [json.dumps({"prompt": "x" * length}) for length in (1, 50, 100, 600)]
    path = write_lines(tmp_path / "p.jsonl", *lines)
    plan = plan_for(tiny_target, path, min_tokens=50, max_tokens=110)
    assert [sample.source[-2:] for sample in plan.samples] == [":2"]
    assert all(50 <= len(sample.token_ids) <= 110 for sample in plan.samples)
    assert plan.drops == {"under_min_tokens": 1, "over_max_tokens": 2}
    exact = len(plan.samples[0].token_ids)
    assert len(plan_for(tiny_target, path, min_tokens=exact, max_tokens=exact).samples) == 1


def test_several_answers_have_ids_of_their_own_and_the_first_keeps_its_id(tiny_target, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', json.dumps({"messages": TALK}), '{"prompt": "b"}')
    sampling = {**SAMPLING, "temperature": 1.0}
    single = plan_for(tiny_target, path, sampling=sampling)
    several = plan_for(tiny_target, path, sampling=sampling, num_samples=3)
    ids = [sample.id for sample in several.samples]
    assert len(set(ids)) == len(ids) == 7  # the given response is not answered
    assert [ids[0], ids[3], ids[4]] == [sample.id for sample in single.samples]
    assert len({int(sample_id[:12], 16) % 2**31 for sample_id in ids}) == 7  # what vLLM adds to the seed
    more = plan_for(tiny_target, path, sampling=sampling, num_samples=3, done_ids=[ids[0], ids[1]])
    assert (more.num_done, [sample.id for sample in more.samples]) == (2, ids[2:])
    assert [sample.id for sample in plan_for(tiny_target, path, sampling=sampling, num_samples=3, limit=5).samples] == (
        ids[:5]
    )


def test_malformed_lines_are_counted_and_the_first_three_named(tiny_target, tmp_path, capsys):
    bad = ["{", '{"prompt": 3}', '{"input_ids": [1, 300]}', '{"messages": []}']
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', *bad, '{"prompt": "b"}')
    plan = plan_for(tiny_target, path, skip_errors=True)
    assert [sample.source[-2:] for sample in plan.samples] == [":1", ":6"]
    assert plan.summary() == {"asked": 6, "dropped": {"malformed": 4}}
    named = capsys.readouterr().err.splitlines()
    assert len(named) == 3
    assert all(line.startswith("skipped: ") and f"p.jsonl:{n}" in line for n, line in enumerate(named, start=2))
