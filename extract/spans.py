"""Which tokens of a conversation the assistant said: from the template's generation tags, or derived and
checked.

A template without ``{% generation %}`` tags does not say where the assistant's words begin and end. They
are found by rendering: the conversation up to the turn (with the generation prompt) must be a prefix of the
whole conversation, and so must the conversation including the turn; what lies between is what the assistant
said. Where templates alter a turn once others follow, its content is looked for, or a marker put in its place.
The tokens found are decoded and compared with the turn's content. What cannot be derived is refused:
a mask of all ones would train on the prompts.
"""

import json
import re
from itertools import pairwise
from os.path import commonprefix
from typing import Any, Literal
from unicodedata import normalize

from dflash_kit.errors import KitError

Message = dict[str, Any]
Span = tuple[int, int]
TrainOn = Literal["all", "last"]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# End tokens and empty thinking tags that a template may add to what the assistant said.
MAX_MARKUP_CHARS = 64
# Stands in for a turn whose place in the rendered conversation is looked for; its private characters occur nowhere else.
# A template that changes letters changes these, too, and so the turn is not found.
MARKER = "\ue000turn\ue000"


def render(tokenizer: Any, messages: list[Message], *, add_generation_prompt: bool, **template_args: Any) -> str:
    """The conversation as text.

    Raises:
        KitError: the tokenizer has no chat template, or the template rejects these messages.
    """
    if not tokenizer.chat_template:
        raise KitError("the target has no chat template; give prompts as plain text (`prompt`), not as `messages`")
    return str(
        _apply_template(
            tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt, **template_args
        )
    )


def _apply_template(tokenizer: Any, messages: list[Message], **settings: Any) -> Any:
    """The template is a program of somebody else's: it may raise anything."""
    try:
        return tokenizer.apply_chat_template(messages, **settings)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise KitError(f"the chat template rejects these messages: {reason}") from error


def encode_prompt(tokenizer: Any, messages: list[Message], **template_args: Any) -> list[int]:
    """Token ids of a conversation that the target is to continue."""
    text = render(tokenizer, messages, add_generation_prompt=True, **template_args)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def require_tools(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
    """Refuse tools, and calls of tools, that the chat template would leave out without a word.

    Raises:
        KitError: the template does not name them.
    """
    called = any(message.get("tool_calls") for message in messages)
    for name in [*(["tools"] if tools else []), *(["tool_calls"] if called else [])]:
        if tokenizer.chat_template and name not in str(tokenizer.chat_template):
            raise KitError(f"the target's chat template has no place for `{name}`; take a target that calls tools")


def encode_conversation(
    tokenizer: Any,
    messages: list[Message],
    eos_token_ids: tuple[int, ...],
    train_on: TrainOn = "all",
    **template_args: Any,
) -> tuple[list[int], list[Span]]:
    """Token ids of a conversation with given responses, and the token ranges [start, end) to learn.

    A range begins with the first token of what the assistant said and ends with the end token that the
    target would say, or with the turn where the template has none. Tokens behind the last range are
    dropped.

    Args:
        tokenizer: the target's.
        messages: the conversation; the assistant has the last word.
        eos_token_ids: tokens that end a response.
        train_on: ``all``: a range for each of the assistant's turns; ``last``: only for the last one.
        **template_args: further arguments of the chat template.

    Raises:
        KitError: the ranges cannot be derived, or do not decode to what the assistant said.
    """
    text = render(tokenizer, messages, add_generation_prompt=False, **template_args)
    turns = assistant_turns(messages)
    learnt = turns if train_on == "all" else turns[-1:]
    if GENERATION_TAG.search(tokenizer.chat_template):
        ids, spans = _tagged_spans(tokenizer, messages, **template_args)
        if len(spans) != len(turns):
            raise KitError(f"{len(spans)} assistant turns were found in the rendered conversation, {len(turns)} exist")
        spans = spans[-len(learnt) :]
    else:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoded["input_ids"])
        chars = [_char_span(tokenizer, messages, i, text, **template_args) for i in learnt]
        spans = [_token_span(encoded["offset_mapping"], span) for span in chars]
    spans = [_settle_end(ids, span, eos_token_ids) for span in spans]
    _check(tokenizer, ids, spans, [messages[i] for i in learnt])
    return ids[: spans[-1][1]], spans


