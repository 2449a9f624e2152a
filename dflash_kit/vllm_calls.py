"""Calls into vLLM's engine that come back: vLLM's own wait for ever for an answer of an engine that has died meanwhile."""

import sys
import threading
import time
from typing import Any

POLL_S = 0.2
CLOSE_S = 60.0
"""Seconds in which an engine in order finishes what it holds."""


class EngineGoneError(RuntimeError):
    """The engine has died, or does not answer."""


def ask(engine: Any, name: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None) -> list[Any]:
    """What the workers answer to a call by name (``collective_rpc``).

    A Ctrl-C goes to vLLM's processes as well and may end them first (0.26), after which nobody answers.

    Args:
        engine: vLLM's ``LLMEngine``.
        name: method of the workers.
        args: of the method.
        timeout_s: longest wait; None waits as long as the engine lives.

    Raises:
        EngineGoneError: the engine died, or the time is over.
        Exception: what the call itself raised.
    """
    answers: list[list[Any]] = []
    errors: list[Exception] = []
    done = threading.Event()

    def call() -> None:
        try:
            answers.append(engine.collective_rpc(name, args=args))
        except Exception as error:
            errors.append(error)
        done.set()

    threading.Thread(target=call, name=f"ask-{name}", daemon=True).start()
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while not done.wait(POLL_S):
        if is_dead(engine):
            raise EngineGoneError("its engine has died")
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise EngineGoneError(f"no answer within {timeout_s:.0f} s")
    if errors:
        raise errors[0]
    return answers[0]


def is_dead(engine: Any) -> bool:
    """Whether vLLM has noticed that the engine's processes are gone."""
    resources = getattr(engine.engine_core, "resources", None)
    return bool(getattr(resources, "engine_dead", False))


def stop(engine: Any, *, finish: str | None = None) -> None:
    """End an engine's processes.

    Args:
        engine: vLLM's ``LLMEngine``.
        finish: a method of the workers that saves what they hold, called with None first if the engine still answers.
    """
    try:
        if finish is not None:
            ask(engine, finish, (None,), timeout_s=CLOSE_S)
    except Exception as error:  # a dead engine: its unfinished shard is dropped by the next run
        print(f"note: the engine did not close in order ({type(error).__name__})", file=sys.stderr)
    end = threading.Thread(target=engine.engine_core.shutdown, kwargs={"timeout": 1.0}, daemon=True)
    end.start()  # nothing is left to be saved
    end.join(CLOSE_S)
