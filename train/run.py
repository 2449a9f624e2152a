"""Launcher of the training stage; everything is in ``train/cli.py``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    from dflash_kit.errors import run_cli

    sys.exit(run_cli("train.cli"))
