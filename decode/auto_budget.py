"""The budget "auto": each round verifies the tree from which the most tokens per second are expected.

A round costs C(n) = draft + verification of n nodes, in seconds measured with this target on this device. It is
expected to give 1 + ΣP tokens: the bonus token, and each node with the probability P of its path. Nodes come best
first, and the round takes the n with the largest (1 + ΣP) / C(n), 0 among them.

Only sizes that were measured are taken, and these fill the tiles that matrix products compute in: on a CPU 3 rows may take longer
than 4 (anchor and nodes), so what lies between two measured sizes is not known. In the fused engine each size is a graph of its own.

The choice rests on the drafter's distributions, on clocks and on earlier rounds, never on the target's tokens of this round: the
output stays the target's own.

Shape legend: M depths, V vocabulary, n nodes.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from dflash_kit.acceptance import RoundLog
from dflash_kit.tree import Tree, build_tree, empty_tree, path_log_probs

REPETITIONS, REPETITIONS_LARGE = 7, 2
"""Passes of each size in a calibration, and of those above LARGE; the fastest counts, since other work only ever adds."""
LARGE = 32
ROWS = (1, 4, 8, 12, 16, 24, 32, 48, 64)
"""Anchor and nodes of the small trees that are measured; the large ones double."""
FIRST_SIZE = 31
MEMORY_ROUNDS = 32
"""Rounds that the running estimates look back, about."""

Array = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class CostTable:
    """One calibration."""

    context_tokens: int
    """Committed tokens at which it was measured."""
    draft_s: float
    nodes: tuple[int, ...]
    """Sizes of the trees that were verified, ascending from 0."""
    verify_s: tuple[float, ...]
    """Seconds of verifying each and choosing the target's tokens."""

    def verify_s_by_nodes(self) -> Array:
        """Seconds for 0 … nodes[-1] nodes: linear between the measured sizes."""
        return np.interp(np.arange(self.nodes[-1] + 1), self.nodes, self.verify_s)

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds, for the report."""
        return {
            "context_tokens": self.context_tokens,
            "draft_ms": 1e3 * self.draft_s,
            "nodes": list(self.nodes),
            "verify_ms": [1e3 * seconds for seconds in self.verify_s],
        }


def measure_costs(
    draft: Callable[[], Any],
    verify: Callable[[int], Any],
    *,
    prepare: Callable[[int], Any],
    most_tokens: int,
    context_tokens: int,
    sizes: Sequence[int],
    now_s: Callable[[], float],
) -> CostTable:
    """Time drafts and verifications of growing trees; nothing may be committed by either.

    The ladder ends before a size that cannot pay: all M + 1 tokens from it would come slower than one from no tree.

    Args:
        draft: drafts a block.
        verify: verifies the best n nodes of that draft and chooses the target's tokens.
        prepare: called before each verification of n nodes; not timed.
        most_tokens: that a round can give, M + 1.
        context_tokens: kept in the table.
        sizes: nodes of the trees that are measured, ascending from 0.
        now_s: clock; it must wait for the device.
    """
    sizes, draft_s = list(sizes), float("inf")
    verify_s: dict[int, float] = {}
    for repetition in range(REPETITIONS):
        if repetition == REPETITIONS_LARGE:
            sizes = [size for size in sizes if size <= LARGE]
        start_s = now_s()
        draft()
        draft_s = min(draft_s, now_s() - start_s)
        for size in sizes:
            prepare(size)
            start_s = now_s()
            verify(size)
            seconds = min(verify_s.get(size, float("inf")), now_s() - start_s)
            if size and draft_s + seconds > most_tokens * (draft_s + verify_s[0]):
                sizes = [s for s in sizes if s < size]
                break
            verify_s[size] = seconds
    return CostTable(context_tokens, draft_s, tuple(verify_s), tuple(verify_s.values()))


def ladder(cap: int, small_rows: Sequence[int] = ROWS) -> list[int]:
    """Nodes of the trees that are measured: with the portable engine's rows 0, 3, 7, 11 … and ``cap``.

    Args:
        cap: largest tree.
        small_rows: anchor and nodes of the small ones; beyond the last they double.
    """
    rows = list(small_rows)
    while rows[-1] <= cap:
        rows.append(2 * rows[-1])
    return [*(n - 1 for n in rows if n <= cap), cap]


@dataclass(slots=True)
class RunningCosts:
    """A calibration kept up to date by what the rounds take: machines and contexts change while one decodes."""

    table: CostTable
    fixed_s: float = field(init=False)
    verify_ratio: float = 1.0
    """Seconds of verification over those of the table."""
    rounds: int = 0
    _by_nodes: Array = field(init=False)

    def __post_init__(self) -> None:
        self.fixed_s, self._by_nodes = self.table.draft_s, self.table.verify_s_by_nodes()

    @property
    def max_nodes(self) -> int:
        """Larger trees cannot pay, or are not allowed."""
        return len(self._by_nodes) - 1

    def sizes(self) -> IntArray:
        """Trees that may be taken, ascending."""
        return np.array(self.table.nodes)

    def seconds(self) -> Array:
        """(max_nodes + 1,) of a round with 0 … max_nodes nodes."""
        return self.fixed_s + self.verify_ratio * self._by_nodes

    def observe(self, num_nodes: int, fixed_s: float, verify_s: float) -> None:
        """Take in one round."""
        self.rounds += 1
        weight = 1 / min(self.rounds, MEMORY_ROUNDS)
        self.fixed_s += weight * (fixed_s - self.fixed_s)
        self.verify_ratio += weight * (verify_s / self._by_nodes[num_nodes] - self.verify_ratio)


class AutoBudget:
    """Chooses trees, and remembers what it chose and what rounds cost.

    Args:
        on_calibration: called with every new table.
    """

    def __init__(self, on_calibration: Callable[[CostTable], None] | None = None) -> None:
        self.on_calibration = on_calibration or (lambda table: None)
        self.chosen: list[int] = []
        """Nodes of each round since ``prepare``."""
        self._costs: dict[Hashable, RunningCosts] = {}
        self._current: RunningCosts | None = None
        self._size = FIRST_SIZE

    def prepare(self, kind: Hashable, context_tokens: int, measure: Callable[[], CostTable]) -> None:
        """Begin a response; a kind of decoding is calibrated once for each doubling of the context.

        Args:
            kind: what else costs depend on (sampling, largest tree).
            context_tokens: of the prompt.
            measure: calibrates, if need be.
        """
        key = (kind, context_tokens.bit_length())
        if key not in self._costs:
            self._costs[key] = RunningCosts(measure())
            self.on_calibration(self._costs[key].table)
        self._current, self.chosen = self._costs[key], []

    def tree(self, logits: Tensor) -> Tree:
        """The tree to verify, of draft logits (M, V).

        It is built in pieces, each twice as large as the last, while a larger one could still be worth more.
        """
        assert self._current is not None, "prepare comes first"
        size = min(self._size, self._current.max_nodes)
        while size:
            tree = build_tree(logits, size)
            gains = np.exp(path_log_probs(tree, logits).numpy())
            num_nodes, could_grow = self.choose(expected_tokens(gains))
            if len(tree) < size or not could_grow:
                self._size = max(FIRST_SIZE, min(size, 2 * num_nodes))
                return tree.prefix(num_nodes)
            size = min(2 * size, self._current.max_nodes)
        return empty_tree()

    def sizes(self) -> IntArray:
        """Trees that may be chosen since ``prepare``, ascending."""
        assert self._current is not None, "prepare comes first"
        return self._current.sizes()

    def choose(self, expected: Array, grow_s: float = 0.0) -> tuple[int, bool]:
        """Nodes to verify of a tree that is built, and whether a larger tree might give more tokens a second.

        Args:
            expected: (n + 1,) tokens of a round that verifies its first 0 … n nodes.
            grow_s: seconds of building a larger tree.
        """
        assert self._current is not None, "prepare comes first"
        sizes, seconds = self._current.sizes(), self._current.seconds()
        within, beyond = sizes[sizes < len(expected)], sizes[sizes >= len(expected)]
        rates = expected[within] / seconds[within]
        # A further node gains no more than the last did.
        last_gain = expected[-1] - expected[-2] if len(expected) > 1 else 1.0
        most = expected[-1] + (beyond - len(expected) + 1) * last_gain
        return int(within[rates.argmax()]), bool((most > rates.max() * (seconds[beyond] + grow_s)).any())

    def observe(self, num_nodes: int, fixed_s: float, verify_s: float) -> None:
        """Take in a finished round.

        Args:
            num_nodes: that were verified.
            fixed_s: seconds of what takes as long whatever the tree.
            verify_s: seconds of what grows with it.
        """
        assert self._current is not None
        self.chosen.append(num_nodes)
        self._current.observe(num_nodes, fixed_s, verify_s)


def expected_tokens(gains: Array) -> Array:
    """(n + 1,) tokens of a round that verifies the first 0 … n nodes."""
    return 1 + np.concatenate([[0.0], gains.cumsum()])


def summarise_choices(logs: Sequence[RoundLog]) -> dict[str, Any] | None:
    """Mean, median and histogram of the nodes that rounds verified; None without a round.

    The histogram counts rounds by ranges that double: 0, 1 to 4, 5 to 8, 9 to 16 …
    """
    chosen = np.array([nodes for log in logs for nodes in log.budgets])
    if not len(chosen):
        return None
    edges = [0]
    while edges[-1] < chosen.max():
        edges.append(max(4, 2 * edges[-1]))
    lows = [0, *(edge + 1 for edge in edges[:-1])]
    return {
        "mean": float(chosen.mean()),
        "median": float(np.median(chosen)),
        "histogram": [
            {"from": low, "to": high, "rounds": int(((chosen >= low) & (chosen <= high)).sum())}
            for low, high in zip(lows, edges, strict=True)
        ],
    }
