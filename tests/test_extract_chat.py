"""From a line to its row: system prompts, tools, reasoning and thinking through the template, answered and captured at once."""

import json

import pytest
import torch

from dflash_kit.shards import open_shards
from dflash_kit.target import load_target, load_tokenizer
from extract.cli import main
from helpers import make_tiny_target

# As in Qwen3: tools stand in the system message, and thinking that is switched off is an empty thought in the prompt.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bergen"}}}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it cold?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "-3"},
]
PROMPT = (
    '<|im_start|>system\n# Tools [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", '
    '"properties": {}}}}]<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it cold?<|im_end|>\n'
    '<|im_start|>assistant\n<think>I look.</think><call>{"name": "weather", "arguments": {"city": "Bergen"}}</call>'
    "<|im_end|>\n<|im_start|>tool\n-3<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = make_tiny_target(tmp_path_factory.mktemp("chat") / "target", max_position_embeddings=1024)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def extract(target, out, line, *more):
    """The rows, sorted by id, that one line becomes."""
    prompts = out.with_suffix(".jsonl")
    prompts.write_text(json.dumps(line) + "\n")
    common = ["--model", str(target), "--prompts", str(prompts), "--out", str(out), "--engine", "transformers"]
    settings = [
        "--target_layer_ids",
        "[0,3]",
        "--storage",
        "float32",
        "--sampling.max_new_tokens",
        "12",
        "--parity",
        "0",
    ]
    assert main([*common, *settings, *more]) == 0
    return sorted(open_shards(out), key=lambda row: row.id)


@pytest.mark.parametrize("thinking", [True, False])
def test_all_that_a_conversation_holds_is_in_the_prompt_that_is_answered(target, tmp_path, thinking):
    line = {"messages": ASKED, "tools": [TOOL]}
    (row,) = extract(target, tmp_path / "out", line, "--enable_thinking", str(thinking).lower())
    tokenizer, token_ids = load_tokenizer(target), row.token_ids()
    num_fed = int(row.token_mask().nonzero()[0])
    assert tokenizer.decode(token_ids[:num_fed]) == PROMPT + ("" if thinking else "<think></think>")
    assert row.token_mask().tolist() == [i >= num_fed for i in range(len(token_ids))]
    # Prompt and answer have states, all but the answer's last token, and the answer is the target's own.
    model = load_target(target)
    with torch.inference_mode():
        output = model(row.input_ids[None].long(), output_hidden_states=True)
    want = torch.cat([output.hidden_states[k + 1][0] for k in (0, 3)], dim=-1)
    torch.testing.assert_close(row.hidden_states, want, atol=1e-4, rtol=1e-4)
    assert token_ids[num_fed:].tolist() == output.logits[0, num_fed - 1 :].argmax(-1).tolist()


def test_given_turns_with_reasoning_and_calls_are_supervised_as_rendered(target, tmp_path):
    told = [*ASKED, {"role": "assistant", "content": "Yes.", "reasoning_content": "Minus three."}]
    (row,) = extract(target, tmp_path / "out", {"messages": told, "tools": [TOOL]}, "--enable_thinking", "true")
    tokenizer = load_tokenizer(target)
    said = tokenizer.decode(row.input_ids[row.loss_mask])
    call = '<think>I look.</think><call>{"name": "weather", "arguments": {"city": "Bergen"}}</call><|im_end|>'
    assert said == call + "<think>Minus three.</think>Yes.<|im_end|>"


def test_several_answers_to_a_prompt_differ_and_follow_the_seed(target, tmp_path):
    def answers(name, seed):
        more = ["--num_samples", "3", "--sampling.temperature", "1.5", "--sampling.seed", seed, "--generate", "true"]
        rows = extract(target, tmp_path / name, {"messages": ASKED, "tools": [TOOL]}, *more)
        return [tuple(row.token_ids()[row.token_mask()].tolist()) for row in rows]

    first, again, other = answers("a", "1"), answers("b", "1"), answers("c", "2")
    assert len(first) == len(set(first)) == 3
    assert first == again
    assert set(first).isdisjoint(other)
