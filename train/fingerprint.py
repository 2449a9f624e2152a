"""What must not change between runs, and the refusal of a run that changes it."""

import json
from collections.abc import Mapping
from typing import Any

from dflash_kit.errors import KitError


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with other settings.

    Raises:
        KitError: naming the first setting that differs, and both values.
    """
    flat_before, flat_now = _flat(before), _flat(json.loads(json.dumps(now)))
    for name in sorted(flat_before.keys() | flat_now.keys()):
        was, is_ = flat_before.get(name), flat_now.get(name)
        if was != is_:
            raise KitError(
                f"{what} has {name} = {json.dumps(was)} but this command says {json.dumps(is_)}; "
                "repeat the command that began it or choose another --out"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
