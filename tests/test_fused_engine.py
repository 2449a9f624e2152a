"""The fused engine gives the rounds of the portable one: the same tokens, acceptance and cuts."""

import itertools

import pytest
from test_fused_target import TAPS, prompt, tiny_drafter, tiny_model

from decode import auto_round, fused_round
from decode.auto_budget import AutoBudget, CostTable
from decode.auto_round import AutoRound
from decode.engine import Engine, Method
from decode.fused_engine import FusedEngine, cut_accepted, reason_against
from decode.sampling import GREEDY
from decode.target_runner import TargetRunner
from dflash_kit.acceptance import DDTREE_AUTO
from dflash_kit.errors import KitError
from dflash_kit.target_ends import TargetEnds
from helpers import HAS_GPU

METHODS = [Method("ar", 0), Method("chain", 5), Method("ddtree", 7), Method("ddtree", 60)]
AUTO = Method(DDTREE_AUTO, 60)
EOS = (3, 40)


@pytest.fixture(scope="module")
def engines():
    """Both engines over the same weights; the portable one has copies, since fusing works in place."""
    settings = {"eos_token_ids": EOS, "max_context": 200}
    model = tiny_model()
    portable = Engine(TargetRunner(model, TAPS), tiny_drafter(), TargetEnds.from_model(model), **settings)
    return portable, FusedEngine(tiny_model(), tiny_drafter(), max_budget=60, **settings)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name}-{method.budget}")
def test_the_same_rounds_as_the_portable_engine(engines, method):
    cuts, accepted = set(), 0
    for seed in range(30):
        ids = prompt(5 + 4 * seed, seed).tolist()
        limit = 2 + seed * 5 % 29
        want, got = (engine.decode(engine.prefill(ids, limit, 60), method) for engine in engines)
        assert got.token_ids == want.token_ids
        assert (got.log.num_accepted, got.log.cut) == (want.log.num_accepted, want.log.cut)
        cuts.add(got.log.cut)
        accepted += sum(got.log.num_accepted)
    if method.budget == 60:  # of 97 tokens, so that acceptance is common
        assert accepted > 15
        assert cuts == {None, "eos", "length"}


def test_one_prefill_serves_all_methods_in_any_order(engines):
    _, fused = engines
    methods = [*METHODS, AUTO]
    prefix = fused.prefill(prompt(30).tolist(), 40, 60)
    first = {method: fused.decode(prefix, method).token_ids for method in methods}
    assert all(tokens == first[METHODS[0]] for tokens in first.values())
    assert {method: fused.decode(prefix, method).token_ids for method in reversed(methods)} == first


def test_a_budget_chosen_each_round_gives_the_same_tokens(engines, monkeypatch):
    """Whatever sizes are chosen, across the length from which graphs are others; on a GPU through all of these graphs."""
    portable, fused = engines
    for module in (fused_round, auto_round):
        monkeypatch.setattr(module, "LONG_CONTEXT_TOKENS", 60)
    monkeypatch.setattr(auto_round, "FIRST_NODES", 15)
    fused._rounds.pop((AUTO, GREEDY), None)
    monkeypatch.setattr(
        AutoRound, "_measure", lambda self: CostTable(1, 1.0, tuple(self.sizes), (1.0,) * len(self.sizes))
    )
    monkeypatch.setattr(fused, "auto_budget", AutoBudget())
    turn, grown, chosen = itertools.count(), itertools.count(), set()
    for seed in range(12):

        def choose(self, expected, grow_s=0.0):
            sizes = self.sizes()
            within = sizes[sizes < len(expected)]
            return int(within[next(turn) * 5 % len(within)]), next(grown) % 3 == 0

        monkeypatch.setattr(AutoBudget, "choose", choose)
        ids = prompt(20 + 4 * seed, seed).tolist()
        want = portable.decode(portable.prefill(ids, 40, 60), METHODS[0])
        got = fused.decode(fused.prefill(ids, 40, 60), AUTO)
        assert got.token_ids == want.token_ids
        assert len(got.log.budgets) == len(got.log.num_accepted)
        chosen |= set(got.log.budgets)
    assert len(chosen) >= 4
    del fused._rounds[AUTO, GREEDY]  # it chooses by what was patched


def test_accepted_tokens_are_cut_at_the_first_end():
    assert cut_accepted([5, 6, 7], {9}, 10) == ([5, 6, 7], None)
    assert cut_accepted([5, 9, 7], {9}, 10) == ([5, 9], "eos")
    assert cut_accepted([5, 6, 7], {9}, 3) == ([5, 6, 7], "length")
    assert cut_accepted([5, 6, 9], {9}, 3) == ([5, 6, 9], "eos")
    assert cut_accepted([], {9}, 1) == ([], None)


def test_what_it_cannot_do_is_named(engines):
    model, drafter = tiny_model(), tiny_drafter()
    if HAS_GPU:
        assert "float32" in reason_against(model, drafter, [("ar", 0)])
        model = model.bfloat16()
    assert reason_against(model, drafter, [("ar", 0), ("ddtree", 1024), (DDTREE_AUTO, 64)]) is None
    assert "budget" in reason_against(model, drafter, [("ddtree", 2048)])
    phi = tiny_model("phi", num_key_value_heads=4).to(model.dtype)
    assert "Phi" in reason_against(phi, drafter, [("ar", 0)])


def test_a_prompt_that_fills_the_context_is_refused(engines):
    with pytest.raises(KitError, match="context of 200"):
        engines[1].prefill(prompt(200).tolist(), 4, 60, "long")
