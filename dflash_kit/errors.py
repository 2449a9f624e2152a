"""The one exception for a user's mistake, and the checks every stage shares."""

import importlib
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path


class KitError(Exception):
    """A mistake or an unusable input that the user can mend.

    The message is one line: the offending value, what is allowed, and the fix.
    """


def run_cli(main: Callable[[list[str] | None], int] | str, argv: list[str] | None = None) -> int:
    """Run a stage's ``main`` and turn a ``KitError`` into one line on stderr.

    Args:
        main: the function, or the module that holds it: its imports take seconds, in which Ctrl-C may come as well.
        argv: the command line; None: that of the process.

    Returns:
        The exit status: what ``main`` returns, 2 for a ``KitError``, 130 after Ctrl-C, 141 when nobody reads the output
        any more.
    """
    _secure_streams()
    try:
        try:
            function: Callable[[list[str] | None], int] = (
                importlib.import_module(main).main if isinstance(main, str) else main
            )
            return function(argv)
        except KitError as error:
            print("error: " + " ".join(str(error).split()), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("error: interrupted; run the same command again to resume", file=sys.stderr)
            return 130
        finally:
            sys.stdout.flush()  # at exit nobody could handle its errors
    except BrokenPipeError:
        # Python flushes once more at exit; that must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("error: the output is read no more (a closed pipe); run the same command again", file=sys.stderr)
        return 128 + signal.SIGPIPE


def _secure_streams() -> None:
    """Let closed streams and terminals without Unicode take what is printed.

    A closed one leaves its number to the next file that is opened, into which libraries would print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def require_dir_empty(path: str | Path, what: str) -> None:
    """Refuse a folder that holds anything, so that nothing is ever overwritten.

    Raises:
        KitError: ``path`` is a file, or a folder that is not empty.
    """
    path = Path(path)
    if path.is_file():
        raise KitError(f"{what} {path} is a file; name a new or empty folder")
    if path.is_dir() and any(path.iterdir()):
        raise KitError(f"{what} {path} is not empty; nothing was written: name a new folder or empty it")


def require_folder_name(name: str, place: str) -> None:
    """Refuse a URL, also a mistyped one, where a folder is to be written: it would become a folder of that name here.

    Args:
        name: of the setting.
        place: its value.

    Raises:
        KitError: ``place`` begins like a URL.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", place):
        why = "a URL may stand for shards alone" if "://" in place else "a URL has two slashes"
        raise KitError(f"{name} is {place!r}, which is no folder ({why}); name a folder, as ./{place} if it is one")


def require_free_bytes(path: str | Path, num_bytes: int, what: str) -> None:
    """Refuse to start work that cannot fit on the disk.

    Raises:
        KitError: the file system that holds ``path`` has fewer than ``num_bytes`` bytes free.
    """
    num_free = free_bytes(path)
    if num_free < num_bytes:
        raise KitError(
            f"{what} needs {num_bytes:,} bytes in {path} but {num_free:,} are free; "
            "free some space or name a folder on another disk"
        )


def free_bytes(path: str | Path) -> int:
    """Free bytes of the file system that holds ``path``, which need not exist yet."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free
