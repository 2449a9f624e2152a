"""Results on disk, one line per prompt as it is finished, so that a stopped evaluation goes on where it was.

``results.jsonl`` begins with the settings; every further line is one prompt with the rounds of all its responses.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dflash_kit.acceptance import RoundLog
from dflash_kit.errors import KitError, require_dir_empty
from dflash_kit.shard_journal import is_being_written

from .divergence import Divergence

RESULTS_NAME = "results.jsonl"
Method = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response by one method."""

    turn: int
    method: Method
    log: RoundLog
    token_ids: tuple[int, ...] = ()
    """Empty for replay, where they are the recorded ones."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        name, budget = self.method
        return {
            "turn": self.turn,
            "method": name,
            "budget": budget,
            "token_ids": list(self.token_ids),
            "log": self.log.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Response":
        """What ``to_dict`` wrote."""
        return cls(
            turn=values["turn"],
            method=(values["method"], values["budget"]),
            log=RoundLog.from_dict(values["log"]),
            token_ids=tuple(values["token_ids"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """Everything that was decoded for one prompt."""

    benchmark: str
    prompt_id: str
    responses: tuple[Response, ...]
    differing_tokens: dict[str, int]
    """Tokens that differ from autoregressive decoding, by method and budget; greedy decoding only."""
    divergences: tuple[Divergence, ...] = ()
    """First differing token of each response that leaves the autoregressive one; greedy decoding only."""
    text_hash: str | None = None
    """Of what was asked; None: not recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "benchmark": self.benchmark,
            "prompt_id": self.prompt_id,
            **({} if self.text_hash is None else {"text_hash": self.text_hash}),
            "differing_tokens": self.differing_tokens,
            "divergences": [divergence.to_dict() for divergence in self.divergences],
            "responses": [response.to_dict() for response in self.responses],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PromptResult":
        """What ``to_dict`` wrote."""
        return cls(
            benchmark=values["benchmark"],
            prompt_id=values["prompt_id"],
            responses=tuple(Response.from_dict(value) for value in values["responses"]),
            differing_tokens=dict(values["differing_tokens"]),
            divergences=tuple(Divergence.from_dict(value) for value in values.get("divergences", ())),
            text_hash=values.get("text_hash"),
        )


