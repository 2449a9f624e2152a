"""Settings of the evaluation that go together or not, without loading anything."""

from pathlib import Path
from typing import Any

import pytest

from decode.modes import default_folder, watched_out
from decode.settings import EvalConfig, choose_device
from dflash_kit.config import parse_config
from dflash_kit.errors import KitError

RECIPE = "eval: {ckpt: drafter, budgets: '4,8', engine: portable, batch_size: 2, methods: chain, cpu_threads: 1}"


def test_the_doctor_needs_no_more_than_a_checkpoint() -> None:
    """Defaults that are made afresh (engine_args) are no settings of the user's."""
    assert EvalConfig(ckpt="drafter", doctor=True).doctor


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "portable", "replay": "shards"}, "leave engine portable out"),
        ({"engine": "fused", "replay": "shards"}, "leave engine fused out"),
        ({"batch_size": 2, "budgets": "4,auto"}, "one prompt at a time"),
        ({"out": " "}, "out is ' '; name a folder"),
        ({"replay": "shards", "temperature": 1.0}, "with replay, which reads responses"),
        ({"base_model": "org/name"}, "is for the card of push_to_hub"),
        ({"benchmarks": "math500=a.jsonl,math500=b.jsonl"}, "names math500 twice"),
        ({"benchmarks": "gsm8k,gsm8k"}, "names gsm8k twice"),
        ({"cpu_threads": 100_000}, "cpu_threads is 100000; 1 to 1024"),
        ({"ckpt": "", "watch": ""}, "watch is ''"),
        ({"ckpt": "", "watch": "/"}, "watch is '/'"),
    ],
)
def test_what_would_be_ignored_is_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, KitError), match=words):
        EvalConfig(**({"ckpt": "drafter"} | settings))


def test_auto_without_trees_stops_nothing() -> None:
    assert EvalConfig(ckpt="drafter", budgets="auto", methods="ar,chain", batch_size=2).batch_size == 2


def test_the_fused_engine_is_refused_on_a_cpu_before_anything_is_read() -> None:
    with pytest.raises(KitError, match="use --engine portable"):
        choose_device(EvalConfig(ckpt="drafter", engine="fused", device="cpu"))


def test_a_folder_that_says_no_name_has_its_report_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "drafter" / "inner"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert default_folder(EvalConfig(ckpt=".")) == tmp_path / "drafter" / "inner-report"
    assert default_folder(EvalConfig(ckpt="..", replay="shards")) == tmp_path / "drafter-replay"
    assert default_folder(EvalConfig(watch=".")) == tmp_path / "drafter" / "inner-watch-report"
    assert watched_out(".") == inside


def parse(tmp_path: Path, *flags: str) -> EvalConfig:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return parse_config("eval", EvalConfig, [f"--config={tmp_path / 'recipe.yaml'}", *flags], description="")


def test_a_recipe_serves_the_doctor_and_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says for live decoding is passed over, and said; on the command line it is refused."""
    examined = parse(tmp_path, "--doctor")
    assert (examined.doctor, examined.ckpt, examined.cpu_threads, examined.budgets) == (True, "drafter", 1, "16,64")
    assert capsys.readouterr().err == "note: budgets, engine, batch_size, methods of the recipe: without effect here\n"
    replayed = parse(tmp_path, "--replay", "shards")
    assert (replayed.engine, replayed.batch_size, replayed.budgets) == ("auto", 1, "4,8")
    assert "note: engine, batch_size of the recipe" in capsys.readouterr().err
    assert parse(tmp_path, "--doctor=false").batch_size == 2
    assert capsys.readouterr().err == ""
    with pytest.raises(KitError, match="batch_size is 3, but replay decodes nothing"):
        parse(tmp_path, "--replay=shards", "--batch_size=3")
