"""Where a run stands, and how the files that say so are read: whole, or refused by name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError

NUMBERS = ("step", "skipped_steps", "bad_in_a_row", "tokens", "cut_tokens")
"""Counters that every saved state has."""


@dataclass(slots=True)
class Counters:
    """Where a run stands; everything else follows from the step."""

    step: int = 0
    """Optimizer steps behind us, skipped ones included."""
    skipped_steps: int = 0
    """Steps left out because of a non-finite loss or gradient."""
    bad_in_a_row: int = 0
    tokens: int = 0
    """Real tokens of packed rows seen by all processes."""
    cut_tokens: int = 0
    """Tokens left out because their conversation was longer than a packed row."""
    unreadable_rows: int = 0
    """Conversations left out because they cannot be read, each time that a step was to have one."""
    best_step: int | None = None
    """Step of the checkpoint with the best replayed acceptance length."""
    best_acceptance_length: float | None = None
    last_replay: dict[str, Any] = field(default_factory=dict)
    """Latest replayed acceptance, by method."""
    first_replay: dict[str, Any] = field(default_factory=dict)
    """Replayed acceptance before the first step, of a run that started from a drafter."""
    spool: dict[str, Any] | None = None
    """Where in its stream of shards a run on a spool stands (``SpoolPlan.state``)."""


def read_counters(file: Path, step: int) -> Counters:
    """The counters of the state saved after ``step`` steps.

    Raises:
        OSError, ValueError, TypeError: a missing or damaged file, or one of another step.
    """
    raw = as_object(json.loads(file.read_text()))
    odd = [name for name in NUMBERS if type(raw.get(name)) is not int or raw[name] < 0]
    if odd:
        raise ValueError(f"{odd[0]} is {json.dumps(raw.get(odd[0]))}, not a count")
    if raw["step"] != step or raw["skipped_steps"] > step:
        raise ValueError(
            f"it says step {raw['step']} with {raw['skipped_steps']} skipped, in the folder of step {step}"
        )
    return Counters(**raw)


def as_object(value: Any) -> dict[str, Any]:
    """A JSON object, or ``ValueError``."""
    if not isinstance(value, dict):
        raise ValueError(f"it holds {json.dumps(value)[:40]}, not a JSON object")
    return value


@contextmanager
def writes(file: Path) -> Iterator[None]:
    """Write a file of the state folder inside this context.

    Raises:
        KitError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise KitError(
            f"{file} cannot be written ({error.strerror or error}); make room there and run again"
        ) from error


@contextmanager
def whole(file: Path, remedy: str) -> Iterator[None]:
    """Read a file of the state folder inside this context.

    Args:
        file: the file.
        remedy: what the user can do where it is damaged.

    Raises:
        KitError: whatever went wrong, with the file and the remedy.
    """
    try:
        yield
    except KitError:
        raise
    except Exception as error:  # damaged bytes raise anything: SafetensorError, UnpicklingError, KeyError, EOFError …
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise KitError(f"{file} cannot be loaded ({why}); {remedy}") from error
