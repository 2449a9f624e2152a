"""What shows work on a terminal: a bar that is there as long as the work."""

from types import TracebackType
from typing import Self

from rich.progress import Progress


class LiveBar:
    """Context manager around ``_bar``, which the class that builds on this makes."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
