"""Typed reading of a configuration that another program may have written: each refusal names key, value and what is allowed."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import KitError

T = TypeVar("T")

LARGEST = 2**31 - 1
SHOWN_CHARACTERS = 60
"""Of a refused value, which may be a whole file."""


class RawConfig:
    """Values of a JSON object by key. ``None`` counts as absent.

    Args:
        values: the object.
        what: for messages.
        where: for messages, where a needed key may stand.
    """

    def __init__(self, values: Mapping[str, Any], what: str, where: str = "in it") -> None:
        self.values, self._what, self._where = values, what, where

    def has(self, key: str) -> bool:
        """Whether a value is there."""
        return self.values.get(key) is not None

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = LARGEST) -> int:
        """A whole number; needed where there is no default."""
        value = self._take(key, default)
        if type(value) is not int or not at_least <= value <= at_most:  # True is an int, too
            raise self._refusal(key, value, f"a whole number from {at_least} to {at_most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0) -> float:
        """A finite number above a limit; needed where there is no default."""
        value = self._take(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= above:
            raise self._refusal(key, value, f"a number above {above:g}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """True or false, None where it is absent."""
        value = self.values.get(key)
        if not isinstance(value, bool | None):
            raise self._refusal(key, value, "true or false")
        return value

    def items(self, key: str, kind: type[T], kind_name: str) -> tuple[T, ...]:
        """A list whose entries are all of one type (``bool`` is no ``int``)."""
        value = self._take(key, None)
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            raise self._refusal(key, value, f"a list of {kind_name}")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """A JSON object, empty where it is absent."""
        value = self.values.get(key)
        if not isinstance(value, dict | None):
            raise self._refusal(key, value, "a JSON object")
        return value or {}

    def _take(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise KitError(f"{self._what} has no {key!r}; it is needed {self._where}")
        return value

    def _refusal(self, key: str, value: Any, allowed: str) -> KitError:
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "…"
        return KitError(f"{self._what} has {key} = {shown}; it must be {allowed}")
