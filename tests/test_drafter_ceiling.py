"""The ceiling of drafting: a bound is never below what the best tree holds, listed in full for a small target."""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from drafter_ceiling import hops, least_counts

VOCABULARY, DEPTHS = 4, 3


def test_bound_is_above_the_best_tree() -> None:
    generator = torch.Generator().manual_seed(0)
    num_equal = num_above = 0
    for _ in range(60):
        # A target of its own distribution behind each prefix of the next three tokens.
        rows = torch.randn(1 + 4 + 16, VOCABULARY, generator=generator).mul(2).log_softmax(-1).double().tolist()

        def behind(path: tuple[int, ...], rows: list[list[float]] = rows) -> list[float]:
            return rows[0] if not path else rows[1 + path[0]] if len(path) == 1 else rows[5 + 4 * path[0] + path[1]]

        scores = {
            path: sum(behind(path[:k])[path[k]] for k in range(depth))
            for depth in range(1, DEPTHS + 1)
            for path in product(range(VOCABULARY), repeat=depth)
        }
        order = sorted(scores, key=lambda path: -scores[path])
        said = tuple(int(torch.multinomial(torch.tensor(behind(())).exp(), 1, generator=generator)) for _ in range(3))
        along = torch.tensor([behind(said[:k]) for k in range(DEPTHS)])
        own = torch.tensor([0.0, *(along[k][said[k]] for k in range(DEPTHS))]).double()
        top = torch.cat([along[:1], along]).double().sort(-1, descending=True).values
        least = least_counts(own, top, DEPTHS)[0].tolist()
        assert least == sorted(least)
        for depth in range(1, DEPTHS + 1):
            place = order.index(said[:depth]) + 1
            assert least[depth - 1] <= place
            num_equal += least[depth - 1] == place
            num_above += least[depth - 1] < place
    assert num_equal > 60
    assert num_above > 20


def test_an_answer_ends_its_last_round() -> None:
    counts = least_counts(torch.zeros(3).double(), torch.zeros(3, 5).double(), 4)
    assert counts.shape == (2, 4)
    assert (counts < 10**9).sum(1).tolist() == [2, 1]
    assert hops([2, 0, 1, 0]) == [2, 0]
