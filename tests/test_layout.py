"""Rules of the layout: who may import whom, names that shadow others, recipes, the repository's contents."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from dflash_kit.config import parse_config
from dflash_kit.recipe import SECTIONS
from helpers import REPO

STAGES = ("extract", "train", "decode")
LAUNCHERS = {"extract": "dump.py", "train": "run.py", "decode": "eval.py"}
STAGE_CONFIGS = {
    "convert": ("dflash_kit.gguf", "ConvertConfig"),
    "extract": ("extract.cli", "ExtractConfig"),
    "train": ("train.cli", "TrainConfig"),
    "eval": ("decode.cli", "EvalConfig"),
}
OUTSIDE_NAMES = (
    "decode.tree:build_tree",
    "decode.gated_delta:tree_delta_rule",
    "dflash_kit.target:tap_layer_ids",
    "dflash_kit.drafter:Drafter.from_pretrained",
    "dflash_kit.shards:open_shards",
    "extract.cli:main",
    "train.cli:main",
    "decode.cli:main",
)
RECIPES = sorted(path.name for path in (REPO / "configs").glob("*.yaml"))


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((REPO / folder).rglob("*.py"))]


def imported_names(path: Path) -> set[str]:
    """Absolute dotted names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def stages_of(names: set[str]) -> set[str]:
    """Stages that dotted names lead to, by either of a stage's two names."""
    return {name.removeprefix("dflash_kit.").split(".")[0] for name in names} & set(STAGES)


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := REPO / name).is_file()]


@pytest.mark.parametrize("stage", STAGES)
def test_launchers_hold_no_logic(stage: str) -> None:
    path = REPO / stage / LAUNCHERS[stage]
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 25
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.If, ast.Expr)
    assert all(isinstance(node, allowed) for node in tree.body)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For)]
    guards = [node for node in tree.body if isinstance(node, ast.If)]
    assert [ast.unparse(node.test) for node in guards] == ["__name__ == '__main__'"]  # vLLM spawns processes
    assert "sys.path[0]" in text


def test_no_stage_imports_another_and_inside_a_stage_imports_are_relative() -> None:
    for stage in STAGES:
        for path in sources(stage):
            if path.name != LAUNCHERS[stage]:
                assert stages_of(imported_names(path)) == set(), path
    assert stages_of({"dflash_kit.decode.tree", "torch"}) == {"decode"}  # the check itself can fail


def test_shared_package_imports_no_stage() -> None:
    for path in sources("dflash_kit"):
        assert stages_of(imported_names(path)) == set(), path


def test_no_module_is_named_like_the_standard_library_or_a_dependency() -> None:
    """`python extract/dump.py` puts the stage's folder on the path, where such a name would break imports."""
    ours = {"dflash_kit", *STAGES}
    installed = set(importlib.metadata.packages_distributions()) - ours
    assert {"torch", "datasets", "vllm"} & installed
    for path in sources(*STAGES):
        assert path.stem not in sys.stdlib_module_names, path
        assert path.stem == "__init__" or path.stem not in installed, path
    for path in sources("dflash_kit"):
        assert path.stem not in sys.stdlib_module_names, path


@pytest.mark.parametrize("name", OUTSIDE_NAMES)
def test_names_that_outside_checks_use_are_callable(name: str) -> None:
    module, _, attributes = name.partition(":")
    found = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    assert callable(found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_parses_by_its_stages(recipe: str) -> None:
    path = REPO / "configs" / recipe
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(sections) <= set(SECTIONS)
    for section in sections:
        module, class_name = STAGE_CONFIGS[section]
        config_class = getattr(importlib.import_module(module), class_name)
        parse_config(section, config_class, ["--config", str(path)], description="")


def test_every_section_has_a_config_class_with_documented_fields() -> None:
    assert set(STAGE_CONFIGS) == set(SECTIONS)
    waiting = [getattr(importlib.import_module(module), name) for module, name in STAGE_CONFIGS.values()]
    while waiting:
        cls = waiting.pop()
        nested = {f.name: f.default_factory for f in dataclasses.fields(cls) if inspect.isclass(f.default_factory)}
        groups = {name for name, kind in nested.items() if dataclasses.is_dataclass(kind)}
        waiting += [nested[name] for name in groups]
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in zip(definition.body, [*definition.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) not in groups:
                assert isinstance(after, ast.Expr), f"{cls.__name__}.{ast.unparse(field)}"
        assert ast.get_docstring(definition), cls.__name__


def test_files_that_the_makefile_names_exist() -> None:
    text = (REPO / "Makefile").read_text()
    named = set(re.findall(r"(?:configs|extract|train|decode|\.ci)/[\w./-]+", text))
    assert len(named) >= 5
    for name in named:
        assert (REPO / name).is_file(), name


def test_sources_stay_readable_in_size() -> None:
    for path in sources("dflash_kit", *STAGES, "tests", "data"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path


def test_tracked_files_hold_no_machine_paths_package_hosts_or_tokens() -> None:
    folders = "|".join(["work", "root", "home", "Users", "opt"])
    hosts = "|".join(["pypi" + r"\.org", "python" + "hosted", r"download\.py" + "torch", "pypi" + r"\.nvidia"])
    pattern = re.compile(rf"(?<![\w.<$}}])/(?:{folders})/\w|{hosts}|hf_[A-Za-z0-9]{{30,}}")
    assert pattern.search("see /" + "work/main")
    for path in tracked_files():
        if path.suffix in (".png", ".safetensors"):
            continue
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(REPO)} holds {found[0] if found else ''}"
