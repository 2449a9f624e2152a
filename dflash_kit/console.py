"""Console scripts of an installed wheel, where the stages are dflash_kit.extract, .train and .decode.

Each imports its stage only when called, so that one stage's missing extras never break another's command.
"""

from __future__ import annotations

from dflash_kit.errors import run_cli


def extract() -> int:
    """Command `dflash-extract`, the same as `python extract/dump.py`."""
    return _run("extract")


def train() -> int:
    """Command `dflash-train`, the same as `python train/run.py`."""
    return _run("train")


def evaluate() -> int:
    """Command `dflash-eval`, the same as `python decode/eval.py`."""
    return _run("decode")


def _run(stage: str) -> int:
    return run_cli(f"dflash_kit.{stage}.cli")