def assistant_turns(messages: list[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _char_span(tokenizer: Any, messages: list[Message], turn: int, text: str, **template_args: Any) -> tuple[int, int]:
    """Where the turn's words stand in the rendered conversation."""
    before = render(tokenizer, messages[:turn], add_generation_prompt=True, **template_args)
    after = render(tokenizer, messages[: turn + 1], add_generation_prompt=False, **template_args)
    calls = bool(messages[turn].get("tool_calls"))
    is_prefix = text.startswith(before) and text.startswith(after)
    if is_prefix and calls:
        if turn + 1 < len(messages):  # it may be left out, and the next message be alike
            head, _ = _around(tokenizer, messages, turn + 1, **template_args)
            if not (text.startswith(head) and head.startswith(after)):
                raise _not_found(turn)
        return len(before), len(after)
    if calls:
        return _marked_span(tokenizer, messages, turn, text, **template_args)
    # Other messages may hold the same words, and a template may leave the turn out: nothing is taken for the turn that
    # stands behind the place where a marker says that the next message begins.
    head, tail = _around(tokenizer, messages, turn, **template_args)
    next_start = len(text) - len(tail)
    if is_prefix and text.endswith(tail) and len(before) < next_start:
        return len(before), len(after)
    # Some templates render a turn differently once others follow (thinking is dropped): look for its content,
    # behind as much of the generation prompt as the conversation has.
    opening = render(tokenizer, messages[:turn], add_generation_prompt=False, **template_args)
    content = str(messages[turn]["content"]).strip()
    shared_chars = len(commonprefix([text, before]))  # noqa: RUF071 - characters are meant, not path parts
    is_bounded = text.startswith(opening) and head.startswith(opening) and text.endswith(tail)
    start = text.find(content, shared_chars, next_start) if is_bounded else -1
    if not 0 <= start <= shared_chars + _max_added_chars(messages[turn]):
        return _marked_span(tokenizer, messages, turn, text, **template_args)
    return start, start + len(content)


def _marked_span(tokenizer: Any, messages: list[Message], turn: int, text: str, **template_args: Any) -> Span:
    """Where a turn stands of which the content alone is not what was said, or not what is rendered (it calls tools, or
    lost its thinking): what the conversation has in common with one that has a marker in the turn's place."""
    head, tail = _around(tokenizer, messages, turn, **template_args)
    is_around = text.startswith(head) and text.endswith(tail) and len(head) + len(tail) < len(text)
    is_in_order = turn + 1 < len(messages) or len(tail) <= MAX_MARKUP_CHARS  # nothing is said behind the last turn
    if not is_around or not is_in_order:
        raise _not_found(turn)
    return len(head), len(text) - len(tail)


def _around(tokenizer: Any, messages: list[Message], turn: int, **template_args: Any) -> tuple[str, str]:
    """What the template puts in front of a turn's content and behind it, as it does with a marker in its place.

    Raises:
        KitError: it leaves the turn out.
    """
    marked = {key: value for key, value in messages[turn].items() if key != "tool_calls"} | {"content": MARKER}
    with_marker = [*messages[:turn], marked, *messages[turn + 1 :]]
    rendered = render(tokenizer, with_marker, add_generation_prompt=False, **template_args)
    if MARKER not in rendered:
        raise _not_found(turn)
    head, _, tail = rendered.partition(MARKER)
    return head, tail


def _not_found(turn: int) -> KitError:
    return KitError(
        f"message {turn + 1}: what the assistant said cannot be found in the rendered conversation; pass "
        "--enable_thinking if the response holds thinking, --train_on last if the template alters earlier turns, or "
        "use a template with {% generation %} tags"
    )


def _token_span(offsets: list[tuple[int, int]], chars: Span) -> Span:
    """Tokens that lie wholly inside a character range; one that straddles its start belongs to the prompt."""
    inside = [i for i, (start, end) in enumerate(offsets) if start >= chars[0] and end <= chars[1] and end > start]
    if not inside:
        raise KitError("an assistant message has no tokens; drop it from the conversation")
    return inside[0], inside[-1] + 1


def _settle_end(ids: list[int], span: Span, eos_token_ids: tuple[int, ...]) -> Span:
    """End the range with its end token: what a template adds behind it, the target never says."""
    start, end = span
    inside = [i for i in range(start, end) if ids[i] in eos_token_ids]
    if inside:
        return start, inside[-1] + 1
    return start, end + (end < len(ids) and ids[end] in eos_token_ids)


def _tagged_spans(tokenizer: Any, messages: list[Message], **template_args: Any) -> tuple[list[int], list[Span]]:
    encoded = _apply_template(
        tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **template_args
    )
    mask = [0, *encoded["assistant_masks"], 0]
    starts = [i for i in range(len(mask) - 1) if mask[i] < mask[i + 1]]
    ends = [i for i in range(len(mask) - 1) if mask[i] > mask[i + 1]]
    return list(encoded["input_ids"]), list(zip(starts, ends, strict=True))


def _check(tokenizer: Any, ids: list[int], spans: list[Span], said: list[Message]) -> None:
    """Decode the ranges: each must hold what the assistant said in that turn, and nothing of the prompt."""
    if not spans:
        raise KitError("no assistant turns were found in the rendered conversation")
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise KitError("two turns were found in one place or out of order; use a template with {% generation %} tags")
    if sum(end - start for start, end in spans) >= len(ids):
        raise KitError("the loss mask would cover the whole conversation; the chat template marks no prompt")
    for (start, end), message in zip(spans, said, strict=True):
        decoded = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        got, content = (normalize("NFC", text.strip()) for text in (decoded, str(message["content"])))
        if content not in got:  # the template may have dropped the thinking of an earlier turn
            content = content.rpartition("</think>")[2].strip()
        missing = [name for name in _called_names(message) if name not in got]
        if content not in got or missing or len(got) - len(content) > _max_added_chars(message):
            raise KitError(
                f"the loss mask decodes to {got[:60]!r}... where the assistant said "
                f"{(', '.join(missing) or content)[:60]!r}...; use a chat template with {{% generation %}} tags"
            )


def _called_names(message: Message) -> list[str]:
    """Names of the functions that a turn calls, and of their arguments."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [name for function in functions for name in (function["name"], *function["arguments"])]


def _max_added_chars(message: Message) -> int:
    """Characters that a template may put around a turn's content: its thinking, its calls of tools, some markup."""
    calls = json.dumps(message.get("tool_calls") or [], indent=4)
    num_marks = 1 + len(_called_names(message))
    return len(str(message.get("reasoning_content") or "")) + len(calls) + num_marks * MAX_MARKUP_CHARS
