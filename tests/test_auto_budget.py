"""The budget "auto" takes the tree with the most expected tokens per second, and the output stays the target's own."""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafting import decode_once, generate, oracle_engine
from test_eval_cli import evaluate, made, read_report, read_results

from decode.auto_budget import AutoBudget, CostTable, RunningCosts, ladder, measure_costs, summarise_choices
from decode.auto_report import COSTS_NAME, budget_lines, keep_costs, read_costs
from decode.auto_round import ROWS, AutoRound
from decode.engine import Engine
from decode.fused_engine import FusedEngine
from decode.sampling import Sampling
from dflash_kit.acceptance import DDTREE_AUTO, RoundLog
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.target import load_target
from dflash_kit.tree import build_tree
from helpers import make_tiny_target

__all__ = ["made"]  # a fixture


LADDER = [0, 3, 7, 11, 15, 23, 31, 47, 63]
SIZES = (0, 1, 3, 7, 11, 15, 23, 31, 47, 63, 96, 128)


def prepared(table: CostTable) -> AutoBudget:
    budget = AutoBudget()
    budget.prepare("greedy", table.context_tokens, lambda: table)
    return budget


def best_of_all(logits: torch.Tensor, table: CostTable) -> list[float]:
    """Expected tokens per second of every measured size, from the probabilities of all paths there are."""
    probabilities = logits.double().softmax(-1).tolist()
    paths = sorted(
        (
            math.prod(row[token] for row, token in zip(probabilities, path, strict=False))
            for depth in range(1, len(probabilities) + 1)
            for path in itertools.product(range(logits.shape[1]), repeat=depth)
        ),
        reverse=True,
    )
    costs_s = (table.draft_s + verify_s for verify_s in table.verify_s)
    return [(1 + math.fsum(paths[:n])) / cost_s for n, cost_s in zip(table.nodes, costs_s, strict=True)]


def test_the_best_size_of_all_is_taken() -> None:
    noise = torch.Generator().manual_seed(0)
    sizes = set()
    for sharpness in (0.5, 2.0, 4.0):
        for step_s in (0.0, 0.002, 0.01, 0.05, 2.0):
            # A slope; flat with a step and a slope behind it; sizes that take longer than larger ones: as devices are.
            for units in (SIZES, (0, 1, 1, 1, 1, 1, 9, 9, 9, 10, 30, 60), (0, 9, 3, 9, 7, 20, 12, 30, 20, 90, 60, 200)):
                table = CostTable(100, 0.3, SIZES, tuple(1 + step_s * unit for unit in units))
                logits = torch.randn(4, 5, generator=noise) * sharpness
                rates = best_of_all(logits, table)
                tree = prepared(table).tree(logits)
                assert rates[SIZES.index(len(tree))] == pytest.approx(max(rates), rel=1e-6)
                expected = build_tree(logits, len(tree))
                assert torch.equal(tree.tokens, expected.tokens)
                assert torch.equal(tree.parents, expected.parents)
                sizes.add(len(tree))
    assert {0, 128} < sizes
    assert len(sizes) > 8


class Machine:
    """A clock that drafts and verifications push on."""

    def __init__(self, draft_s: float, verify_s: float, node_s: float) -> None:
        self.now_s, self.draft_s, self.verify_s, self.node_s = 0.0, draft_s, verify_s, node_s
        self.seen: list[int] = []
        self.noise = np.random.default_rng(0)

    def draft(self) -> None:
        self.now_s += self.draft_s * (1 + self.noise.exponential(0.001))

    def verify(self, num_nodes: int) -> None:
        assert self.prepared == num_nodes
        self.seen.append(num_nodes)
        self.now_s += (self.verify_s + self.node_s * num_nodes) * (1 + self.noise.exponential(0.001))

    def prepare(self, num_nodes: int) -> None:
        """Not timed."""
        self.now_s += 100.0
        self.prepared = num_nodes

    def table(self, cap: int) -> CostTable:
        return measure_costs(
            self.draft,
            self.verify,
            prepare=self.prepare,
            most_tokens=8,
            context_tokens=9,
            sizes=ladder(cap),
            now_s=lambda: self.now_s,
        )


