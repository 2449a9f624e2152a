"""What ends vLLM's workers when the process that started them is gone."""

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

DRIVER_VARIABLE = "DFLASH_KIT_DRIVER_PID"
"""Environment of workers that shall end with an evaluation: its process id."""


def end_with_driver(driver_pid: int, finish: Callable[[], None]) -> None:
    """End this worker when the driver is gone: a killed driver must not leave an engine that holds folder and memory.

    Args:
        driver_pid: process id of the driver; on another host or an old kernel nothing is watched.
        finish: called first, to save what the writer holds.
    """
    try:
        descriptor = os.pidfd_open(driver_pid)
    except ProcessLookupError:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid == driver_pid:  # killed before this worker came so far
            os._exit(1)
        return
    except (AttributeError, OSError):
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        try:
            finish()
        finally:  # nobody is left to be told of an error
            engine = multiprocessing.parent_process()
            if engine is not None and engine.pid not in (None, driver_pid):
                with suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGTERM)
            os._exit(1)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()
