"""Results on disk, one line per prompt as it is finished, so that a stopped evaluation goes on where it was.

``results.jsonl`` begins with the settings; every further line is one prompt with the rounds of all its responses.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kit.acceptance import RoundLog
from dflash_kit.errors import KitError, require_dir_empty

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "benchmark": self.benchmark,
            "prompt_id": self.prompt_id,
            "differing_tokens": self.differing_tokens,
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
        )


class ResultStore:
    """The results file of one report folder.

    Args:
        folder: new, empty, or of an earlier run with the same settings.
        settings: all that decides the results, as plain values.

    Raises:
        KitError: the folder holds something else, or results of other settings (the first difference is named).
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self._settings = folder, json.loads(json.dumps(settings))
        self._file = folder / RESULTS_NAME
        self.results: list[PromptResult] = []
        self._finished: set[tuple[str, str]] = set()
        self._whole_bytes = 0
        if self._file.exists():
            self._resume()
        else:
            require_dir_empty(folder, "report folder")

    def open(self) -> None:
        """Create folder and file, or cut off a line that a kill left unfinished; nothing was written before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            os.truncate(self._file, self._whole_bytes)
        if self._whole_bytes == 0:
            self._append({"settings": self._settings})

    def has(self, benchmark: str, prompt_id: str) -> bool:
        """Whether this prompt is finished."""
        return (benchmark, prompt_id) in self._finished

    def add(self, result: PromptResult) -> None:
        """Keep one prompt; it is on disk when this returns."""
        self._append(result.to_dict())
        self._keep(result)

    def _keep(self, result: PromptResult) -> None:
        self.results.append(result)
        self._finished.add((result.benchmark, result.prompt_id))

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
        content = self._file.read_bytes()
        self._whole_bytes = content.rfind(b"\n") + 1
        lines = content[: self._whole_bytes].decode("utf-8").splitlines()
        try:
            records = [json.loads(line) for line in lines]
            there = records[0]["settings"] if records else self._settings
            for record in records[1:]:
                self._keep(PromptResult.from_dict(record))
        except (ValueError, KeyError, TypeError) as error:
            raise KitError(f"{self._file} is not a results file ({error}); name a new folder with --out") from error
        for name in sorted(set(there) | set(self._settings)):
            if there.get(name) != self._settings.get(name):
                raise KitError(
                    f"report folder {self.folder} holds results with {name} = {there.get(name)}, but this run has "
                    f"{name} = {self._settings.get(name)}; name a new folder with --out"
                )


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
