"""What a run will do, settled before any engine starts: which samples, how many tokens, bytes, and what is left out."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec

from .conversations import Line
from .prompts import LineErrors, Sample, answer_ids, is_given, sample_id, to_sample
from .spans import TrainOn


@dataclass(slots=True)
class Plan:
    """Samples of a run, and what became of the other lines of the inputs."""

    samples: list[Sample] = field(default_factory=list)
    """Still to be done, in the order of the inputs."""
    num_asked: int = 0
    """Lines considered, malformed ones included, those of other processes left out."""
    num_done: int = 0
    """Rows that are in the shards already."""
    drops: Counter[str] = field(default_factory=Counter)
    """Lines left out, by reason."""
    spool_bytes: int | None = None
    """Bytes that a spool's shards may take at once; None: all shards stay."""

    def take(self, sample: Sample, *, is_done: bool) -> None:
        """Count a sample whose row is in the shards already, or note it as still to be done."""
        if is_done:
            self.num_done += 1
        else:
            self.samples.append(sample)

    def take_done(self, done_ids: set[str]) -> None:
        """Leave out samples whose rows turned out to be in the shards already."""
        todo = [sample for sample in self.samples if sample.id not in done_ids]
        self.num_done += len(self.samples) - len(todo)
        self.samples = todo

    @property
    def max_tokens(self) -> int:
        """Tokens to be stored at most."""
        return sum(sample.max_tokens for sample in self.samples)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sample at most."""
        return max((sample.max_tokens for sample in self.samples), default=0)

    def max_bytes(self, header: ShardsHeader) -> int:
        """Disk space that the run needs at most (a row's metadata takes about 1 KiB)."""
        num_bytes = self.max_tokens * header.bytes_per_token + 2048 * len(self.samples)
        return num_bytes if self.spool_bytes is None else min(num_bytes, self.spool_bytes)

    def summary(self) -> dict[str, Any]:
        """What the manifest and the last line of output say about the lines."""
        return {"asked": self.num_asked, "dropped": dict(self.drops)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Which samples are wanted, and how many; lengths are tokens of what is fed (see ``Sample.token_ids``)."""

    limit: int | None = None
    """Samples at most, over all processes, those done already included."""
    skip_long: bool = False
    """Drop samples longer than the context instead of refusing them."""
    min_tokens: int | None = None
    """Shorter samples are dropped."""
    max_tokens: int | None = None
    """Longer samples are dropped."""
    num_samples: int = 1
    """Answers to each prompt."""


def make_plan(
    lines: Iterable[Line],
    tokenizer: Any,
    spec: TargetSpec,
    header: ShardsHeader,
    done_ids: set[str],
    *,
    limits: Limits | None = None,
    generate: bool | None,
    template_args: dict[str, Any],
    train_on: TrainOn = "all",
    errors: LineErrors | None = None,
    is_mine: Callable[[str], bool] = lambda sample_id: True,
    counts_unread: bool = True,
) -> Plan:
    """Tokenize the lines and sort out what is done, repeated (in whichever input), too short or too long.

    Where several processes share a file, each line counts in one of their plans: the one that takes its sample.

    Args:
        lines: lines of the inputs.
        tokenizer: the target's.
        spec: the target.
        header: of the shards to write; its sampling parameters are used.
        done_ids: ids that are in the shards already.
        limits: which samples are wanted; None: all.
        generate: see ``to_sample``.
        template_args: further arguments of the chat template.
        train_on: see ``to_sample``.
        errors: takes the errors of malformed lines, and has taken those of reading; None: the first is raised.
        is_mine: whether this process takes the sample of an id.
        counts_unread: whether this process counts the lines that could not be read, of which nobody knows whose they are.

    Raises:
        KitError: a malformed line, or a sample longer than the context.
    """
    plan, limits, errors = Plan(), limits or Limits(), errors or LineErrors()
    seen: set[str] = set()
    target = {"config": spec.config_hash, "tokenizer": spec.tokenizer_hash, "template": spec.template_hash}
    asked: dict[str, Any] = {
        "sampling": header.sampling,
        "target": {**target, "revision": spec.revision},
        "generate": generate,
        "train_on": train_on,
    }
    num_malformed = num_rendering = 0  # lines of this process; lines that could be read but not rendered
    for line in lines:
        line_id = sample_id(line, **asked)
        ids = answer_ids(line_id, 1 if is_given(line, generate) else limits.num_samples)
        mine = {row_id for row_id in ids if is_mine(row_id)}
        if not mine and limits.limit is None:  # where samples are counted, others' lines have to be rendered, too
            continue
        counts = line_id in mine
        try:
            sample = to_sample(
                line,
                tokenizer,
                **asked,
                eos_token_ids=spec.eos_token_ids,
                vocab_size=spec.vocab_size,
                max_tokens=spec.max_position_embeddings,
                template_args=template_args,
            )
        except KitError as error:
            errors.take(error)
            num_rendering += 1
            num_malformed += counts
            continue
        plan.num_asked += counts
        reason = "duplicate" if line_id in seen else _reason_to_drop(sample, spec, limits)
        if reason:
            plan.drops.update([reason] if counts else [])
            continue
        num_left = None if limits.limit is None else limits.limit - len(seen)
        wanted = sample.repeated(limits.num_samples)[:num_left]
        seen.update(one.id for one in wanted)
        for one in wanted:
            if one.id in mine:
                plan.take(one, is_done=one.id in done_ids)
        if len(seen) == limits.limit:
            break
    if counts_unread:
        num_malformed += errors.num_lines - num_rendering
    plan.num_asked += num_malformed
    if num_malformed:
        plan.drops["malformed"] = num_malformed
    return plan


def _reason_to_drop(sample: Sample, spec: TargetSpec, limits: Limits) -> str | None:
    num_tokens = len(sample.token_ids)
    if limits.min_tokens is not None and num_tokens < limits.min_tokens:
        return "under_min_tokens"
    if limits.max_tokens is not None and num_tokens > limits.max_tokens:
        return "over_max_tokens"
    if num_tokens < spec.max_position_embeddings:  # the engine needs room for one more token
        return None
    if not limits.skip_long:
        raise KitError(
            f"{sample.source}: {num_tokens} tokens are more than the target's context of "
            f"{spec.max_position_embeddings}; shorten the conversation or pass --skip_long to leave such lines out"
        )
    return "too_long"
