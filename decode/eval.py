"""Launcher of the last stage: ``python decode/eval.py --ckpt …``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from dflash_kit.errors import run_cli  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_cli("decode.cli"))
