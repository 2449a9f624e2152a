"""What a run will do, settled before any engine starts: which samples, how many tokens, bytes, and what is left out."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TargetSpec

from .prompts import Conversation, Sample, sample_id, to_sample


@dataclass(slots=True)
class Plan:
    """Samples of a run, and what became of the other lines of the prompts file."""

    samples: list[Sample] = field(default_factory=list)
    """Still to be done, in the order of the file."""
    num_asked: int = 0
    """Lines considered, those of other processes left out."""
    num_done: int = 0
    """Rows that are in the shards already."""
    drops: Counter[str] = field(default_factory=Counter)
    """Lines left out, by reason."""

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
        return self.max_tokens * header.bytes_per_token + 2048 * len(self.samples)

    def summary(self) -> dict[str, Any]:
        """What the manifest and the last line of output say about the lines."""
        return {"asked": self.num_asked, "dropped": dict(self.drops)}


def make_plan(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    spec: TargetSpec,
    header: ShardsHeader,
    done_ids: set[str],
    *,
    limit: int | None,
    generate: bool | None,
    skip_long: bool,
    template_args: dict[str, Any],
    is_mine: Callable[[str], bool] = lambda sample_id: True,
) -> Plan:
    """Tokenize the conversations and sort out what is done, repeated, or too long.

    Where several processes share a file, each line counts in one of their plans: the one that takes its sample.

    Args:
        conversations: lines of the prompts file.
        tokenizer: the target's.
        spec: the target.
        header: of the shards to write; its sampling parameters are used.
        done_ids: ids that are in the shards already.
        limit: samples at most, over all processes, those done already included.
        generate: see ``to_sample``.
        skip_long: drop samples longer than the context instead of refusing them.
        template_args: further arguments of the chat template.
        is_mine: whether this process takes the sample of an id.

    Raises:
        KitError: a malformed line, or a sample longer than the context.
    """
    plan = Plan()
    seen: set[str] = set()
    target = {"config": spec.config_hash, "tokenizer": spec.tokenizer_hash, "template": spec.template_hash}
    asked: dict[str, Any] = {
        "sampling": header.sampling,
        "target": {**target, "revision": spec.revision},
        "generate": generate,
    }
    # Where others' lines end the file for us, we have to know which of them are left out.
    needs_all = limit is not None and skip_long
    for conversation in conversations:
        row_id = sample_id(conversation, **asked)
        takes = is_mine(row_id)
        plan.num_asked += takes
        if row_id in seen:
            plan.drops.update(["duplicate"] if takes else [])
        elif not takes and not needs_all:
            seen.add(row_id)
        else:
            sample = to_sample(
                conversation,
                tokenizer,
                **asked,
                eos_token_ids=spec.eos_token_ids,
                max_tokens=spec.max_position_embeddings,
                template_args=template_args,
            )
            if _is_too_long(sample, spec, skip_long):
                plan.drops.update(["too_long"] if takes else [])
            else:
                seen.add(row_id)
                if takes:
                    plan.take(sample, is_done=row_id in done_ids)
        if len(seen) == limit:
            break
    return plan


def _is_too_long(sample: Sample, spec: TargetSpec, skip_long: bool) -> bool:
    if len(sample.token_ids) < spec.max_position_embeddings:  # the engine needs room for one more token
        return False
    if not skip_long:
        raise KitError(
            f"{sample.source}: {len(sample.token_ids)} tokens are more than the target's context of "
            f"{spec.max_position_embeddings}; shorten the conversation or pass --skip_long to leave such lines out"
        )
    return True
