"""Configs: precedence, sections, coercion by type, one-line refusals that name the nearest key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from dflash_kit.config import SECTIONS, parse_config, save_config
from dflash_kit.errors import KitError, run_cli


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How continuations are sampled."""

    temperature: float = 0.0
    """Softmax temperature, 0 is greedy."""
    max_new_tokens: int = 128
    """Longest continuation, tokens."""

    def __post_init__(self) -> None:
        """Check the range."""
        if self.temperature < 0:
            raise ValueError(f"sampling.temperature is {self.temperature}; must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A stage's config."""

    out: str
    """Folder to write to."""
    block_size: int = 16
    """Slots of a block, the anchor included."""
    lr: float = 1e-3
    """Peak learning rate."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What answers the prompts."""
    budgets: tuple[int, ...] = (16, 64)
    """Nodes of a tree."""
    limit: int | None = None
    """Most prompts."""
    push_to_hub: str | None = None
    """Repository to upload to."""
    resume: bool = True
    """Continue where the last run stopped."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=7))
    """How continuations are sampled."""


def parse(*argv: str) -> Example:
    return parse_config("train", Example, list(argv), description="Train something.")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(KitError) as caught:
        parse(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_include_those_of_nested_factories() -> None:
    assert parse("--out", "x") == Example(out="x")
    assert parse("--out", "x").sampling == Sampling(temperature=0.0, max_new_tokens=7)


def test_precedence_is_defaults_then_yaml_then_flags_wherever_config_stands(tmp_path: Path) -> None:
    text = "train:\n  out: from-yaml\n  block_size: 8\n  sampling: {temperature: 0.5}\nextract: {model: m}\n"
    recipe = write(tmp_path / "r.yaml", text)
    for argv in (["--block_size=4", "--config", recipe], [f"--config={recipe}", "--block_size", "4"]):
        config = parse(*argv)
        assert (config.out, config.block_size, config.lr) == ("from-yaml", 4, 1e-3)
        assert config.sampling == Sampling(temperature=0.5, max_new_tokens=7)


def test_later_config_file_wins(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "out: a\nblock_size: 2\n")
    second = write(tmp_path / "b.yaml", "train:\n  out: b\n")
    config = parse("--config", first, "--config", second)
    assert (config.out, config.block_size) == ("b", 2)


def test_values_are_coerced_by_the_fields_type(tmp_path: Path) -> None:
    assert yaml.safe_load("lr: 6e-4")["lr"] == "6e-4"  # why a plain loader is not enough
    text = "out: '007'\nlr: 6e-4\nbetas: [9e-1, 1]\nbudgets: [1, 2, 3]\nlimit: null\nresume: false\n"
    text += "push_to_hub: '1e3'\n"
    config = parse("--config", write(tmp_path / "r.yaml", text))
    assert (config.out, config.push_to_hub) == ("007", "1e3")
    assert config.lr == 6e-4
    assert isinstance(config.lr, float)
    assert config.betas == [0.9, 1.0]
    assert config.budgets == (1, 2, 3)
    assert config.limit is None
    assert config.resume is False
    assert parse("--out", "x", "--lr", "1e-5", "--budgets", "[4]").budgets == (4,)


def test_strings_survive_yaml_unchanged(tmp_path: Path) -> None:
    values = {"out": "--weird path: {x}\n#é", "push_to_hub": "org/name"}
    config = parse("--config", write(tmp_path / "r.yaml", yaml.safe_dump(values)))
    assert {"out": config.out, "push_to_hub": config.push_to_hub} == values


def test_flags_accept_dashes_and_bare_booleans() -> None:
    config = parse("--out", "x", "--push-to-hub", "org/name", "--resume")
    assert (config.push_to_hub, config.resume) == ("org/name", True)
    assert parse("--resume", "--out", "x").resume is True
    assert parse("--out", "x", "--resume", "false").resume is False
    assert parse("--out", "x", "--sampling.max-new-tokens", "3").sampling.max_new_tokens == 3


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--out", "x", "--blok_size", "4"], ["--blok_size", "did you mean '--block_size'"]),
        (["--out", "x", "--sampling.temprature=1"], ["--sampling.temprature", "'--sampling.temperature'"]),
        (["--out", "x", "--temperature=1"], ["did you mean '--sampling.temperature'"]),
        (["--out", "x", "--block", "4"], ["unknown flag '--block'"]),  # no silent abbreviation
        (["--out", "x", "stray"], ["stray", "train"]),
        (["--block_size", "4"], ["--out"]),
        (["--out", "x", "--block_size", "four"], ["'four'", "block_size", "int"]),
        (["--out", "x", "--block_size", "1.5"], ["1.5", "block_size", "int"]),
        (["--out", "x", "--engine", "sglang"], ["'sglang'", "engine", "'vllm', 'transformers'"]),
        (["--out", "x", "--limit", "many"], ["many", "limit", "int or null"]),
        (["--out", "x", "--block_size"], ["block_size", "needs a value"]),
        (["--out", "x", "--config"], ["--config"]),
        (["--out", "x", "--sampling.temperature", "-1"], ["-1.0", "must be 0 or more"]),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train:\n  out: x\n  blok_size: 4\n", ["'blok_size' in train", "did you mean 'block_size'?"]),
        ("out: x\nsampling: {max_new_token: 4}\n", ["'max_new_token' in train.sampling", "'max_new_tokens'"]),
        ("out: x\nzzz: 4\n", ["'zzz'", "known: out, block_size"]),
        ("trian: {}\ntrain: {out: x}\n", ["unknown section 'trian'", "did you mean 'train'?"]),
        ("train: {out: x}\nblock_size: 3\n", ["unknown section 'block_size'"]),
        ("out: x\nblock_size: four\n", ["'four'", "block_size", "int"]),
        ("out: x\nsampling: 3\n", ["'sampling'", "3"]),
        ("out: 007\n", ["'out'", "quotes"]),
        ("out: x\npush_to_hub: 1e3\n", ["'push_to_hub'", "quotes"]),
        ("out:\n", ["'out'", "empty"]),
        ("- out\n", ["list"]),
        ("train: [out]\n", ["'train'", "list"]),
        ("out: [x\n", ["not valid YAML", "line"]),
        ("out: x\nengine: !!python/object/apply:os.system ['true']\n", ["not valid YAML"]),
    ],
)
def test_bad_yaml_is_refused_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal("--config", write(tmp_path / "bad.yaml", text))
    for part in parts:
        assert part in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "directory" in refusal("--config", str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"out: \xe9\n")
    assert "UTF-8" in refusal("--config", str(tmp_path / "latin.yaml"))


def test_print_config_resolves_and_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--lr", "6e-4", "--sampling.temperature", "1", "--print_config")
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)["train"]
    assert shown["lr"] == 6e-4
    assert shown["sampling"] == {"temperature": 1.0, "max_new_tokens": 7}
    assert shown["out"] is None  # still to be filled in
    assert set(shown) == set(Example.__dataclass_fields__)
    again = parse("--config", write(tmp_path / "r.yaml", printed.replace("out: null", "out: x")))
    assert again == Example(out="x", lr=6e-4, sampling=Sampling(temperature=1.0, max_new_tokens=7))


def test_saved_config_reads_back(tmp_path: Path) -> None:
    config = Example(out="x", lr=3e-4, budgets=(), limit=3, sampling=Sampling(temperature=0.7))
    save_config(config, tmp_path / "config.yaml")
    assert parse("--config", str(tmp_path / "config.yaml")) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_help_shows_the_fields_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "Train something.",
        "--sampling.max_new_tokens",
        "Slots of a block, the anchor included.",
        "--print_config",
    ):
        assert text in shown


def test_command_line_mistake_ends_with_status_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(lambda argv: int(parse(*(argv or [])).block_size), ["--oot", "x"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: unknown flag '--oot'")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_no_section_can_be_mistaken_for_a_key() -> None:
    assert not set(SECTIONS) & set(Example.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class WithMapping:
    """Options with a mapping of any names."""

    others: dict[str, Any] = field(default_factory=dict)
    """Passed on."""


def test_a_mapping_takes_any_name_and_a_yaml_date_is_refused(tmp_path: Path) -> None:
    config = parse_config("extract", WithMapping, ["--others.some_name", "fp8", "--others.count=3"], description="")
    assert config.others == {"some_name": "fp8", "count": 3}
    recipe = write(tmp_path / "r.yaml", "others: {a: 2020-01-01}\n")
    with pytest.raises(KitError, match="key 'others'"):
        parse_config("extract", WithMapping, ["--config", recipe], description="")
