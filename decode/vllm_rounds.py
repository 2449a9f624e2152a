"""How many draft tokens each round of vLLM's chain accepted.

vLLM hands out the tokens of each step, so every round is known: a step's tokens are the accepted draft tokens and the bonus
token. Only the last step may be cut, at an end token or the length limit; vLLM's counters, which count before the cut,
say whether it was.
"""

from dataclasses import dataclass
from typing import Any

COUNTER = "vllm:spec_decode_num_"


@dataclass(frozen=True, slots=True)
class Counters:
    """What vLLM's metrics counted: rounds with drafts, accepted draft tokens, and those by position."""

    drafts: int
    accepted: int
    by_position: tuple[int, ...]

    @classmethod
    def read(cls, metrics: list[Any]) -> "Counters":
        """From ``LLM.get_metrics``; zeros where there is no drafter."""
        found = {m.name: m for m in metrics if m.name.startswith(COUNTER)}

        def value(name: str) -> int:
            return int(found[COUNTER + name].value) if COUNTER + name in found else 0

        vector = found.get(COUNTER + "accepted_tokens_per_pos")
        return cls(value("drafts"), value("accepted_tokens"), tuple(vector.values) if vector is not None else ())

    def since(self, earlier: "Counters") -> "Counters":
        """What was counted after ``earlier``."""
        pairs = zip(self.by_position, earlier.by_position, strict=True)
        return Counters(
            self.drafts - earlier.drafts,
            self.accepted - earlier.accepted,
            tuple(ours - before for ours, before in pairs),
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of one response."""

    num_accepted: tuple[int, ...]
    is_cut: bool
    """Whether an end token or the length limit ended the last round inside its accepted path."""
    agrees: bool
    """Whether vLLM's counters say the same."""


def read_rounds(step_tokens: list[int], counted: Counters) -> Rounds:
    """The rounds behind the tokens of each step.

    Args:
        step_tokens: tokens that each step added to the response; the first step is the prefill's.
        counted: vLLM's counters over the same steps.
    """
    rounds = step_tokens[1:]
    if not rounds or not counted.by_position:
        return Rounds(tuple(n - 1 for n in rounds), is_cut=False, agrees=counted.drafts == 0)
    before = [n - 1 for n in rounds[:-1]]
    uncut = counted.accepted - sum(before)  # draft tokens that the last round accepted before it was cut
    accepted = [*before, uncut]
    by_position = tuple(sum(a >= k for a in accepted) for k in range(1, len(counted.by_position) + 1))
    # Where the context or the limit leaves no room, vLLM drafts nothing: a round that accepts none.
    agrees = (
        counted.drafts <= len(rounds)
        and counted.by_position == by_position
        and rounds[-1] - 1 <= uncut <= len(by_position)
    )
    is_cut = agrees and uncut >= rounds[-1]
    return Rounds((*before, rounds[-1] - (not is_cut)), is_cut, agrees)
