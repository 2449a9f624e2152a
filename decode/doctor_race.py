"""Replay of all hypotheses, the unlikely ones on few tokens only.

A change that mends a drafter shows in the first tokens of each answer, so all are tried on those; the best go on to more tokens, the
best of them to whole answers. Nothing is drawn at random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflash_kit.acceptance import Acceptance, PairedDifference, RoundLog, paired_difference, summarise
from dflash_kit.drafter import Drafter
from dflash_kit.replay import methods, replay_rows
from dflash_kit.target_ends import TargetEnds

from .altered_drafter import AlteredDrafter, Change, altered_ends, altered_row
from .doctor_answers import Answer
from .hypotheses import Hypothesis

STAGES = ((8, 8), (24, 3))
"""Tokens of each answer that are replayed, and how many alternatives go on from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One hypothesis, on the tokens that it got to."""

    hypothesis: Hypothesis
    tokens: int
    """Of each answer, at most."""
    is_whole: bool
    """Whether those were whole answers."""
    acceptance: Acceptance
    gain: PairedDifference | None
    """Over the drafter as configured, on as many tokens; None without a round."""

    @property
    def length(self) -> float:
        """Acceptance length of the chain, pooled; 0 without a round."""
        return self.acceptance.acceptance_length_pooled or 0.0


class Race:
    """Measures hypotheses.

    Args:
        drafter: as its checkpoint says.
        ends: the target's.
        answers: form of the prompts → answers.
        eos_token_ids: that end answers.
        on_replay: called before each replay with tokens and the change's name.
    """

    def __init__(
        self,
        drafter: Drafter,
        ends: TargetEnds,
        answers: Mapping[str, Sequence[Answer]],
        eos_token_ids: Sequence[int],
        on_replay: Callable[[int, str], None] = lambda tokens, name: None,
    ) -> None:
        self.drafter, self.ends, self.answers = drafter, ends, answers
        self._eos_token_ids, self._on_replay = eos_token_ids, on_replay

    def run(
        self, hypotheses: Sequence[Hypothesis], max_new_tokens: int, stages: Sequence[tuple[int, int]] = STAGES
    ) -> tuple[Acceptance, list[Measured]]:
        """Acceptance as configured, and all hypotheses: those on whole answers first, the best first.

        Args:
            hypotheses: to try.
            max_new_tokens: tokens of a whole answer.
            stages: tokens of each answer before that, and how many alternatives go on from there.
        """
        field, out = list(hypotheses), list[Measured]()
        for tokens, num_kept in (*stages, (max_new_tokens, 0)):
            is_whole = tokens >= max_new_tokens
            baseline = self._replay(Change(config=self.drafter.config), tokens, "as configured")
            found = [self._measure(hypothesis, tokens, baseline, is_whole=is_whole) for hypothesis in field]
            found.sort(key=lambda measured: -measured.length)
            kept = 0 if is_whole else num_kept
            field, out = [measured.hypothesis for measured in found[:kept]], found[kept:] + out
            if is_whole:
                break
        return summarise(baseline, self.drafter.config.num_draft_tokens), out

    def _measure(
        self, hypothesis: Hypothesis, tokens: int, baseline: Sequence[RoundLog], *, is_whole: bool
    ) -> Measured:
        logs = self._replay(hypothesis.change, tokens, hypothesis.name)
        return Measured(
            hypothesis=hypothesis,
            tokens=tokens,
            is_whole=is_whole,
            acceptance=summarise(logs, self.drafter.config.num_draft_tokens),
            gain=paired_difference(logs, baseline),
        )

    def _replay(self, change: Change, tokens: int, name: str) -> list[RoundLog]:
        """Rounds of the chain, one log an answer."""
        self._on_replay(tokens, name)
        drafter, ends = AlteredDrafter.of(self.drafter, change), altered_ends(self.ends, change)
        (chain,) = methods(drafter.config, [])
        rows = (altered_row(answer, change) for answer in self.answers[change.form])
        logs: list[RoundLog] = []
        for row, found in replay_rows(
            drafter, ends, rows, [], eos_token_ids=self._eos_token_ids, max_new_tokens=tokens
        ):
            logs += found[chain] or [RoundLog(prompt_id=row.id, num_accepted=())]
        return logs


def num_replays(num_hypotheses: int, max_new_tokens: int) -> int:
    """Replays of a race, the configured drafter's included."""
    total, left = 0, num_hypotheses
    for tokens, num_kept in (*STAGES, (max_new_tokens, 0)):
        total += left + 1
        if tokens >= max_new_tokens:
            break
        left = min(left, num_kept)
    return total
