"""The report's numbers, its JSON keys, its table, and a page that needs nothing from outside."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decode.report import build_report, print_report, write_report
from decode.results import PromptResult, Response, count_differences
from dflash_kit.acceptance import RoundLog

METHODS = [("ar", 0), ("chain", 3), ("ddtree", 8)]
REQUIRED = {
    "benchmark",
    "temperature",
    "method",
    "budget",
    "prompts",
    "rounds",
    "new_tokens",
    "acceptance_length_pooled",
    "acceptance_length_per_prompt",
    "position_rates",
    "ms_per_round",
    "tokens_per_s",
    "speedup",
}


def make_results(*, timed: bool = True) -> list[PromptResult]:
    """Two benchmarks of two prompts: autoregressive takes 1 s a token, the others 1.5 s a round."""
    rounds = {("ar", 0): (0,) * 6, ("chain", 3): (1, 0, 2), ("ddtree", 8): (3, 1)}
    results = []
    for benchmark in ("gsm8k", "<mt>"):
        for prompt_id in ("a", "b"):
            responses = []
            for method in METHODS:
                num_rounds = len(rounds[method])
                seconds = num_rounds * (1.0 if method[0] == "ar" else 1.5)
                times: dict[str, Any] = {"decode_s": seconds, "stage_s": {"verify": 0.8 * seconds}} if timed else {}
                log = RoundLog(prompt_id=prompt_id, num_accepted=rounds[method], **times)
                responses.append(Response(turn=0, method=method, log=log, token_ids=(1, 2)))
            differing = {"chain": 0, "ddtree-8": 2 if prompt_id == "b" else 0}
            results.append(
                PromptResult(
                    benchmark=benchmark, prompt_id=prompt_id, responses=tuple(responses), differing_tokens=differing
                )
            )
    return results


def make_report(*, timed: bool = True) -> dict[str, Any]:
    return build_report(
        make_results(timed=timed),
        methods=METHODS if timed else METHODS[1:],
        num_draft_tokens=3,
        temperature=0.0,
        facts={"target": "some/target", "checkpoint": "my <drafter>", "warnings": ["odd & old"], "run": {"dtype": "x"}},
    )


def test_numbers() -> None:
    report = make_report()
    assert {"target", "checkpoint", "results"} <= set(report)
    assert len(report["results"]) == 6
    assert all(set(entry) >= REQUIRED for entry in report["results"])
    ar, chain, tree = report["results"][:3]
    assert (ar["acceptance_length_pooled"], ar["position_rates"], ar["speedup"]) == (1.0, [], 1.0)
    assert chain["acceptance_length_pooled"] == 2.0
    assert chain["position_rates"] == [4 / 6, 2 / 6, 0.0]
    assert chain["speedup"] == pytest.approx(2 / 1.5)
    assert tree["speedup"] == pytest.approx(3 / 1.5)
    assert tree["tokens_per_s"] == pytest.approx(2.0)
    assert tree["ms_per_round"] == pytest.approx({"verify": 1200.0, "total": 1500.0})
    assert tree["differing_tokens"] == 2
    assert ar["differing_tokens"] is None


def test_acceptance_length_is_one_plus_position_rates_everywhere() -> None:
    for entry in make_report()["results"]:
        assert entry["acceptance_length_pooled"] == pytest.approx(1 + sum(entry["position_rates"]), abs=1e-12)


def test_replayed_report_has_no_speeds() -> None:
    for entry in make_report(timed=False)["results"]:
        assert entry["ms_per_round"] == {}
        assert entry["tokens_per_s"] is None
        assert entry["speedup"] is None


@pytest.mark.parametrize("timed", [True, False])
def test_files_and_page(tmp_path: Path, timed: bool) -> None:
    report = make_report(timed=timed)
    write_report(tmp_path, report)
    names = ["report.csv", "report.html", "report.json", "report.tex"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.loads((tmp_path / "report.json").read_text()) == report
    page = (tmp_path / "report.html").read_text()
    # τ over budgets, positions and depths of two benchmarks; with times also tokens/s, speed-up and stages.
    assert page.count("<svg") == page.count("</svg>") == (9 if timed else 5)
    assert not re.search(r"<(script|link|img|iframe|object)\b", page)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)  # only ids inside the page itself
    assert not re.search(r"(url\(|@import)\s*['\"]?(?!#)[a-z]", page)
    assert "my &lt;drafter&gt;" in page
    assert "&lt;mt&gt;" in page
    assert "odd &amp; old" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    clips = [i for i in ids if i.startswith("p") and len(i) > 9]
    assert len(clips) == len(set(clips))  # plots on one page do not share clip paths


def test_table_shows_every_row() -> None:
    narrow = Console(width=40, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(make_report(), narrow)
    assert "…" not in narrow.export_text(), "no number is cut off on a narrow terminal"
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(make_report(), console)
    text = " ".join(console.export_text().split())
    for word in ("gsm8k", "<mt>", "chain", "ddtree-8", "2.00", "1.33×", "2.00×"):
        assert word in text
    assert "bonus token" in text  # how a cut round counts is said where the numbers stand


def test_results_survive_json() -> None:
    for result in make_results():
        assert PromptResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_differences_are_counted_by_position_and_length() -> None:
    assert count_differences([1, 2, 3], [1, 2, 3]) == 0
    assert count_differences([1, 9, 3], [1, 2, 3]) == 1
    assert count_differences([1, 2], [1, 2, 3, 4]) == 2
    assert count_differences([], [5]) == 1
