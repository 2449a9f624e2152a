"""Prompts: reading a JSONL file, and turning each line into the tokens that the target is fed.

A line is ``{"prompt": "…"}`` or ``{"messages": [{"role": …, "content": …}, …]}``; other keys are left
alone. A conversation that ends with the assistant's words has a given response, any other is to be answered
by the target.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.target import digest

from .spans import Message, Span, encode_conversation, encode_prompt

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One line of a prompts file."""

    source: str
    """``file:line``, for messages."""
    messages: list[Message]
    """What was said, at least one message."""
    is_plain: bool = False
    """The line held a plain ``prompt``: without a chat template it is used as it stands."""

    @property
    def has_response(self) -> bool:
        """Whether the assistant has the last word."""
        return bool(self.messages[-1]["role"] == "assistant")

    def without_response(self) -> "Conversation":
        """The conversation up to the response."""
        messages = self.messages[:-1] if self.has_response else self.messages
        return Conversation(source=self.source, messages=messages, is_plain=self.is_plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What an engine is asked to do for one row."""

    id: str
    """Stable hash of what is asked, of whom and how."""
    source: str
    """``file:line``, for messages."""
    token_ids: list[int]
    """Tokens that are fed: the prompt, or the conversation with its given response."""
    loss_spans: list[Span] | None
    """Supervised ranges [start, end) of a given response; None: the target answers and its answer is supervised."""
    max_new_tokens: int
    """Limit of the answer; 0 for a given response."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the row at most."""
        return len(self.token_ids) + self.max_new_tokens


def read_prompts(path: str | Path) -> Iterator[Conversation]:
    """Read a prompts file line by line.

    Raises:
        KitError: no such file, an empty one, or a malformed line (with its number).
    """
    path = Path(path)
    number_read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    number_read += 1
                    yield _parse_line(line, f"{path}:{number}")
    except OSError as error:
        raise KitError(f"prompts file {path} cannot be read: {error.strerror}; give a JSONL file") from error
    if number_read == 0:
        raise KitError(f"prompts file {path} is empty; it needs one JSON object a line, with `prompt` or `messages`")


def sample_id(
    conversation: Conversation, *, sampling: dict[str, Any], target: dict[str, Any], generate: bool | None
) -> str:
    """Id of the sample that a conversation becomes, without rendering it; arguments as in ``to_sample``."""
    is_given = conversation.has_response and not generate
    messages = conversation.messages if is_given else conversation.without_response().messages
    return digest({"messages": messages, "sampling": sampling, "target": target, "given": is_given})


def to_sample(
    conversation: Conversation,
    tokenizer: Any,
    *,
    sampling: dict[str, Any],
    target: dict[str, Any],
    eos_token_ids: tuple[int, ...],
    generate: bool | None,
    max_tokens: int,
    template_args: dict[str, Any],
) -> Sample:
    """Render and tokenize a conversation.

    Args:
        conversation: one line of the prompts file.
        tokenizer: the target's.
        sampling: sampling parameters as they stand in the shards header; ``max_new_tokens`` is used here.
        target: what identifies the target, part of the id.
        eos_token_ids: tokens that end a response.
        generate: True: answer even what has a response; False: never answer; None: answer what has none.
        max_tokens: tokens of a conversation at most (the target's context); longer samples are for the
            caller.
        template_args: further arguments of the chat template.

    Raises:
        KitError: naming file and line.
    """
    row_id = sample_id(conversation, sampling=sampling, target=target, generate=generate)
    is_given = conversation.has_response and not generate
    if not is_given:
        if generate is False:
            raise KitError(f"{conversation.source}: no response is given, and --generate is false")
        conversation = conversation.without_response()
    try:
        if is_given:
            ids, spans = encode_conversation(tokenizer, conversation.messages, eos_token_ids, **template_args)
        else:
            ids, spans = _prompt_ids(conversation, tokenizer, template_args), None
    except KitError as error:
        raise KitError(f"{conversation.source}: {error}") from error
    return Sample(
        id=row_id,
        source=conversation.source,
        token_ids=ids,
        loss_spans=spans,
        max_new_tokens=0 if is_given else max(0, min(sampling["max_new_tokens"], max_tokens - len(ids))),
    )


def _prompt_ids(conversation: Conversation, tokenizer: Any, template_args: dict[str, Any]) -> list[int]:
    if conversation.is_plain and not tokenizer.chat_template:
        return list(tokenizer(conversation.messages[0]["content"])["input_ids"])
    return encode_prompt(tokenizer, conversation.messages, **template_args)


def _parse_line(line: bytes, source: str) -> Conversation:
    try:
        value = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise KitError(f"{source}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(value, dict):
        raise KitError(f"{source}: a JSON {type(value).__name__} where an object with `prompt` or `messages` belongs")
    if "messages" in value:
        return Conversation(source=source, messages=_messages(value["messages"], source))
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise KitError(f"{source}: neither `messages` nor a `prompt` with text; keys here: {sorted(value)}")
    return Conversation(source=source, messages=[{"role": "user", "content": prompt}], is_plain=True)


def _messages(value: Any, source: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise KitError(f"{source}: `messages` must be a list with at least one message")
    for index, message in enumerate(value, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise KitError(f"{source}: message {index} needs a role out of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) or (message["role"] == "assistant" and not content.strip()):
            raise KitError(f"{source}: message {index} needs `content` with text")
    if all(message["role"] == "assistant" for message in value):
        raise KitError(f"{source}: only the assistant speaks; there is nothing to respond to")
    return value
