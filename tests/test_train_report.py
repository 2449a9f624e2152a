"""The report of a run: its page needs nothing else, its picture shows what was logged, and both can be had early."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from train_helpers import make_shards, small_run

from dflash_kit.errors import run_cli
from train import report
from train.cli import main
from train.curves import draw_curves
from train.progress import Reporter
from train.state import RunFolder
from train.tracking import Tracker


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    out = folder / "out"
    assert main(small_run(make_shards(folder / "shards", tiny_target), out, replay__budgets="[4,16]")) == 0
    return out


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(out).metrics.read_text().splitlines()]


def test_the_page_holds_every_replay_and_the_picture_and_fetches_nothing(finished: Path) -> None:
    state = RunFolder(finished).state
    page = (state / report.PAGE_NAME).read_text()
    replays = [line for line in lines_of(finished) if line["kind"] == "replay"]
    assert [line["step"] for line in replays] == [6, 12]
    for line in replays:
        lengths = [
            f"{line['methods'][name]['acceptance_length_pooled']:.3f}" for name in ("chain", "DDTree-4", "DDTree-16")
        ]
        cells = [str(line["step"]), *lengths, str(line["methods"]["chain"]["rounds"])]
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert not re.search(r"https?://|src=\"(?!data:)|<script|<link", page)
    embedded = base64.b64decode(page.split("data:image/png;base64,")[1].split('"')[0])
    assert embedded == (state / report.PICTURE_NAME).read_bytes()
    assert "12 of 12" in page and "lr 0.002" in page and "blocks of 4" in page


def test_the_picture_draws_what_was_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, list[tuple[Any, Any]]] = {}
    real = Axes.plot

    def plot(self: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.setdefault(str(kwargs.get("label")), []).append((list(x), list(y)))
        return real(self, x, y, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", plot)
    train = [
        {"step": s, "loss": 1 / s, "lr": s * 1e-3, "slot_accuracy": [0.5, None if s == 1 else 0.25]} for s in (1, 2)
    ]
    replays = [
        {"step": s, "best": s < 2, "methods": {"chain": {"acceptance_length_pooled": 1.0 + s}, "DDTree-4": {}}}
        for s in (0, 1, 2)
    ]
    picture = Image.open(io.BytesIO(draw_curves(train, replays)))
    assert picture.format == "PNG" and picture.size == (1000, 640)
    assert drawn["chain"] == [([0, 1, 2], [1.0, 2.0, 3.0])] and drawn["best: step 1, 2.00"] == [([1], [2.0])]
    assert drawn["None"] == [([1, 2], [1.0, 0.5]), ([1, 2], [1e-3, 2e-3])]
    assert drawn["slot 1"] == [([1, 2], [0.5, 0.5])] and drawn["slot 2"] == [([2], [0.25])]
    draw_curves([], [])  # a run that has logged nothing yet


def test_the_command_makes_it_anew_and_refuses_in_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = RunFolder(finished).state / report.PAGE_NAME
    before = page.read_bytes()
    page.unlink()
    assert run_cli(report.main, [str(finished)]) == 0 and page.read_bytes() == before
    assert run_cli(report.main, [str(tmp_path / "nothing")]) == 2
    assert "no run has logged anything" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_costs_no_drafter(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = small_run(make_shards(tmp_path / "shards", tiny_target), out, optim__max_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.os, "replace", full_disk(report.os.replace))
        assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "no report: " in shown and "report.html cannot be written (No space left on device)" in shown
    assert (out / "model.safetensors").exists() and not (RunFolder(out).state / report.PAGE_NAME).exists()
    assert f"`python -m train.report {out}` tries again" in shown
    assert run_cli(report.main, [str(out)]) == 0 and (RunFolder(out).state / report.PAGE_NAME).exists()


@pytest.mark.parametrize(
    "line",
    [
        {"step": 3},
        {"kind": "train", "step": 1},
        {"kind": "replay", "step": 13, "best": True, "methods": {"chain": {}}},
        {"kind": "replay", "step": 13, "best": False, "methods": 3},
    ],
)
def test_lines_that_no_training_writes_are_refused_in_one_line(
    finished: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any]
) -> None:
    metrics = RunFolder(finished).metrics
    before = metrics.read_text()
    try:
        metrics.write_text(before + json.dumps(line) + "\n")
        assert run_cli(report.main, [str(finished)]) == 2
    finally:
        metrics.write_text(before)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"nothing can be drawn from {metrics}" in said


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", "/"])
def test_a_name_that_no_folder_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(report.main, [name]) == 2
    assert capsys.readouterr().err.startswith(
        "error: output folder is" if name in ("", "/") else "error: output folder '"
    )


def test_metrics_that_cannot_be_written_end_the_run_in_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dflash_kit.checkpoint import read_provenance

    out, shards = tmp_path / "out", read_provenance(finished)["config"]["shards"]
    real = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name == "metrics.jsonl" and "a" in mode:
            raise OSError(28, "No space left on device")
        return real(self, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", full)
        assert run_cli(main, small_run(Path(shards), out)) == 2
    said = capsys.readouterr().err
    assert f"error: {RunFolder(out).metrics} cannot be written (No space left on device)" in said


def full_disk(real: Any) -> Any:
    def replace(source: Any, target: Any) -> None:
        if str(target).endswith(report.PICTURE_NAME):
            raise OSError(28, "No space left on device")
        real(source, target)

    return replace


def test_the_bar_shows_loss_speed_and_the_last_replay(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "240")
    output = io.StringIO()
    config: Any = type("C", (), {"report_to": "none"})()
    reporter = Reporter(None, active=True, max_steps=12, tracker=Tracker(config, RunFolder(finished)))
    reporter.console.file = output
    train, replays = ([line for line in lines_of(finished) if line["kind"] == kind] for kind in ("train", "replay"))
    with reporter:
        reporter.record("train", 11, train[-1])
        reporter.record("replay", 11, replays[-1])
        reporter.advance(11, 2.5, 12)
        reporter._bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    length = replays[-1]["methods"]["DDTree-16"]["acceptance_length_pooled"]
    assert "loss 2.500" in shown and "tok/s  MFU" in shown and "wait " in shown
    assert f"DDTree-16 τ {length:.2f}" in shown and "11/12" in shown
