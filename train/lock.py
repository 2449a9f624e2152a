"""One trainer at a time for a result: a lock on a file of the state folder, gone with the process that holds it."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dflash_kit.errors import KitError

LOCK_NAME = "lock"


class RunLock:
    """The right to write one state folder; the main process holds it for the whole run.

    Args:
        state: the state folder.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._descriptor: int | None = None

    def take(self) -> None:
        """Create the folder and lock it, without waiting.

        Raises:
            KitError: another trainer has it, or the folder cannot be written.
        """
        file = self._state / LOCK_NAME
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise KitError(
                f"state folder {self._state} cannot be written ({error.strerror}); name an --out inside a folder "
                "that you may write to"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have deleted it (see `release`), and a lock on a deleted file keeps nobody out.
            if not os.path.samestat(os.stat(file), os.fstat(descriptor)):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(descriptor)
            raise KitError(
                f"another trainer is writing {self._state}; wait for its end, stop it, or choose another --out"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise KitError(f"{file} cannot be locked ({error.strerror}); use a file system with locks") from error
        self._descriptor = descriptor

    def release(self, *, delete: bool) -> None:
        """Give it up, where this process has it.

        Args:
            delete: take the file and the folder away too, of a run that was refused before it wrote anything.
        """
        if self._descriptor is None:
            return
        if delete:
            with suppress(OSError):  # not empty: then it stays
                (self._state / LOCK_NAME).unlink()
                self._state.rmdir()
        os.close(self._descriptor)
        self._descriptor = None
