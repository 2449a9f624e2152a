"""A training run as one who only looks on sees it: its checkpoints, what it says it has written, and whether it has ended.

Checkpoints lie in ``OUT.state/checkpoints/step-00000400`` and are pruned as training goes on; OUT holds the finished drafter.
A folder of another trainer has numbered folders in it (``checkpoint-400``, ``step_400``, ``400``) and no end of its own.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from dflash_kit.checkpoint import CONFIG_NAME, PROVENANCE_NAME, follow_link, read_provenance
from dflash_kit.errors import KitError

from .modes import CHECKPOINTS_NAME, STATE_SUFFIX, watched_out

NUMBERED = re.compile(r"(?:[A-Za-z]+[-_])?(\d{1,12})")


class TrainingRun:
    """See the module; nothing is ever written there.

    Args:
        place: OUT, OUT.state, OUT.state/checkpoints, or a folder of another trainer; it need not be there yet.
    """

    def __init__(self, place: str | Path) -> None:
        self.out = follow_link(watched_out(place))
        self.state = self.out.with_name(self.out.name + STATE_SUFFIX)

    def checkpoints(self) -> dict[int, Path]:
        """Folders of checkpoints that are there now, by step."""
        found: dict[int, Path] = {}
        for folder in (self.out, self.state / CHECKPOINTS_NAME):
            for entry in _entries(folder):
                match = NUMBERED.fullmatch(entry.name)
                if match and (entry / CONFIG_NAME).is_file():
                    found[int(match[1])] = entry
        return dict(sorted(found.items()))

    def finished(self) -> Path | None:
        """The finished drafter, None while there is none."""
        return self.out if (self.out / PROVENANCE_NAME).is_file() else None

    def finished_step(self) -> int | None:
        """The step that the finished drafter is of, where it says so."""
        try:
            step = (read_provenance(self.out).get("metrics") or {}).get("step")
        except KitError:
            return None
        return step if isinstance(step, int) else None

    def written_steps(self) -> set[int]:
        """Steps after which the run's own record says that it wrote a checkpoint: regular ones and those that were best.

        Empty for another trainer. A spool's trainer also saves in between, of which there is no record.
        """
        newest, steps = 0, set()
        for line in _lines(self.state / "metrics.jsonl"):
            step = line.get("step")
            if isinstance(step, int):
                newest = max(newest, step)
                if line.get("kind") == "replay" and line.get("best"):
                    steps.add(step)
        every = _mapping(self.state / "train.yaml").get("save_every_steps")
        if isinstance(every, int) and every > 0:
            steps |= set(range(every, newest + 1, every))
        return steps

    def identity(self) -> str | None:
        """A hash of what the run recorded at its beginning; None before that, and for another trainer."""
        try:
            return hashlib.blake2b((self.state / "run.json").read_bytes(), digest_size=16).hexdigest()
        except OSError:
            return None

    def require_apart(self, out: Path) -> None:
        """Refuse a file in place of the run, and a report in the folders that its trainer writes, which it would find taken.

        Raises:
            KitError: naming file or folder.
        """
        if self.out.is_file():
            raise KitError(f"watch names {self.out}, a file; name the folder of a training run")
        theirs = (self.out.resolve(), self.state.resolve())
        if any(folder in (out.resolve(), *out.resolve().parents) for folder in theirs):
            raise KitError(
                f"report folder {out} lies in {self.out} or its state, which the trainer writes; name another with --out"
            )

    def signs(self) -> tuple[object, ...]:
        """Changes whenever the run is seen to do something."""
        return (tuple(self.checkpoints()), _stamp(self.state / "metrics.jsonl"), self.finished())


def _entries(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a file that is being appended to."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    found = []
    for line in text.split("\n")[:-1]:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _mapping(file: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
