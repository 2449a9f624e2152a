"""Replayed rows that the drafter was trained on are told from others, wherever the shards lie now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_helpers import make_shards, small_run

from decode.cli import main as evaluate
from decode.trained_rows import TrainedRows
from dflash_kit.checkpoint import read_provenance
from dflash_kit.config import parse_config
from dflash_kit.errors import run_cli
from dflash_kit.shards import open_shards
from dflash_kit.spool import ConsumedJournal
from train.cli import main as train
from train.job import prepare
from train.settings import TrainConfig

Made = tuple[Path, set[str]]


@pytest.fixture(scope="module")
def made(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A drafter of two steps beside its shards, and the ids that its trainer took."""
    root = tmp_path_factory.mktemp("trained")
    shards = make_shards(root / "shards", tiny_target, num_rows=12)
    arguments = small_run(shards, root / "drafter", optim__max_steps=2, replay__every_steps=0)
    assert run_cli(train, arguments) == 0
    job = prepare(parse_config("train", TrainConfig, arguments, description=""))
    return root, {job.shards.ids[i] for i in job.train_rows}


def replay(root: Path, shards: Path, out: Path) -> dict[str, Any]:
    arguments = [f"--ckpt={root / 'drafter'}", f"--replay={shards}", f"--out={out}", "--budgets=4"]
    assert run_cli(evaluate, arguments) == 0
    return json.loads((out / "report.json").read_text())


def test_training_shards_are_warned_of_in_one_line_and_in_the_report(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, trained = made
    assert 0 < len(trained) < 12
    report = replay(root, root / "shards", tmp_path / "out")
    words = f"{len(trained)} of the 12 rows of {root / 'shards'} are training rows of this drafter"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "training rows" in line]
    assert line.startswith(f"warning: {words}")
    assert report["run"]["training rows"] == f"{len(trained)} of 12"
    assert [words in text for text in report["warnings"]] == [True]
    assert words in (tmp_path / "out" / "report.html").read_text()


def test_other_rows_are_not_warned_of(
    made: Made, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = made
    report = replay(root, make_shards(tmp_path / "others", tiny_target, num_rows=2, prefix="other"), tmp_path / "out")
    assert "training rows" not in capsys.readouterr().err
    assert (report["warnings"], report["run"]["training rows"]) == ([], "0 of 2")


def test_found_again_after_a_move_and_in_shards_of_more_prompts(made: Made, tiny_target: Path, tmp_path: Path) -> None:
    """The same ids in a moved folder, and in one of more rows, whose training rows the recorded folder tells."""
    root, trained = made
    provenance = read_provenance(root / "drafter")
    more = open_shards(make_shards(tmp_path / "more", tiny_target, num_rows=30))
    assert set(TrainedRows.of(provenance, more).ids) == trained
    provenance["config"]["shards"] = str(tmp_path / "gone")
    assert TrainedRows.of(provenance, open_shards(root / "shards")).count(sorted(trained)) == len(trained)
    lost = TrainedRows.of(provenance, more)
    assert not lost.ids
    assert lost.warning(more.ids, "more") is None
    assert f"not known of 30: {tmp_path / 'gone'}" in str(lost.describe(more.ids))


def test_what_a_fine_tuned_drafter_started_from_counts(made: Made, tmp_path: Path) -> None:
    root, trained = made
    shards = open_shards(root / "shards")
    tuned = {"init": {"name": str(root / "drafter")}}
    assert set(TrainedRows.of(tuned, shards).ids) == trained
    assert TrainedRows.of({"init": {"name": str(tmp_path)}}, shards) == TrainedRows(ids=frozenset(), unknown=())
    assert TrainedRows.of({}, shards).describe(shards.ids) is None


def test_a_spool_has_used_rows_that_are_not_held_out(tiny_target: Path, tmp_path: Path) -> None:
    spool = make_shards(tmp_path / "spool", tiny_target, num_rows=8, max_shard_bytes=1)
    shards = open_shards(spool)
    first, second, *_ = shards.ids
    make_shards(tmp_path / "d.state" / "held-out", tiny_target, num_rows=1)
    assert open_shards(tmp_path / "d.state" / "held-out").ids == [first]
    config = {
        "shards": str(spool),
        "out": str(tmp_path / "d"),
        "eval_shards": None,
        "replay": {"max_rows": 4},
        "data": {"holdout_fraction": 0.1},
    }
    journal = ConsumedJournal(spool)
    journal.consume([entry for entry, *_ in shards._shards[:2]])
    journal.close()
    found = TrainedRows.of({"fingerprint": {"spool": True}, "config": config}, open_shards(spool))
    assert (found.ids, found.unknown) == (frozenset({second}), ())
