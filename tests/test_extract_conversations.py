"""Conversations: the forms that data sets have become one, and what is not understood is refused with its place."""

import json

import pytest

from dflash_kit.errors import KitError
from extract.conversations import Conversation, PlainText, Tokens, mask_spans, to_line
from extract.readers import Record

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}


def line_of(value, **settings):
    return to_line(Record("p:7", value), **settings)


def messages_of(value, **settings):
    return line_of(value, **settings).messages


def test_sharegpt_speakers_become_roles():
    said = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello."), ("user", "?"), ("observation", "3")]
    value = {"conversations": [{"from": speaker, "value": text, "weight": 1} for speaker, text in said]}
    assert messages_of(value) == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "?"},
        {"role": "tool", "content": "3"},
    ]
    with pytest.raises(KitError, match=r"p:7: message 1 is from 'robot'; known: human, gpt"):
        line_of({"conversations": [{"from": "robot", "value": "x"}]})
    with pytest.raises(KitError, match=r"p:7: message 1 needs `content`"):
        line_of({"conversations": [{"from": "human"}]})


def test_sharegpt_columns_beside_the_conversation():
    value = {"conversations": [{"from": "human", "value": "Hi"}], "system": "Be brief.", "tools": '[{"name": "look"}]'}
    line = line_of(value)
    assert line.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert line.tools == [{"name": "look"}]
    assert messages_of({"conversations": [USER], "system": " ", "tools": ""}) == [USER]
    calling = {"from": "function_call", "value": json.dumps(CALL["function"])}
    (_, call) = messages_of({"conversations": [{"from": "human", "value": "Hi"}, calling]})
    assert call == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_the_columns_are_looked_for_in_a_fixed_order():
    value = {"text": "whole text", "input_ids": [1, 2], "prompt": "Ho", "messages": [USER]}
    assert messages_of(value) == [USER]
    del value["messages"]
    assert line_of(value) == Conversation(source="p:7", messages=[{**USER, "content": "Ho"}], is_plain=True)
    value["prompt"] = None
    assert line_of(value) == Tokens(source="p:7", token_ids=[1, 2], loss_spans=[(1, 2)])
    del value["input_ids"]
    assert line_of(value) == PlainText(source="p:7", text="whole text")
    assert messages_of({"prompt": [USER]}) == [USER]


def test_parts_of_text_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert messages_of({"messages": [{"role": "user", "content": parts}]}) == [{"role": "user", "content": "one\ntwo"}]
    for part, kind in (
        ({"type": "image_url", "image_url": {}}, "image_url"),
        ("words", "str"),
        ({"text": "x"}, "None"),
    ):
        with pytest.raises(KitError, match=rf"p:7: message 2 has a part of type '?{kind}"):
            line_of({"messages": [USER, {"role": "user", "content": [parts[0], part]}]})


def test_calls_of_tools_have_one_form():
    as_text = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    flat = {"name": "look", "arguments": {"at": "it"}}
    for call, want in ((as_text, {"id": "c1", **CALL}), (flat, CALL), (CALL, CALL)):
        for content in ({}, {"content": None}, {"content": ""}):
            (_, message) = messages_of({"messages": [USER, {"role": "assistant", "tool_calls": [call], **content}]})
            assert message == {"role": "assistant", "content": "", "tool_calls": [want]}
    for calls, words in (
        ([{"function": {}}], "without a function's name"),
        (["look"], "without a function's name"),
        ([{"name": "look", "arguments": "{"}], "arguments that are not JSON"),
        ([{"name": "look", "arguments": "3"}], "arguments that are no object"),
        ("look", "must be a list"),
    ):
        with pytest.raises(KitError, match=rf"p:7: message 2.* {words}"):
            line_of({"messages": [USER, {"role": "assistant", "tool_calls": calls}]})


def test_other_keys_of_a_message_stay():
    message = {"role": "assistant", "content": "Hello.", "reasoning_content": "hm", "name": "x"}
    assert messages_of({"messages": [USER, message]}) == [USER, message]
    with pytest.raises(KitError, match="`reasoning_content` must be text"):
        line_of({"messages": [USER, {**message, "reasoning_content": ["hm"]}]})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"messages": [USER], "tools": "{"}, "`tools` is not JSON"),
        ({"messages": [USER], "tools": {"name": "look"}}, "`tools` must be a list"),
        ({"messages": "Hi"}, "`messages` must be a list"),
        ({"conversations": []}, "`conversations` must be a list"),
        ({"text": ["a"]}, "`text` needs text"),
        ({"input_ids": [1]}, "at least two integers"),
        ({"input_ids": [1, 2.0]}, "at least two integers"),
        ({"input_ids": [1, True]}, "at least two integers"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "must hold 2 times 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "must hold 2 times 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "0 everywhere"),
        ([1], "a JSON list"),
        (b"\xff", "not JSON"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(value, words):
    with pytest.raises(KitError, match=rf"^p:7: .*{words}"):
        line_of(value)


def test_a_mask_becomes_ranges():
    assert mask_spans([0, 1, 1, 0, True]) == [(1, 3), (4, 5)]
    assert mask_spans([1, 1]) == [(0, 2)]
    assert mask_spans([]) == []