class ResultStore:
    """The results file of one report folder. One process at a time writes it: it holds a lock from ``open`` to ``close``.

    Args:
        folder: new, empty, or of an earlier run with the same settings.
        settings: all that decides the results, as plain values.

    Raises:
        KitError: the folder cannot be written, is being written by another process, or holds something else, results
            of other settings (the first difference is named) or a prompt twice.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self._settings = folder, json.loads(json.dumps(settings))
        self._file = folder / RESULTS_NAME
        self._lock: BinaryIO | None = None
        self._clear()
        _require_writable(folder)
        if self._file.exists():
            if is_being_written(self._file):
                raise self._is_taken()
            self._resume()
        else:
            require_dir_empty(folder, "report folder")

    def open(self) -> None:
        """Lock the file, made if need be, and cut off a line that a kill left unfinished; nothing was written before.

        Results that another run has added since are taken over.

        Raises:
            KitError: another process writes here, or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._file.open("a+b")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise self._is_taken() from error
        except OSError as error:
            self.close()
            raise KitError(
                f"report folder {self.folder} cannot be written: {error.strerror}; name another with --out"
            ) from error
        self._clear()
        self._resume()
        os.truncate(self._file, self._whole_bytes)
        if self._whole_bytes == 0:
            self._append({"settings": self._settings})

    def close(self) -> None:
        """Let other processes write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def inner(self, name: str) -> "ResultStore":
        """A store in a folder of this one, with the same settings, for results that are not whole yet."""
        return ResultStore(self.folder / name, self._settings)

    def has(self, benchmark: str, prompt_id: str) -> bool:
        """Whether this prompt is finished."""
        return (benchmark, prompt_id) in self._finished

    def add(self, result: PromptResult) -> None:
        """Keep one prompt; it is on disk when this returns."""
        self._append(result.to_dict())
        self._keep(result)

    def _clear(self) -> None:
        self.results: list[PromptResult] = []
        self._finished: set[tuple[str, str]] = set()
        self._whole_bytes = 0

    def _keep(self, result: PromptResult) -> None:
        self.results.append(result)
        self._finished.add((result.benchmark, result.prompt_id))

    def _is_taken(self) -> KitError:
        return KitError(
            f"another process is writing {self._file}; wait for it or stop it, or name another folder with --out"
        )

    def _append(self, values: dict[str, Any]) -> None:
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise KitError(
                f"{self._file} cannot be written: {error.strerror}; free some space and run again"
            ) from error

    def _resume(self) -> None:
        try:
            content = self._file.read_bytes()
        except OSError as error:
            raise KitError(f"{self._file} cannot be read: {error.strerror}; name a new folder with --out") from error
        self._whole_bytes = content.rfind(b"\n") + 1
        try:
            there, results = _parse(content[: self._whole_bytes])
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            reason = str(error) or type(error).__name__
            raise KitError(f"{self._file} is not a results file ({reason}); name a new folder with --out") from error
        there = self._settings if there is None else there
        if there.get("checkpoint_hash") != self._settings.get("checkpoint_hash"):
            raise KitError(
                f"report folder {self.folder} belongs to another checkpoint (checkpoint_hash {there.get('checkpoint_hash')} "
                f"there, {self._settings.get('checkpoint_hash')} now); name a new folder with --out"
            )
        # Live results where a replay's are wanted differ in much else, too.
        for name in sorted(set(there) | set(self._settings), key=lambda name: (name != "kind", name)):
            if there.get(name) != self._settings.get(name):
                raise KitError(
                    f"report folder {self.folder} holds results with {name} = {there.get(name)}, but this run has "
                    f"{name} = {self._settings.get(name)}; name a new folder with --out"
                )
        for result in results:
            if self.has(result.benchmark, result.prompt_id):
                raise KitError(
                    f"{self._file} holds prompt {result.prompt_id} of {result.benchmark} twice, which would count it "
                    "twice; delete one of the two lines, or name a new folder with --out"
                )
            self._keep(result)


def read_results(folder: Path) -> list[PromptResult]:
    """Results of an evaluation that has ended, whatever its settings.

    Raises:
        KitError: there is no such file, or it is none of results.
    """
    file = folder / RESULTS_NAME
    try:
        return _parse(file.read_bytes())[1]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise KitError(f"{file} cannot be read ({str(error) or type(error).__name__}); evaluate again") from error


def _parse(content: bytes) -> tuple[dict[str, Any] | None, list[PromptResult]]:
    """Settings (None: there is no line yet) and results of complete lines; raises what malformed ones make it raise."""
    records = [json.loads(line) for line in content.decode("utf-8").split("\n") if line]
    if not records:
        return None, []
    settings = records[0]["settings"]
    if not isinstance(settings, dict):
        raise TypeError(f"settings is {settings!r}")
    results = [PromptResult.from_dict(record) for record in records[1:]]
    for result in results:
        if not isinstance(result.benchmark, str) or not isinstance(result.prompt_id, str):
            raise TypeError(f"a prompt is named {result.prompt_id!r} of {result.benchmark!r}")
        if not all(type(count) is int for response in result.responses for count in response.log.num_accepted):
            raise TypeError(f"num_accepted of prompt {result.prompt_id} are not whole numbers")
    return settings, results


def _require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written before anything is decoded.

    Raises:
        KitError: naming the folder, and the part of its path that stands in the way.
    """
    try:
        existing = folder.absolute()
        while not existing.exists():
            existing = existing.parent
        reason = "is read-only here" if existing.is_dir() else "is a file"
        is_fine = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered, a null byte
        raise KitError(f"report folder {str(folder)!r} cannot be used: {error}; name another with --out") from error
    if not is_fine:
        raise KitError(f"report folder {folder} cannot be written: {existing} {reason}; name another with --out")


def count_differences(ours: Iterable[int], baseline: Iterable[int]) -> int:
    """Positions at which two token sequences differ, a missing token included."""
    ours, baseline = list(ours), list(baseline)
    common = sum(a != b for a, b in zip(ours, baseline, strict=False))
    return common + abs(len(ours) - len(baseline))


def total_differences(results: Iterable[PromptResult]) -> Counter[str]:
    """Differing tokens by method over all prompts."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.differing_tokens)
    return total
