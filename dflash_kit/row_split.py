"""Which rows are held out of training: decided by nothing but their ids, so that anybody can tell the two sides apart again."""

import hashlib
from collections.abc import Sequence


def hold_out(ids: Sequence[str], fraction: float) -> tuple[list[int], list[int]]:
    """Split rows by a hash of their id: a row's side never depends on which other rows there are.

    With a fraction above 0 and at least two rows, each side gets at least one.

    Returns:
        Indices to train on, ascending; indices held out, in the order of their hash.
    """
    places = in_hash_order(ids)
    num_held = sum(_place(row_id) < fraction for row_id in ids)
    if fraction > 0 and len(ids) > 1:
        num_held = min(max(num_held, 1), len(ids) - 1)
    return sorted(places[num_held:]), places[:num_held]


def in_hash_order(ids: Sequence[str]) -> list[int]:
    """Indices of all rows, in an order that depends on nothing but their ids."""
    return sorted(range(len(ids)), key=lambda i: (_place(ids[i]), i))


def ids_digest(ids: Sequence[str]) -> str:
    """Short hash of ids in their order, as a training run records it of its rows."""
    hasher = hashlib.blake2b(digest_size=8)
    for row_id in ids:
        hasher.update(row_id.encode() + b"\0")
    return hasher.hexdigest()


def _place(row_id: str) -> float:
    """Uniform in [0, 1), from nothing but the id."""
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8).digest()) / 2**64