def test_costs_are_measured_up_to_where_no_tree_pays() -> None:
    machine = Machine(draft_s=0.01, verify_s=0.04, node_s=0.002)
    table = machine.table(1024)
    assert table.nodes == (0, 3, 7, 11, 15, 23, 31, 47, 63, 127)  # 0.05 s give a token, so 8 must not take over 0.4 s
    assert max(machine.seen) == 255
    assert table.draft_s == pytest.approx(0.01, rel=0.01)
    assert table.verify_s == pytest.approx([0.04 + 0.002 * n for n in table.nodes], rel=0.01)
    assert table.to_dict()["verify_ms"][1] == pytest.approx(46, rel=0.01)
    assert machine.table(20).nodes == (0, 3, 7, 11, 15, 20)
    assert ladder(100, ROWS) == [0, 7, 15, 23, 31, 47, 63, 95, 100]
    assert ladder(1024, ROWS)[-4:] == [255, 511, 1023, 1024]
    assert [ladder(cap) for cap in (1, 3, 63, 64)] == [[0, 1], [0, 3], LADDER, [*LADDER, 64]]
    assert CostTable(1, 0.0, (0, 4, 6), (1.0, 3.0, 2.0)).verify_s_by_nodes().tolist() == [1, 1.5, 2, 2.5, 3, 2.5, 2]


def test_a_context_is_calibrated_once_for_each_doubling() -> None:
    kept: list[CostTable] = []
    budget = AutoBudget(kept.append)
    for context_tokens in (100, 120, 70, 128, 255, 90, 256):
        budget.prepare("greedy", context_tokens, lambda n=context_tokens: CostTable(n, 1.0, (0, 4), (1.0, 1.0)))
    assert [table.context_tokens for table in kept] == [100, 128, 256]


def test_rounds_correct_a_calibration_that_no_longer_holds() -> None:
    table = CostTable(100, 0.01, (0, 64), (0.04, 0.04))  # nodes are free, it says
    costs = RunningCosts(table)
    for _ in range(100):
        costs.observe(64, 0.05, 0.08)
    assert costs.seconds()[[0, 64]] == pytest.approx([0.13, 0.13], rel=0.05)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 2
    cheap = CostTable(100, 0.01, SIZES[:10], tuple(0.04 + 0.0056 * n for n in SIZES[:10]))
    budget = prepared(cheap)
    before = len(budget.tree(logits))
    for _ in range(100):  # drafts now take so long that a round had better bring more
        budget.observe(before, fixed_s=1.2, verify_s=0.04)
    assert len(budget.tree(logits)) > before


def test_choices_are_summed_up() -> None:
    logs = [RoundLog(num_accepted=(0,) * 5, budgets=(0, 3, 4, 5, 40)), RoundLog(num_accepted=(1,), budgets=(8,))]
    found = summarise_choices(logs)
    assert found == {
        "mean": 10.0,
        "median": 4.5,
        "histogram": [
            {"from": 0, "to": 0, "rounds": 1},
            {"from": 1, "to": 4, "rounds": 2},
            {"from": 5, "to": 8, "rounds": 2},
            {"from": 9, "to": 16, "rounds": 0},
            {"from": 17, "to": 32, "rounds": 0},
            {"from": 33, "to": 64, "rounds": 1},
        ],
    }
    assert summarise_choices([RoundLog(num_accepted=())]) is None
    assert RoundLog.from_dict(json.loads(json.dumps(logs[0].to_dict()))) == logs[0]
    assert "budgets" not in RoundLog(num_accepted=(1,)).to_dict()


