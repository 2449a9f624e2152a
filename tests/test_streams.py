"""Commands whose output goes nowhere, or to a terminal without Unicode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPO

PROGRAM = """
import os, sys
from dflash_kit.errors import run_cli
def main(argv):
    with open(sys.argv[1], "w") as file:
        file.write(f"{file.fileno()}")
        print("τ = 2.5 ×")
        os.write(1, b"from a library")
    return 3
sys.exit(run_cli(main))
"""


def run(place: Path, redirected: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = f'exec "$0" -c "$1" "$2" {redirected}'
    environment = {**os.environ, "PYTHONPATH": str(REPO), **variables}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, PROGRAM, str(place)], env=environment, capture_output=True, timeout=300
    )


@pytest.mark.parametrize("redirected", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, redirected: str) -> None:
    """No traceback, and what is printed does not land in the file that would have had the stream's number."""
    done = run(tmp_path / "written", redirected)
    assert (done.returncode, done.stderr) == (3, b"")
    assert int((tmp_path / "written").read_text()) > 2


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    done = run(tmp_path / "written", "", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (3, b"")
    assert b"? = 2.5 ?" in done.stdout
