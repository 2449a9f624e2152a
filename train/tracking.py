"""The numbers of metrics.jsonl in TensorBoard or W&B, through accelerate's trackers; only the main process has one."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_kit.errors import KitError

if TYPE_CHECKING:
    from .settings import TrainConfig
    from .state import RunFolder

PIP_NAMES = {"tensorboard": "tensorboard", "wandb": "wandb"}
PROJECT = "dflash-kit"
RUN_ID_NAME = "wandb-run-id"


def require_tracker(report_to: str) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        KitError: with the name to install.
    """
    from accelerate.utils import is_tensorboard_available, is_wandb_available

    available = {"none": lambda: True, "tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    if not available[report_to]():
        raise KitError(
            f"report_to is {report_to} but that package is not installed; "
            f"run `pip install {PIP_NAMES[report_to]}`, or set report_to to none"
        )


class Tracker:
    """Where a run's numbers go beside metrics.jsonl: nowhere, to TensorBoard files in OUT.state/tensorboard, or to W&B.

    Args:
        config: of the run; ``report_to`` decides.
        folder: of the run.
    """

    def __init__(self, config: "TrainConfig", folder: "RunFolder") -> None:
        self._config, self._folder = config, folder
        self._inner: Any = None

    def start(self, step: int) -> None:
        """Begin, or go on from ``step`` of an interrupted run; the main process calls it.

        Raises:
            KitError: the tracker refuses, for instance for want of a login.
        """
        kind = self._config.report_to
        if kind == "none":
            return
        try:
            self._inner = self._tensorboard(step) if kind == "tensorboard" else self._wandb()
            self._inner.start()
        except Exception as error:  # wandb's own classes, OSError …
            why = _words(error)
            help_text = "log in with `wandb login` or set WANDB_MODE=offline" if kind == "wandb" else "free the disk"
            raise KitError(f"report_to is {kind} but it cannot start ({why}); {help_text}, or use none") from error

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Send the numbers of one line of metrics.jsonl, under names such as ``train/loss`` and ``train/slot_accuracy/1``.

        Raises:
            KitError: the tracker takes no more, for instance for want of disk.
        """
        if self._inner is None:
            return
        try:
            self._inner.log(dict(_numbers(kind, {k: v for k, v in values.items() if k != "step"})), step=step)
        except Exception as error:
            raise KitError(
                f"report_to is {self._config.report_to} but it takes no more numbers ({_words(error)}); run again with "
                "--report_to none to go on without it from the last saved state"
            ) from error

    def finish(self) -> None:
        """Write what is left."""
        if self._inner is not None:
            self._inner.finish()
            self._inner = None

    def _tensorboard(self, step: int) -> Any:
        from accelerate.tracking import TensorBoardTracker

        # What an interrupted run logged behind its last saved state is said again.
        return TensorBoardTracker("tensorboard", str(self._folder.state), purge_step=step + 1 if step else None)

    def _wandb(self) -> Any:
        from accelerate.tracking import WandBTracker

        id_file = self._folder.state / RUN_ID_NAME
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        return WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT),
            name=self._folder.out.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(self._folder.state),
            config=asdict(self._config),
        )


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in nested dictionaries and lists, by its path; places of a list count from 1, as slots do."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(place), item) for place, item in enumerate(value, 1)]
    else:
        items = []
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
    for key, item in items:
        yield from _numbers(f"{name}/{key}", item)