@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_output_is_the_targets_own(kind: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [3, 250, 99, 98]
    expected = generate(load_target(tiny_target), prompt, 40)
    chosen = set()
    for error_rate in (0.0, 0.3):
        for table in (
            None,
            CostTable(4, 1.0, SIZES[:10], tuple(1 + n / 213 for n in SIZES[:10])),
        ):  # measured, and one by which sizes vary
            engine = oracle_engine(kind, tiny_target, prompt + expected, error_rate)
            if table is not None:
                give = lambda *_args, t=table: t  # noqa: E731
                monkeypatch.setattr(Engine, "_measure_costs", give)
                monkeypatch.setattr(AutoRound, "_measure", give)
                monkeypatch.setattr("decode.auto_round.FIRST_NODES", 7)
                # What this machine takes is another matter.
                monkeypatch.setattr(RunningCosts, "observe", lambda *_args: None)
            found = decode_once(engine, prompt, DDTREE_AUTO, 64, 40)
            assert found.token_ids == expected
            assert len(found.log.budgets) == len(found.log.num_accepted)
            assert all(a <= b <= 64 for a, b in zip(found.log.num_accepted, found.log.budgets, strict=True))
            chosen |= set(found.log.budgets) if table is not None else set()
        monkeypatch.undo()
    assert len(chosen) > 2


@pytest.mark.parametrize("name", ["tiny_target", "hybrid_target"])
def test_measuring_leaves_the_fused_engine_as_it_was(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = oracle_engine("fused", request.getfixturevalue(name), [5] * 60, 0.0)
    engine.prefill([3, 250, 99, 98], 40, 64)
    monkeypatch.setattr("decode.auto_round.FIRST_NODES", 15)
    round_ = AutoRound(engine.target, engine.drafter, 24, Sampling(1.0), AutoBudget(), time.perf_counter)
    assert round_.sizes == [0, 7, 15, 23]
    round_.anchor.fill_(7)
    round_._held = 4
    held = [tensor.clone() for tensor in (*engine.target.carried(), round_.anchor, torch.get_rng_state())]
    table = round_._measure()
    for before, after in zip(held, (*engine.target.carried(), round_.anchor, torch.get_rng_state()), strict=True):
        assert torch.equal(before, after)
    assert table.context_tokens == 4
    assert set(round_._rounds) == set(table.nodes) <= set(round_.sizes)
    assert min(table.draft_s, *table.verify_s) > 0


@pytest.fixture(scope="module")
def hybrid_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("hybrid") / "target", model_type="qwen3_5_text")


def test_the_command_reports_what_was_chosen(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert evaluate(made, out, "--budget=4,16,auto", "--dtype=float32") == 0  # in half precision ties may flip
    printed = capsys.readouterr().out
    report = read_report(out)
    entries = {(e["method"], e["budget"]): e for e in report["results"]}
    assert list(entries) == [("ar", 0), ("chain", 7), ("ddtree", 4), ("ddtree", 16), (DDTREE_AUTO, 16)]
    auto = entries[DDTREE_AUTO, 16]
    assert auto["differing_tokens"] == 0
    assert sum(bin_["rounds"] for bin_ in auto["chosen_budgets"]["histogram"]) == auto["rounds"]
    logs = [r.log for result in read_results(out) for r in result.responses if r.method[0] == DDTREE_AUTO]
    assert auto["chosen_budgets"]["mean"] == pytest.approx(np.mean([b for log in logs for b in log.budgets]))
    assert len(report["auto_costs"]) == len((out / COSTS_NAME).read_text().splitlines()) >= 1
    assert report["auto_costs"][0]["nodes"][0] == 0
    best = [e for e in report["results"] if e.get("best_budget")]
    assert len(best) == 1
    assert best[0]["tokens_per_s"] == max(entries["ddtree", b]["tokens_per_s"] for b in (4, 16))
    assert f"fixed budgets is {best[0]['budget']} (*)" in printed.replace("\n", " ")
    assert "auto chose" in " ".join(budget_lines(report))
    page = (out / "report.html").read_text()
    assert "<h2>Budget auto</h2>" in page
    assert f"ddtree-{best[0]['budget']}*" in page
    # A second call has nothing to decode, and says the same.
    assert evaluate(made, out, "--budgets=auto,16,4", "--dtype=float32") == 0
    again = read_report(out)
    assert (again["results"], again["auto_costs"]) == (report["results"], report["auto_costs"])


def test_a_kill_while_costs_are_written_loses_that_line_only(tmp_path: Path) -> None:
    tables = [CostTable(n, 0.5, (0, 4), (1.0, 2.0)) for n in (10, 20, 40)]
    keep_costs(tmp_path, tables[0])
    with (tmp_path / COSTS_NAME).open("a") as file:
        file.write('{"context_tokens": 20, "draft')
    assert read_costs(tmp_path) == [tables[0].to_dict()]
    keep_costs(tmp_path, tables[2])
    assert read_costs(tmp_path) == [tables[0].to_dict(), tables[2].to_dict()]
    with pytest.raises(KitError, match="cannot be written"):
        keep_costs(tmp_path / "absent", tables[0])


def test_what_cannot_choose_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(made, tmp_path / "out", "--budgets=auto", f"--replay={made / 'shards'}") == 2
    error = capsys.readouterr().err
    assert "budgets has auto, which chooses by measured times" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert evaluate(made, tmp_path / "out", "--budgets=auto,8k") == 2
    assert "whole numbers from 1 to 4096 or auto" in capsys.readouterr().err


def test_reports_of_the_fused_engine_say_what_it_chose(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command takes that engine on GPUs only, so it is put in its place here."""

    def open_fused(config: Any, inputs: Any, methods: list[tuple[str, int]], *_: Any) -> FusedEngine:
        model, drafter = load_target(inputs.target), Drafter.from_pretrained(config.ckpt)
        budget = max(budget for _, budget in methods)
        return FusedEngine(model, drafter, eos_token_ids=(), max_context=512, max_budget=budget)

    monkeypatch.setattr("decode.decoding.open_engine", open_fused)
    out = tmp_path / "out"
    assert evaluate(made, out, "--budget=4,16,auto") == 0
    report = read_report(out)
    (entry,) = (e for e in report["results"] if e["method"] == DDTREE_AUTO)
    assert entry["differing_tokens"] == 0
    assert sum(bin_["rounds"] for bin_ in entry["chosen_budgets"]["histogram"]) == entry["rounds"]
    assert set(report["auto_costs"][0]["nodes"]) <= {0, 7, 15}
