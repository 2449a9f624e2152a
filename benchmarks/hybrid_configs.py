"""Which configuration of the delta rule's kernel is the fastest that is accurate: what `decode_hybrid.py` tries on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hybrid_shapes import drawn_rows, exact_updates
from measuring import attempt, graph_ms
from torch import Tensor

from decode import delta_rule
from decode.delta_rule import DeltaConfig, DeltaShape, tree_delta

FEW_ROWS = [
    DeltaConfig(16, 32, 4, 32, 2, 32, 2, 16, 2), DeltaConfig(16, 64, 2, 32, 2, 32, 2, 16, 2),
    DeltaConfig(16, 64, 4, 32, 2, 64, 4, 16, 2),
]  # fmt: skip
MANY_ROWS = [
    DeltaConfig(32, 64, 2, 16, 3, 32, 2, 16, 2), DeltaConfig(64, 64, 8, 16, 3, 32, 4, 32, 2),
    DeltaConfig(32, 64, 4, 16, 3, 32, 4, 32, 2), DeltaConfig(32, 32, 2, 16, 3, 64, 4, 16, 2),
    DeltaConfig(32, 128, 4, 16, 3, 16, 2, 16, 2), DeltaConfig(16, 64, 2, 32, 2, 32, 2, 16, 2),
    DeltaConfig(64, 64, 8, 16, 3, 16, 4, 32, 2),
]  # fmt: skip
"""By whether a pass has more than 16 rows; the likeliest first. Compiled for sm_90, none spills more than 20 bytes at widths of 128."""
MAX_ERROR = 1e-4


def try_configs(shape: DeltaShape, budget: int, like: Tensor, goes_on: Callable[[], bool]) -> dict[str, Any]:
    """Milliseconds a layer and error against float64 of the delta rule, by configuration, while ``goes_on``.

    Args:
        shape: of a layer.
        budget: nodes of the tree.
        like: the model's dtype and device.
        goes_on: whether there is time for another.
    """
    rows, seen, mask = drawn_rows(shape, 1, budget, like)
    state = torch.randn(shape.heads, shape.key, shape.value, device=like.device)
    exact = exact_updates(rows, 0, state, seen)

    def timed_alone(config: Any = None) -> dict[str, Any]:
        def work() -> None:
            tree_delta(rows, 0, state, mask, shape, config)

        rows.updates.fill_(float("nan"))
        work()
        error = float((rows.updates[0, : len(seen)] - exact).norm() / exact.norm())
        return {"ms": graph_ms(work), "error": error}

    with using("torch"):
        found: dict[str, Any] = {"torch": attempt(timed_alone)}
    for config in FEW_ROWS if rows.v.shape[0] <= 16 else MANY_ROWS:
        if not goes_on():
            break
        found[json.dumps(config)] = attempt(lambda config=config: timed_alone(config))  # type: ignore[misc]
    return found


def best_config(tried: Any) -> Any:
    """The fastest configuration that is accurate, or "torch"; None where none is."""
    entries = tried.items() if isinstance(tried, dict) else ()
    good = {
        key: value["ms"]
        for key, value in entries
        if isinstance(value, dict) and value["ms"] is not None and value["error"] < MAX_ERROR
    }
    if not good:
        return None
    best = min(good, key=good.__getitem__)
    return "torch" if best == "torch" else DeltaConfig(*json.loads(best))


@contextmanager
def using(config: Any) -> Iterator[None]:
    """Context in which the delta rule runs by a configuration, or by torch's solve; None: by its default one."""
    original = delta_rule.delta_config
    if config is not None:
        delta_rule.delta_config = lambda _rows: None if config == "torch" else config
    try:
        yield
    finally:
        delta_rule.delta_config = original
