"""Several checkpoints side by side: names, one load of the target, paired differences, and what is refused."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import tiny_drafter
from test_eval_cli import evaluate, made, read_report  # noqa: F401  (made is a fixture)

import decode.engines
from decode.cache import PathCache
from decode.checkpoints import NamedCheckpoint, find_checkpoints, unique_names
from decode.compare import Evaluated, build_comparison
from decode.kept import keeping, kept
from dflash_kit.acceptance import RoundLog, paired_difference, summarise
from dflash_kit.errors import KitError


@pytest.fixture(scope="module")
def two(made: Path) -> tuple[Path, Path]:  # noqa: F811
    """The trained drafter and an untrained one, in folders of one name."""
    other = made / "other" / "drafter"
    drafter, _ = tiny_drafter(made / "target", seed=5)
    drafter.save_pretrained(other, provenance={"target": str(made / "target")})
    return made / "drafter", other


def test_live_comparison(
    made: Path,  # noqa: F811
    two: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loads: list[str] = []
    load = decode.engines.load_target

    def counted(name: str, **arguments: Any) -> Any:
        loads.append(name)
        return load(name, **arguments)

    monkeypatch.setattr("decode.engines.load_target", counted)
    out = tmp_path / "out"
    assert evaluate(made, out, "--limit=2", ckpt=f"{two[0]},{two[1]}") == 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert loads == [str(made / "target")], "one load serves both"
    names = [f"{made.name}-drafter", "other-drafter"]
    assert sorted(entry.name for entry in out.iterdir()) == sorted([*names, "compare.json", "compare.html"])
    comparison = json.loads((out / "compare.json").read_text())
    assert [one["name"] for one in comparison["checkpoints"]] == names
    assert [one["checkpoint"] for one in comparison["checkpoints"]] == list(map(str, two))
    assert [row["method"] for row in comparison["results"]] == ["ar", "chain", "ddtree-4", "ddtree-16"]
    for name in names:
        for row, entry in zip(comparison["results"], read_report(out / name)["results"], strict=True):
            for key in ("acceptance_length_pooled", "acceptance_length_pooled_ci95", "tokens_per_s", "speedup"):
                assert row["checkpoints"][name][key] == entry[key]
    for row in comparison["results"][1:]:
        first, second = (row["checkpoints"][name] for name in names)
        found = second["difference"]
        assert found["difference"] == pytest.approx(
            second["acceptance_length_pooled"] - first["acceptance_length_pooled"]
        )
        assert found["prompts"] == 2
        assert found["difference"] < 0, "the untrained one is worse"
        assert f"{found['difference']:+.2f}" in printed
    page = (out / "compare.html").read_text()
    assert all(name in page for name in names)
    assert page.count("<svg") == 3  # τ and tokens/s over budgets, positions of the chain

    before = (out / "compare.json").read_text()
    assert evaluate(made, out, "--limit=2", ckpt=f"{two[0]},{two[1]}") == 0  # type: ignore[arg-type]
    assert len(loads) == 1, "nothing was left to decode"
    again = json.loads((out / "compare.json").read_text())
    assert again["results"] == json.loads(before)["results"]


def test_replayed_comparison_and_refusals(
    made: Path,  # noqa: F811
    two: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, replay = tmp_path / "out", f"--replay={made / 'shards'}"
    both: Any = f"{two[0]},{two[1]}"
    assert evaluate(made, out, replay, ckpt=both) == 0
    comparison = json.loads((out / "compare.json").read_text())
    assert [row["method"] for row in comparison["results"]] == ["chain", "ddtree-4", "ddtree-16"]
    assert comparison["results"][0]["checkpoints"]["other-drafter"]["difference"]["prompts"] == 3
    assert "Tokens per second" not in capsys.readouterr().out

    def refused(ckpt: Any, *more: str, folder: Path = out) -> str:
        capsys.readouterr()
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert evaluate(made, folder, replay, *more, ckpt=ckpt) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        return error

    third = shutil.copytree(two[1], tmp_path / "third")
    assert f"holds {made.name}-drafter" in refused(f"{two[1]},{third}")
    assert "same checkpoint twice" in refused(f"{two[0]},{two[0]}/../drafter")
    assert "budgets = [4, 16], but this run has budgets = [4]" in refused(both, "--budgets=4")
    assert "push_to_hub with several" in refused(both, "--push_to_hub=a/b")
    assert "must be a folder" in refused(f"{two[0]},{tmp_path / 'absent'}")
    assert evaluate(made, tmp_path / "single", replay) == 0
    assert "which is no part of the comparison" in refused(both, folder=tmp_path / "single")
    assert evaluate(made, tmp_path / "planned", replay, "--dry_run", ckpt=both) == 0
    assert not (tmp_path / "planned").exists()


def test_targets_that_differ_are_named_as_the_reason_of_differences() -> None:
    def one(name: str, target: str) -> Evaluated:
        report = {"target": target, "checkpoint": name, "results": []}
        checkpoint = NamedCheckpoint(name=name, given=name, folder=Path(name))
        return Evaluated(checkpoint=checkpoint, report=report, results=[])

    assert "The targets differ here" in build_comparison([one("x", "t"), one("y", "u")])["differences"]
    assert "The targets differ here" not in build_comparison([one("x", "t"), one("y", "t")])["differences"]


def test_names_are_short_and_unique() -> None:
    assert unique_names([("a", "b", "x"), ("a", "c", "y")]) == ["x", "y"]
    assert unique_names([("a", "b", "x"), ("a", "c", "x"), ("d", "y")]) == ["b-x", "c-x", "y"]
    assert unique_names([("x",), ("a", "x")]) == ["x", "a-x"]
    assert unique_names([("a", "b-c"), ("a-b", "c"), ("d", "c")]) == ["b-c", "a-b-c", "d-c"]
    names = unique_names([("r", "a", "b-c"), ("q", "a-b", "c"), ("s", "c"), ("t", "b-c")])
    assert len(set(names)) == 4


def test_a_folder_with_a_comma_is_one_checkpoint(two: tuple[Path, Path], tmp_path: Path) -> None:
    odd = shutil.copytree(two[0], tmp_path / "lr 1,5")
    assert [one.folder for one in find_checkpoints(str(odd))] == [odd]
    with pytest.raises(KitError, match="name a checkpoint"):
        find_checkpoints(",")


def test_paired_differences_against_a_plain_bootstrap() -> None:
    """Prompts of very different difficulty: pairing tells two drafters apart that their own intervals do not."""
    draws = np.random.default_rng(1)
    ours, theirs, counts = [], [], []
    for number in range(30):
        hard = draws.integers(0, 12)
        a = draws.integers(hard, hard + 3, size=draws.integers(5, 15))
        b = draws.integers(hard, hard + 2, size=draws.integers(5, 15))
        ours.append(RoundLog(prompt_id=str(number), num_accepted=tuple(map(int, a))))
        theirs.append(RoundLog(prompt_id=str(number), num_accepted=tuple(map(int, b))))
        counts.append((a.sum(), a.size, b.sum(), b.size))
    ours.append(RoundLog(prompt_id="only ours", num_accepted=(14, 14)))
    theirs.append(RoundLog(prompt_id="no rounds", num_accepted=()))
    found = paired_difference(ours, theirs)
    assert found is not None
    assert found.prompts == 30
    table = np.array(counts)
    sums = table.sum(axis=0)
    assert found.difference == pytest.approx(sums[0] / sums[1] - sums[2] / sums[3])
    samples = []
    for _ in range(4000):
        s = table[draws.integers(0, 30, size=30)].sum(axis=0)
        samples.append(s[0] / s[1] - s[2] / s[3])
    assert found.difference_ci95 == pytest.approx(tuple(np.percentile(samples, [2.5, 97.5])), abs=0.08)
    # Unpaired, the intervals of the two overlap by far.
    low, high = (summarise(logs, 15).acceptance_length_pooled_ci95 for logs in (ours[:-1], theirs[:-1]))
    assert low is not None
    assert high is not None
    assert found.difference_ci95 is not None
    assert found.difference_ci95[0] > 0
    assert low[0] < high[1]
    assert paired_difference(ours[-1:], theirs) is None
    one = paired_difference(ours[:1], theirs[:1])
    assert one is not None
    assert one.difference_ci95 is None


def test_memory_of_the_evaluation_before_is_freed() -> None:
    """Caches and their layers refer to each other, which counting references does not free."""
    with keeping():
        assert kept(str, "target") == "target"
        gone = weakref.ref(PathCache(1, 8))
        assert kept(str, "target") == "target"
        assert gone() is None
