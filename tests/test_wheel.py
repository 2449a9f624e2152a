"""The wheel, built from the tracked files and installed elsewhere: one top-level name, all three commands."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_layout import LAUNCHERS, STAGES, tracked_files

from helpers import REPO

COMMANDS = {"dflash-extract": "extract", "dflash-train": "train", "dflash-eval": "evaluate"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files, so that nothing is left behind in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in tracked_files():
        target = source / path.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    out = tmp_path_factory.mktemp("wheel")
    pip_wheel(source, out)
    (built,) = out.glob("*.whl")
    return built


def pip_wheel(source: Path, out: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents as a site folder, as an installer would lay them out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(site: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in an empty folder with the installed wheel in front of everything else."""
    empty = site.parent / "empty"
    empty.mkdir(exist_ok=True)
    prelude = f"import sys; sys.path.insert(0, {str(site)!r}); "
    command = [sys.executable, "-c", prelude + code, *args]
    return subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False, timeout=300)


def test_wheel_owns_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dflash_kit"}
    assert len(tops) == 2


def test_wheel_holds_every_stage_data_and_recipes(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for stage in STAGES:
        assert f"dflash_kit/{stage}/{LAUNCHERS[stage]}" in names
    for path in tracked_files():
        name = path.relative_to(REPO).as_posix()
        # Drafters are for a checkout: a wheel of 40 MB would serve nobody who has a target of their own.
        if name.split("/")[0] in {*STAGES, "data", "configs"} and not name.startswith("data/drafters/"):
            assert f"dflash_kit/{name}" in names
    assert not [name for name in names if "tests" in name.split("/")]
    assert [name for name in names if name.endswith("LICENSE")]


def test_wheel_has_the_three_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(name).decode())
    expected = {command: f"dflash_kit.console:{function}" for command, function in COMMANDS.items()}
    assert dict(parser["console_scripts"]) == expected


def test_installed_package_imports_from_the_wheel_and_finds_its_data(site: Path) -> None:
    code = (
        "import dflash_kit.extract, dflash_kit.train, dflash_kit.decode; "
        "from dflash_kit.benchmark_prompts import data_folder, load_benchmark; "
        "print(dflash_kit.__file__, dflash_kit.extract.__file__, data_folder()); "
        "print(len(load_benchmark('gsm8k')))"
    )
    done = run_installed(site, code)
    assert done.returncode == 0, done.stderr
    *paths, num_prompts = done.stdout.split()
    assert len(paths) == 3
    assert all(path.startswith(str(site)) for path in paths)
    assert num_prompts == "1319"


@pytest.mark.parametrize("function", COMMANDS.values())
def test_installed_command_shows_help_and_refuses_an_unknown_flag(site: Path, function: str) -> None:
    code = f"from dflash_kit.console import {function} as command; sys.exit(command())"
    shown = run_installed(site, code, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--config" in shown.stdout
    refused = run_installed(site, code, "--outt", "x")
    assert refused.returncode == 2
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "--out" in errors[0]
    assert "Traceback" not in refused.stderr
