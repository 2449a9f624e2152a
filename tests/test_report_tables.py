"""report.csv and report.tex: the numbers of report.json, in a table that LaTeX can set."""

import csv
import io
import re
from typing import Any

import pytest
from test_report import make_report

from decode.report_tables import csv_text, latex_text


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))]


def body(text: str) -> list[list[str]]:
    """Cells of the rows between the rules."""
    inside = text.split("\\midrule\n")[1].split("\\bottomrule")[0]
    return [cells(line.strip()) for line in inside.strip().split("\n")]


def test_csv_holds_every_number_of_the_report() -> None:
    report = make_report()
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert len(rows) == len(report["results"])
    for row, entry in zip(rows, report["results"], strict=True):
        assert (row["benchmark"], row["method"], int(row["budget"])) == (
            entry["benchmark"],
            entry["method"],
            entry["budget"],
        )
        assert row["checkpoint"] == "my <drafter>"
        assert float(row["acceptance_length_pooled"]) == entry["acceptance_length_pooled"]
        assert float(row["ms_per_round_total"]) == entry["ms_per_round"]["total"]
        low, high = entry["acceptance_length_pooled_ci95"]
        assert (float(row["acceptance_length_pooled_ci95_low"]), float(row["acceptance_length_pooled_ci95_high"])) == (
            low,
            high,
        )
        for k, rate in enumerate(entry["position_rates"], start=1):
            assert float(row[f"position_{k}"]) == rate


@pytest.mark.parametrize(("timed", "wide"), [(True, 2), (False, 1)])
def test_latex_has_a_cell_for_every_column(timed: bool, wide: int) -> None:
    text = latex_text(make_report(timed=timed))
    columns = re.search(r"\\begin\{tabular\}\{l(r+)\}", text)
    assert columns is not None
    num_columns = 1 + len(columns[1])
    assert num_columns == 1 + 3 * wide  # two benchmarks and their mean
    assert all(len(row) == num_columns for row in body(text))
    heads = re.findall(r"\\multicolumn\{(\d)\}\{c\}\{(.*?)\} ", text.replace(r"\\", " "))
    assert heads == [(str(wide), "gsm8k"), (str(wide), "<mt>"), (str(wide), "Avg.")]
    spans = re.findall(r"\\cmidrule\(lr\)\{(\d+)-(\d+)\}", text)
    assert [(int(a), int(b)) for a, b in spans] == [(2 + i * wide, 1 + (i + 1) * wide) for i in range(3)]
    for begun, ended in ((r"\begin", r"\end"), ("{", "}")):
        assert text.count(begun) == text.count(ended)


def test_latex_numbers_are_those_of_the_report() -> None:
    rows = {row[0]: row[1:] for row in body(latex_text(make_report()))}
    assert list(rows) == ["Autoregressive", "DFlash", "DDTree (8)"]
    assert rows["DFlash"] == [r"1.33$\times$", "2.00"] * 3
    assert rows["DDTree (8)"] == [r"\textbf{2.00$\times$}", r"\textbf{3.00}"] * 3
    assert rows["Autoregressive"] == [r"1.00$\times$", "1.00"] * 3


def test_latex_escapes_names_and_means_need_every_benchmark() -> None:
    report: dict[str, Any] = make_report()
    for entry in report["results"]:
        entry["benchmark"] = entry["benchmark"].replace("<mt>", "my_set & 50%")
    report["results"] = report["results"][:-1]  # DDTree was not decoded on the second benchmark
    text = latex_text(report)
    assert r"my\_set \& 50\%" in text
    tree = body(text)[2]
    assert tree[3:] == ["--"] * 4
