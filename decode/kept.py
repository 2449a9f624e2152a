"""Models that several evaluations of one command share: a target is loaded once for all checkpoints that belong to it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_kept: dict[Callable[..., Any], tuple[tuple[Any, ...], Any]] = {}
_depth = 0


@contextmanager
def keeping() -> Iterator[None]:
    """Within the block, ``kept`` hands out again what it has loaded; behind it everything is let go."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            forget()


def kept(load: Callable[..., T], name: str, **arguments: Any) -> T:
    """``load(name, **arguments)``, or what the last such call gave; outside of ``keeping`` always anew.

    One result is held for each function, so that two targets never lie in memory for longer than they must. The engine of the
    evaluation before is let go of first: its caches and layers refer to each other, and would stay until Python looks for such.
    """
    if not _depth:
        return load(name, **arguments)
    gc.collect()
    key = (name, *sorted(arguments.items()))
    held = _kept.get(load)
    if held is None or held[0] != key:
        _kept.pop(load, None)  # before the next one is loaded
        held = _kept[load] = (key, load(name, **arguments))
    result: T = held[1]
    return result


def forget() -> None:
    """Let go of everything, as when a model has been changed in place."""
    _kept.clear()
