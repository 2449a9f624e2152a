"""The budget "auto" takes the tree with the most expected tokens per second, and the output stays the target's own."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafting import OracleEngine, decode_once, generate, tiny_drafter
from test_eval_cli import evaluate, made, read_report, read_results

from decode.auto_budget import AutoBudget, CostTable, RunningCosts, ladder, measure_costs, summarise_choices
from decode.auto_report import COSTS_NAME, budget_lines, keep_costs, read_costs
from decode.engine import Method
from decode.fused_engine import reason_against
from decode.target_runner import TargetRunner
from dflash_kit.acceptance import DDTREE_AUTO, RoundLog
from dflash_kit.errors import KitError
from dflash_kit.target import load_target
from dflash_kit.tree import Tree, build_tree

__all__ = ["made"]  # a fixture


LADDER = [0, 3, 7, 11, 15, 23, 31, 47, 63]
SIZES = (0, 1, 3, 7, 11, 15, 23, 31, 47, 64, 96, 128)


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

    def draft(self) -> torch.Tensor:
        self.now_s += self.draft_s * (1 + self.noise.exponential(0.001))
        return torch.randn(7, 50, generator=torch.Generator().manual_seed(0))

    def verify(self, tree: Tree) -> None:
        self.seen.append(len(tree))
        self.now_s += (self.verify_s + self.node_s * len(tree)) * (1 + self.noise.exponential(0.001))


def test_costs_are_measured_up_to_where_no_tree_pays() -> None:
    machine = Machine(draft_s=0.01, verify_s=0.04, node_s=0.002)
    table = measure_costs(machine.draft, machine.verify, context_tokens=9, cap=1024, now_s=lambda: machine.now_s)
    assert table.nodes == (0, 3, 7, 11, 15, 23, 31, 47, 63, 127)  # 0.05 s give a token, so 8 must not take over 0.4 s
    assert max(machine.seen) == 255
    assert table.draft_s == pytest.approx(0.01, rel=0.01)
    assert table.verify_s == pytest.approx([0.04 + 0.002 * n for n in table.nodes], rel=0.01)
    assert table.to_dict()["verify_ms"][1] == pytest.approx(46, rel=0.01)
    small = measure_costs(machine.draft, machine.verify, context_tokens=9, cap=20, now_s=lambda: machine.now_s)
    assert small.nodes == (0, 3, 7, 11, 15, 20)
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
        budget.observe(
            build_tree(logits, before), {"draft": 1.0, "build": 0.1, "commit": 0.1, "verify": 0.04, "walk": 0.0}
        )
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


def test_output_is_the_targets_own(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = load_target(tiny_target), [3, 250, 99, 98]
    expected = generate(model, prompt, 40)
    drafter, ends = tiny_drafter(tiny_target)
    chosen = set()
    for error_rate in (0.0, 0.3):
        engine = OracleEngine(
            TargetRunner(model, drafter.config.target_layer_ids),
            drafter,
            ends,
            eos_token_ids=(),
            max_context=512,
            script=prompt + expected,
            error_rate=error_rate,
        )
        for table in (
            None,
            CostTable(4, 1.0, SIZES[:10], tuple(1 + n / 213 for n in SIZES[:10])),
        ):  # measured, and one by which sizes vary
            if table is not None:
                engine.auto_budget.prepare((), 4, lambda t=table: t)
                engine._measure_costs = lambda *_args, t=table: t  # type: ignore[method-assign]
                engine.auto_budget = AutoBudget()
                monkeypatch.setattr(
                    RunningCosts, "observe", lambda *_args: None
                )  # what this machine takes is another matter
            found = decode_once(engine, prompt, DDTREE_AUTO, 64, 40)
            assert found.token_ids == expected
            assert len(found.log.budgets) == len(found.log.num_accepted)
            assert all(a <= b <= 64 for a, b in zip(found.log.num_accepted, found.log.budgets, strict=True))
            chosen |= set(found.log.budgets) if table is not None else set()
        monkeypatch.undo()
    assert len(chosen) > 2


def test_the_command_reports_what_was_chosen(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert evaluate(made, out, "--budget=4,16,auto") == 0
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
    assert evaluate(made, out, "--budgets=auto,16,4") == 0
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
    assert evaluate(made, tmp_path / "out", "--budgets=auto", "--engine=fused") == 2
    error = capsys.readouterr().err
    assert "the fused engine decodes with fixed budgets" in error
    assert not (tmp_path / "out").exists()
    assert evaluate(made, tmp_path / "out", "--budgets=auto,8k") == 2
    assert "whole numbers from 1 to 4096 or auto" in capsys.readouterr().err


def test_the_fused_engine_says_why_it_cannot(tiny_target: Path) -> None:
    drafter: Any = tiny_drafter(tiny_target)[0]
    methods = [(DDTREE_AUTO, 64)]
    assert "budgets auto" in str(reason_against(load_target(tiny_target), drafter, methods))
    assert Method(DDTREE_AUTO, 64).budget == 64
