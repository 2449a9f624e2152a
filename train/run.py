"""Launcher of the training stage; everything is in ``train/cli.py``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dflash_kit.errors import run_cli  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_cli("train.cli"))
