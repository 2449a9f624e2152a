"""A polite end: the first SIGTERM finishes the step, saves, and exits with status 0."""

import signal
from types import FrameType


class StopRequest:
    """Context manager that notes SIGTERM instead of dying from it."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "StopRequest":
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
