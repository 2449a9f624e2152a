"""Conversations: what a raw record says, in one form whatever the data set it comes from.

A record holds ``messages`` (role and content), ``prompt`` (text, or messages), ``conversations`` (ShareGPT: from and
value), ``input_ids`` with an optional ``loss_mask``, or ``text``. ``tools`` travel to the chat template. Other keys are
left alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dflash_kit.errors import KitError

from .readers import CONTENT_COLUMNS, Record, unknown_columns
from .spans import Message, Span

# Damaged JSON (and bytes that are no UTF-8), or JSON that is nested too deeply.
JSON_FAULTS = (ValueError, RecursionError)
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
    **{name: name for name in ROLES},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What was said so far, to be answered or with a given response."""

    source: str
    """``file:line`` or ``file row number``, for messages."""
    messages: list[Message]
    """What was said, at least one message."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the assistant may call, for the chat template."""
    is_plain: bool = False
    """The line held a plain ``prompt``: without a chat template it is used as it stands."""

    @property
    def has_response(self) -> bool:
        """Whether the assistant has the last word."""
        return bool(self.messages[-1]["role"] == "assistant")

    def without_response(self) -> "Conversation":
        """The conversation up to the response."""
        return replace(self, messages=self.messages[:-1]) if self.has_response else self


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainText:
    """Text that is fed as it stands, without a chat template; all of it is supervised but its first token."""

    source: str
    """``file:line`` or ``file row number``, for messages."""
    text: str
    """The whole text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens that are fed as they stand."""

    source: str
    """``file:line`` or ``file row number``, for messages."""
    token_ids: list[int]
    """At least two, of the target's vocabulary."""
    loss_spans: list[Span]
    """Supervised ranges [start, end), at least one."""


Line = Conversation | PlainText | Tokens


def to_line(record: Record, prompt_column: str | None = None) -> Line:
    """Read a record.

    Args:
        record: what stood in the line or row.
        prompt_column: the column that holds the prompt or the messages, in place of those that are known.

    Raises:
        KitError: it says nothing that is understood, or what is no text; naming file and line.
    """
    try:
        line = _to_line(record, prompt_column)
        if not isinstance(line, Tokens):
            said = line.text if isinstance(line, PlainText) else [line.messages, line.tools]
            json.dumps(said, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise KitError(
            f"{record.source}: {error.object[error.start]!r} is half a surrogate pair, which is no character; mend the text"
        ) from error
    except RecursionError as error:
        raise KitError(f"{record.source}: nested too deeply; a message or tool has a few levels") from error
    return line


def _to_line(record: Record, prompt_column: str | None) -> Line:
    source, value = record.source, _parsed(record)
    columns = (prompt_column,) if prompt_column else CONTENT_COLUMNS
    column = next((name for name in columns if value.get(name) is not None), None)
    if column is None:
        raise unknown_columns(source, list(value), columns)
    content = value[column]
    if column == "text":
        return PlainText(source=source, text=_text(content, source, column))
    if column == "input_ids":
        return _tokens(content, value.get("loss_mask"), source)
    is_plain = isinstance(content, str) and column not in ("messages", "conversations")
    if is_plain:
        messages = [{"role": "user", "content": _text(content, source, column)}]
    else:
        messages = _messages(content, source, column)
    if column == "conversations":
        messages = _with_system(messages, value.get("system"))
    return Conversation(source=source, messages=messages, tools=_tools(value.get("tools"), source), is_plain=is_plain)


def _parsed(record: Record) -> dict[str, Any]:
    value = record.value
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except JSON_FAULTS as error:  # JSONDecodeError and UnicodeDecodeError
            raise KitError(f"{record.source}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise KitError(f"{record.source}: a JSON {kind} where an object with `prompt` or `messages` belongs")
    return value


def _text(value: Any, source: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise KitError(f"{source}: `{column}` needs text; it is {str(value)[:40]!r}")
    return value


def _messages(value: Any, source: str, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise KitError(f"{source}: `{column}` must be a list with at least one message")
    messages = [_message(message, f"{source}: message {index}") for index, message in enumerate(value, start=1)]
    if all(message["role"] == "assistant" for message in messages):
        raise KitError(f"{source}: only the assistant speaks; there is nothing to respond to")
    return messages


def _message(value: Any, where: str) -> Message:
    """A message with a known role and text; one that has them already comes back as it is, and so keeps its id."""
    if isinstance(value, dict) and "role" not in value and "from" in value:
        value = _from_sharegpt(value, where)
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise KitError(f"{where} needs a role out of {', '.join(ROLES)}")
    message: Message = dict(value)
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in _listed(message["tool_calls"], where)]
        message["content"] = "" if message.get("content") is None else message["content"]
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"], where)
    content, is_silent = message.get("content"), message["role"] == "assistant" and not message.get("tool_calls")
    if not isinstance(content, str) or (is_silent and not content.strip()):
        raise KitError(f"{where} needs `content` with text")
    if not isinstance(message.get("reasoning_content") or "", str):
        raise KitError(f"{where}: `reasoning_content` must be text")
    return message


def _from_sharegpt(value: dict[str, Any], where: str) -> Message:
    speaker, said = value["from"], value.get("value")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise KitError(f"{where} is from {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
    if speaker != "function_call":
        return {"role": role, "content": said}
    try:
        calls = json.loads(said) if isinstance(said, str) else said
    except JSON_FAULTS as error:
        raise KitError(f"{where} is a function_call whose value is not JSON ({error})") from error
    return {"role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _joined(parts: list[Any], where: str) -> str:
    """Text parts, one below the other, as vLLM hands them to templates that take text."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise KitError(f"{where} has a part of type {kind!r}; only parts of type 'text' with `text` are understood")
    return "\n".join(part["text"] for part in parts)


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    """A call as templates expect it: ``function`` with a name and arguments, which are no longer JSON in a string."""
    call = value if isinstance(value, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise KitError(f"{where} has a tool call without a function's name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except JSON_FAULTS as error:
            raise KitError(f"{where} calls {function['name']} with arguments that are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise KitError(f"{where} calls {function['name']} with arguments that are no object")
    outer = call if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def _tools(value: Any, source: str) -> list[dict[str, Any]] | None:
    """Tools of a line: a list of objects, or that list as JSON text, as Parquet files often have it."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except JSON_FAULTS as error:
            raise KitError(f"{source}: `tools` is not JSON ({error})") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise KitError(f"{source}: `tools` must be a list of objects")
    return value


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise KitError(f"{where}: `tool_calls` must be a list")
    return value


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    """ShareGPT sets keep the system prompt in a column of its own."""
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _tokens(ids: Any, mask: Any, source: str) -> Tokens:
    if not isinstance(ids, list) or len(ids) < 2 or not all(type(i) is int for i in ids):
        raise KitError(f"{source}: `input_ids` must be a list of at least two integers")
    if mask is None:
        return Tokens(source=source, token_ids=ids, loss_spans=[(1, len(ids))])
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise KitError(f"{source}: `loss_mask` must hold {len(ids)} times 0 or 1, one for each of `input_ids`")
    if not any(mask):
        raise KitError(f"{source}: `loss_mask` is 0 everywhere; there is nothing to learn")
    return Tokens(source=source, token_ids=ids, loss_spans=mask_spans(mask))


def mask_spans(mask: Sequence[int]) -> list[Span]:
    """Ranges [start, end) in which a mask is set."""
    spans, position = [], 0
    for is_set, group in groupby(mask, key=bool):
        end = position + len(list(group))
        if is_set:
            spans.append((position, end))
        position = end
    return spans
