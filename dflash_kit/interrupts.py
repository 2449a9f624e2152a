"""Ctrl-C and SIGTERM: how a run is asked to end, and how writing is kept whole while it is."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block has ended, for writes that must not be left half done.

    Only the main thread is ever interrupted; in others nothing needs to be held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        held.append(signum)

    before: dict[int, Any] = {signum: signal.signal(signum, hold) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        for signum in held:
            signal.raise_signal(signum)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, by ``KeyboardInterrupt``: schedulers send it before they kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: Any = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
