"""Acceptance and speed of decoding: the only place that computes them.

A round is one draft, one verification and one commit. Its ``num_accepted`` are the draft tokens that entered
the response (0 … B - 1), its acceptance length is ``num_accepted + 1``: the bonus token counts.

The cut round. A round that EOS or the length limit ends inside the accepted path has no bonus token. It
counts whole: its ``num_accepted`` are the draft tokens up to and including the EOS, or up to the limit; its
acceptance length is still ``num_accepted + 1``. Live decoding and replay cut alike; ``rounds_cut`` says how
many there are. So acceptance length = 1 + Σ position rates holds for every set of rounds, in integers, and is
checked.

Speed leaves the prefill and the first token out: tokens/s = tokens after the first / time of all rounds.

Batches. Responses that share a round are each charged their equal share of it: of its seconds, by stage and in total, and of
the round itself. Summed over responses these are the seconds and the rounds of the batch. So tokens/s is the throughput of
the whole batch, and milliseconds per round are those of a round of the batch; ``rounds`` and all acceptance figures still
count every response's own rounds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

AR, CHAIN, DDTREE = "ar", "chain", "ddtree"
DDTREE_AUTO = "ddtree-auto"
"""DDTree whose budget is chosen each round, up to the one that is named."""
MAX_BUDGET = 4096
"""Largest tree: a verification attends from every node to every node, beyond this it takes more memory than the target."""
CUT_REASONS = ("eos", "length")
BOOTSTRAP_RESAMPLES = 2000
BOOTSTRAP_SEED = 0
BOOTSTRAP_PICKS_AT_ONCE = 1 << 22
"""Rows that are drawn at a time, some 40 bytes each: replays may have hundreds of thousands of prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundLog:
    """The rounds of one response. The first token comes from the prefill and belongs to no round."""

    prompt_id: str = ""
    """Turns of one conversation share it; confidence intervals resample prompts, not responses."""
    num_accepted: tuple[int, ...]
    """Draft tokens of each round that entered the response."""
    cut: str | None = None
    """"eos" or "length" where the last round ended inside the accepted path, so without a bonus token."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, summed over the rounds; empty for replay."""
    decode_s: float | None = None
    """Seconds of all rounds together, prefill excluded; None for replay."""
    batch_rounds: float | None = None
    """Its rounds, each divided by the responses that shared it; None: no round was shared."""
    budgets: tuple[int, ...] = ()
    """Nodes that each round verified, where that is chosen by round; else empty."""

    def __post_init__(self) -> None:
        assert self.cut is None or (self.cut in CUT_REASONS and self.num_accepted), (
            self.cut,
            self.num_accepted,
        )

    @property
    def new_tokens(self) -> int:
        """Tokens of the response: the first, the accepted ones, and one bonus token a round (none if cut)."""
        return 1 + sum(self.num_accepted) + len(self.num_accepted) - (self.cut is not None)

    @property
    def rounds_charged(self) -> float:
        """Its share of the rounds that the engine made."""
        return len(self.num_accepted) if self.batch_rounds is None else self.batch_rounds

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {**asdict(self), "num_accepted": list(self.num_accepted), "stage_s": dict(self.stage_s)}
        budgets = list(values.pop("budgets"))
        return values | ({"budgets": budgets} if budgets else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RoundLog":
        """What ``to_dict`` wrote."""
        lists = {"num_accepted": tuple(values["num_accepted"]), "budgets": tuple(values.get("budgets", ()))}
        return cls(**{**values, **lists})


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Summary of many responses decoded by one method at one budget."""

    prompts: int
    """Distinct prompts."""
    responses: int
    """Responses; more than prompts where conversations have several turns."""
    rounds: int
    rounds_cut: dict[str, int]
    """Rounds without a bonus token, by reason."""
    new_tokens: int
    """Tokens of all responses, first tokens included."""
    acceptance_length_pooled: float | None
    """(Σ num_accepted + rounds) / rounds; None without a round."""
    acceptance_length_pooled_ci95: tuple[float, float] | None
    """Percentile bootstrap over prompts; None for fewer than two prompts with rounds."""
    acceptance_length_per_prompt: float | None
    """Mean over responses of each response's own acceptance length; those without a round are left out."""
    acceptance_length_per_prompt_ci95: tuple[float, float] | None
    position_rates: tuple[float, ...]
    """Share of rounds in which the draft token at position k = 1 … B - 1 was accepted."""
    ms_per_round: dict[str, float]
    """Milliseconds by stage, and ``total``, of a round of the whole batch; empty for replay."""
    responses_per_round: float | None
    """Responses that shared a round, on average; None without a round."""
    tokens_per_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def speedup_over(self, baseline: "Acceptance") -> float | None:
        """Ratio of tokens per second to those of ``baseline``; None where one of them has no time."""
        if not self.tokens_per_s or not baseline.tokens_per_s:
            return None
        return self.tokens_per_s / baseline.tokens_per_s


def summarise(logs: Iterable[RoundLog], num_draft_tokens: int) -> Acceptance:
    """Acceptance and speed of one method at one budget.

    Args:
        logs: one per response.
        num_draft_tokens: B - 1, the deepest position a round can accept; 0 for autoregressive decoding.
    """
    logs = list(logs)
    accepted = [a for log in logs for a in log.num_accepted]
    rounds = len(accepted)
    bad = [a for a in accepted if not 0 <= a <= num_draft_tokens]
    assert not bad, f"num_accepted {bad[:3]} outside 0..{num_draft_tokens}: a bug of the engine"
    counts = [sum(a >= k for a in accepted) for k in range(1, num_draft_tokens + 1)]
    assert sum(counts) == sum(accepted), "position counts must add up to the accepted tokens"
    pooled_ci, per_prompt_ci = _bootstrap(logs)
    lengths = [_length(log.num_accepted) for log in logs if log.num_accepted]
    return Acceptance(
        prompts=len({log.prompt_id for log in logs}),
        responses=len(logs),
        rounds=rounds,
        rounds_cut=dict(Counter(log.cut for log in logs if log.cut is not None)),
        new_tokens=sum(log.new_tokens for log in logs),
        acceptance_length_pooled=_length(accepted) if rounds else None,
        acceptance_length_pooled_ci95=pooled_ci,
        acceptance_length_per_prompt=sum(lengths) / len(lengths) if lengths else None,
        acceptance_length_per_prompt_ci95=per_prompt_ci,
        position_rates=tuple(count / rounds for count in counts) if rounds else (0.0,) * num_draft_tokens,
        ms_per_round=_ms_per_round(logs),
        responses_per_round=rounds / math.fsum(log.rounds_charged for log in logs) if rounds else None,
        tokens_per_s=_tokens_per_s(logs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """How much longer one drafter's rounds are than another's on the same prompts."""

    prompts: int
    """Distinct prompts on which both have rounds; only these count."""
    difference: float
    """Pooled acceptance length of the first less that of the second."""
    difference_ci95: tuple[float, float] | None
    """Percentile bootstrap that draws a prompt for both at once; None for fewer than two prompts."""
    difference_ci99: tuple[float, float] | None
    confidence: float | None
    """Share of the bootstrap samples in which the first one's rounds are longer."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def paired_difference(ours: Iterable[RoundLog], theirs: Iterable[RoundLog]) -> PairedDifference | None:
    """Difference of pooled acceptance lengths over the prompts that both have rounds of; None without any.

    Prompts differ more than drafters do, so pairing them gives a much narrower interval than two of one drafter each.
    """
    first, second = _prompt_sums(ours), _prompt_sums(theirs)
    common = [name for name in first if name in second]
    if not common:
        return None
    table = np.array([[*first[name][:2], *second[name][:2]] for name in common])

    def differences(totals: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        return np.asarray(totals[..., 0] / totals[..., 1] - totals[..., 2] / totals[..., 3])

    samples = differences(_resampled_sums(table)) if len(common) > 1 else None
    return PairedDifference(
        prompts=len(common),
        difference=float(differences(table.sum(axis=0))),
        difference_ci95=None if samples is None else _percentiles(samples),
        difference_ci99=None if samples is None else _percentiles(samples, share=0.99),
        confidence=None if samples is None else float((samples > 0).mean()),
    )


def require_identity(acceptance_length_pooled: float | None, position_rates: Sequence[float]) -> None:
    """Refuse numbers in which acceptance length is not 1 + Σ position rates (before a report is written).

    Raises:
        ValueError: the two disagree by more than rounding.
    """
    expected = 1 + math.fsum(position_rates)
    if acceptance_length_pooled is not None and not math.isclose(acceptance_length_pooled, expected, rel_tol=1e-9):
        raise ValueError(f"acceptance length {acceptance_length_pooled} is not 1 + Σ position rates = {expected}")


def _length(num_accepted: Sequence[int]) -> float:
    return 1 + sum(num_accepted) / len(num_accepted)


def _bootstrap(logs: Sequence[RoundLog]) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """95 % percentile intervals of the pooled and of the per-response mean, resampling whole prompts."""
    sums = _prompt_sums(logs)
    if len(sums) < 2:
        return None, None
    totals = _resampled_sums(np.array(list(sums.values())))
    pooled, per_prompt = totals[:, 0] / totals[:, 1], totals[:, 2] / totals[:, 3]
    return _percentiles(pooled), _percentiles(per_prompt)


def _prompt_sums(logs: Iterable[RoundLog]) -> dict[str, list[float]]:
    """Of each prompt with rounds: tokens, rounds, sum of its responses' acceptance lengths, responses."""
    sums: dict[str, list[float]] = {}
    for log in logs:
        if log.num_accepted:
            entry = sums.setdefault(log.prompt_id, [0.0, 0.0, 0.0, 0.0])
            tokens = sum(log.num_accepted) + len(log.num_accepted)
            for i, value in enumerate((tokens, len(log.num_accepted), _length(log.num_accepted), 1)):
                entry[i] += value
    return sums


def _resampled_sums(table: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Column sums of bootstrap samples of the rows (prompts), one a row."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    at_once = max(1, BOOTSTRAP_PICKS_AT_ONCE // len(table))
    sizes = [min(at_once, BOOTSTRAP_RESAMPLES - start) for start in range(0, BOOTSTRAP_RESAMPLES, at_once)]
    return np.concatenate([table[generator.integers(len(table), size=(n, len(table)))].sum(axis=1) for n in sizes])


def _percentiles(values: "np.ndarray[Any, Any]", share: float = 0.95) -> tuple[float, float]:
    low, high = np.percentile(values, [50 * (1 - share), 50 * (1 + share)])
    return float(low), float(high)


def _ms_per_round(logs: Sequence[RoundLog]) -> dict[str, float]:
    rounds = math.fsum(log.rounds_charged for log in logs)
    if not rounds or any(log.decode_s is None for log in logs):
        return {}
    stages: Counter[str] = Counter()
    for log in logs:
        stages.update(log.stage_s)
    total_s = sum(log.decode_s or 0.0 for log in logs)
    return {stage: 1e3 * seconds / rounds for stage, seconds in [*stages.items(), ("total", total_s)]}


def _tokens_per_s(logs: Sequence[RoundLog]) -> float | None:
    if not logs or any(log.decode_s is None for log in logs):
        return None
    seconds = sum(log.decode_s or 0.0 for log in logs)
    return sum(log.new_tokens - 1 for log in logs) / seconds if seconds else None
