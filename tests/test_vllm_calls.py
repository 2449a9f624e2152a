"""Calls into an engine that may die: they end, whatever vLLM's own do."""

import threading
import time
from types import SimpleNamespace

import pytest

from dflash_kit import vllm_calls
from dflash_kit.vllm_calls import EngineGoneError, ask, stop


class FakeEngine:
    """Answers, raises, or never answers and is found dead after a while."""

    def __init__(self, answer=None, error=None, dies_after_s=None, shuts_down=True):
        self.answer, self.error, self.dies_after_s, self.shuts_down = answer, error, dies_after_s, shuts_down
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False), shutdown=self.shutdown)
        self.was_shut_down = threading.Event()

    def collective_rpc(self, name, args=()):
        if self.error is not None:
            raise self.error
        if self.answer is not None:
            return [self.answer, name, args]
        if self.dies_after_s is not None:
            time.sleep(self.dies_after_s)
            self.engine_core.resources.engine_dead = True
        return threading.Event().wait()  # as vLLM's future of an engine that is gone

    def shutdown(self, timeout):
        self.was_shut_down.set()
        if not self.shuts_down:
            threading.Event().wait()


def test_an_answer_and_an_error_come_through():
    assert ask(FakeEngine(answer=1), "status", (2,)) == [1, "status", (2,)]
    with pytest.raises(ValueError, match="no such method"):
        ask(FakeEngine(error=ValueError("no such method")), "status")


def test_an_engine_that_dies_meanwhile_is_noticed():
    with pytest.raises(EngineGoneError, match="died"):
        ask(FakeEngine(dies_after_s=0.1), "status")


def test_an_engine_that_is_silent_is_given_up_in_time():
    with pytest.raises(EngineGoneError, match="no answer within"):
        ask(FakeEngine(), "status", timeout_s=0.3)


def test_stopping_ends_whatever_the_engine_does(monkeypatch, capsys):
    monkeypatch.setattr(vllm_calls, "CLOSE_S", 0.3)
    engine = FakeEngine(dies_after_s=0.1, shuts_down=False)
    stop(engine, finish="shard_writer_finish")
    assert engine.was_shut_down.wait(120)
    assert "did not close in order (EngineGoneError)" in capsys.readouterr().err
