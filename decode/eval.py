"""Launcher of the last stage: ``python decode/eval.py --ckpt …``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from dflash_kit.errors import run_cli

    sys.exit(run_cli("decode.cli"))
