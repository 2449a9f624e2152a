"""Prompts: what a line of the inputs becomes before an engine sees it, tokens and what of them is supervised."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.target import digest

from .conversations import Conversation, Line, PlainText, Tokens, to_line
from .readers import CONTENT_COLUMNS, read_records
from .spans import Span, TrainOn, encode_conversation, encode_prompt, require_tools

NUM_NAMED_ERRORS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What an engine is asked to do for one row."""

    id: str
    """Stable hash of what is asked, of whom and how."""
    source: str
    """``file:line`` or ``file row number``, for messages."""
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

    def repeated(self, num_samples: int) -> "list[Sample]":
        """The sample and further answers to it, each with an id, and so a seed, of its own; one for a given response."""
        if self.loss_spans is not None:
            return [self]
        return [replace(self, id=each) for each in answer_ids(self.id, num_samples)]


@dataclass(slots=True)
class LineErrors:
    """Malformed lines: the first one stops the run, or they are counted and the first few are named on stderr."""

    skip: bool = False
    """Count them instead of stopping."""
    num_lines: int = field(default=0, init=False)
    """Lines that were left out."""

    def take(self, error: KitError) -> None:
        """Note the error of a line; raises it unless such lines are to be skipped."""
        if not self.skip:
            raise error
        self.num_lines += 1
        if self.num_lines <= NUM_NAMED_ERRORS:
            print(f"skipped: {' '.join(str(error).split())}", file=sys.stderr)


def read_prompts(
    inputs: str | Path, *, prompt_column: str | None = None, errors: LineErrors | None = None
) -> Iterator[Line]:
    """Read inputs line by line.

    Args:
        inputs: files, folders, globs and hub names, comma-separated (see ``readers``).
        prompt_column: the column that holds the prompt or the messages, in place of those that are known.
        errors: takes the errors of malformed lines; None: the first one is raised.

    Raises:
        KitError: an input is missing, all are empty, or a line is malformed (with its number).
    """
    errors = errors or LineErrors()
    is_empty = True
    for record in read_records(inputs, (prompt_column,) if prompt_column else CONTENT_COLUMNS):
        is_empty = False
        try:
            line = to_line(record, prompt_column)
        except KitError as error:
            errors.take(error)
            continue
        yield line
    if is_empty:
        raise KitError(f"prompts file {inputs} is empty; it needs one JSON object a line, with `prompt` or `messages`")


def is_given(line: Line, generate: bool | None) -> bool:
    """Whether a line's response is taken as it stands, not answered by the target."""
    return not isinstance(line, Conversation) or (line.has_response and not generate)


def sample_id(
    line: Line, *, sampling: dict[str, Any], target: dict[str, Any], generate: bool | None, train_on: TrainOn
) -> str:
    """Id of the sample that a line becomes, without rendering it; arguments as in ``to_sample``."""
    given = is_given(line, generate)
    if isinstance(line, Conversation) and not given:
        line = line.without_response()
    asked = {**_asked(line), "sampling": sampling, "target": target, "given": given}
    if train_on != "all" and given and isinstance(line, Conversation):
        asked["train_on"] = train_on
    return digest(asked)


def answer_ids(first_id: str, num_samples: int) -> list[str]:
    """Ids of several answers to a sample: its own and others."""
    return [first_id, *(digest({"sample": first_id, "answer": index}) for index in range(1, num_samples))]


def answer_seed(seed: int, row_id: str) -> int:
    """Seed of one answer: that of the run, and the sample's own."""
    return (seed + int(row_id[:12], 16)) % 2**31


def to_sample(
    line: Line,
    tokenizer: Any,
    *,
    sampling: dict[str, Any],
    target: dict[str, Any],
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    generate: bool | None,
    max_tokens: int,
    template_args: dict[str, Any],
    train_on: TrainOn = "all",
) -> Sample:
    """Render and tokenize a line.

    Args:
        line: a line of the inputs.
        tokenizer: the target's.
        sampling: sampling parameters as they stand in the shards header; ``max_new_tokens`` is used here.
        target: what identifies the target, part of the id.
        eos_token_ids: tokens that end a response.
        vocab_size: rows of the target's embedding.
        generate: True: answer even what has a response; False: never answer; None: answer what has none.
        max_tokens: tokens of a conversation at most (the target's context); longer samples are for the
            caller.
        template_args: further arguments of the chat template.
        train_on: which of the assistant's turns are supervised where the response is given.

    Raises:
        KitError: naming file and line.
    """
    given = is_given(line, generate)
    if not given and generate is False:
        raise KitError(f"{line.source}: no response is given, and --generate is false")
    if not isinstance(line, Conversation) and generate:
        raise KitError(f"{line.source}: text and input_ids are not answered; leave --generate out")
    spans: list[Span] | None = None
    row_id = sample_id(line, sampling=sampling, target=target, generate=generate, train_on=train_on)
    try:
        if isinstance(line, Conversation):
            line = line if given else line.without_response()
            template_args = _with_tools(line, tokenizer, template_args)
            if given:
                ids, spans = encode_conversation(tokenizer, line.messages, eos_token_ids, train_on, **template_args)
            else:
                ids = _prompt_ids(line, tokenizer, template_args)
        else:
            ids, spans = _fixed_tokens(line, tokenizer, vocab_size)
    except KitError as error:
        raise KitError(f"{line.source}: {error}") from error
    return Sample(
        id=row_id,
        source=line.source,
        token_ids=ids,
        loss_spans=spans,
        max_new_tokens=0 if given else max(0, min(sampling["max_new_tokens"], max_tokens - len(ids))),
    )


def _asked(line: Line) -> dict[str, Any]:
    """What the id says of a line. A change here makes finished shards unusable for their own prompts."""
    if isinstance(line, PlainText):
        return {"text": line.text}
    if isinstance(line, Tokens):
        return {"input_ids": line.token_ids, "loss_spans": line.loss_spans}
    return {"messages": line.messages, **({"tools": line.tools} if line.tools else {})}


def _with_tools(line: Conversation, tokenizer: Any, template_args: dict[str, Any]) -> dict[str, Any]:
    require_tools(tokenizer, line.messages, line.tools)
    return {**template_args, "tools": line.tools} if line.tools else template_args


def _prompt_ids(conversation: Conversation, tokenizer: Any, template_args: dict[str, Any]) -> list[int]:
    if conversation.is_plain and not tokenizer.chat_template:
        return list(tokenizer(conversation.messages[0]["content"], verbose=False)["input_ids"])
    return encode_prompt(tokenizer, conversation.messages, **template_args)


def _fixed_tokens(line: PlainText | Tokens, tokenizer: Any, vocab_size: int) -> tuple[list[int], list[Span]]:
    if isinstance(line, PlainText):
        ids = list(tokenizer(line.text, verbose=False)["input_ids"])
        if len(ids) < 2:
            raise KitError("the text is a single token; at least two are needed, since the first is never predicted")
        return ids, [(1, len(ids))]
    for position, token_id in enumerate(line.token_ids):
        if not 0 <= token_id < vocab_size:
            raise KitError(
                f"`input_ids` holds {token_id} at position {position}, outside of the target's vocabulary "
                f"0..{vocab_size - 1}; use the target's own tokenizer"
            )
    return line.token_ids, line.loss_spans
