"""Which configuration of the delta rule's kernel is the fastest that is accurate: what `decode_hybrid.py` tries on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hybrid_shapes import make_tree
from measuring import attempt, graph_ms

from decode import delta_ops
from decode.delta_ops import PRECISION, Config, tree_delta
from decode.fused_target import padded_rows
from decode.gated_delta import solve_on_paths
from decode.hybrid_target import HybridPass, HybridTarget
from dflash_kit.tree import ancestor_mask

FEW_ROWS: list[Config] = [(16, 32, 4, PRECISION, 32, 2), (16, 32, 4, PRECISION, 32, 1), (16, 64, 4, PRECISION, 32, 1)]
MANY_ROWS: list[Config] = [
    (32, 32, 4, PRECISION, 16, 3), (64, 64, 8, PRECISION, 32, 2), (32, 64, 8, PRECISION, 32, 3),
    (32, 32, 4, PRECISION, 32, 2), (16, 32, 4, PRECISION, 32, 2), (64, 32, 8, PRECISION, 32, 2),
]  # fmt: skip
"""By whether a pass has more than 16 rows; the likeliest first, each compiles in one to two seconds."""
MAX_ERROR = 1e-4


def try_configs(target: HybridTarget, budget: int, goes_on: Callable[[], bool]) -> dict[str, Any]:
    """Milliseconds a layer and error against float64 of the delta rule, by configuration, while ``goes_on``."""
    tree, shape = make_tree(budget), target.shape
    step = target.new_pass(padded_rows(budget + 1))
    assert isinstance(step, HybridPass)
    step.tree.set_nodes(tree.tokens, tree.depths, tree.parents)
    rows, used = step.delta, budget + 1
    unit = torch.nn.functional.normalize
    rows.q.copy_(unit(torch.randn_like(rows.q), dim=-1) * shape.key**-0.5)
    rows.k[0].copy_(unit(torch.randn_like(rows.q), dim=-1))
    rows.v.normal_()
    rows.g.copy_(-torch.rand_like(rows.g))
    rows.beta.uniform_()
    state = torch.randn_like(target.states[0])
    repeats = shape.heads // shape.key_heads
    wide = [x[:used].double() for x in (rows.q.repeat_interleave(repeats, 1), rows.k[0].repeat_interleave(repeats, 1))]
    wide += [x[:used].double() for x in (rows.v, rows.g, rows.beta)]
    exact = solve_on_paths(*wide, state.double(), ancestor_mask(tree.parents).to(target.device))[1]  # type: ignore[arg-type]

    def timed_alone(config: Any = None) -> dict[str, Any]:
        def work() -> None:
            tree_delta(rows, 0, state, step.tree.mask, shape, config)

        rows.updates.fill_(float("nan"))
        work()
        error = float((rows.updates[0, :used] - exact).norm() / exact.norm())
        return {"ms": graph_ms(work), "error": error}

    with using("torch"):
        found: dict[str, Any] = {"torch": attempt(timed_alone)}
    for config in FEW_ROWS if padded_rows(used) <= 16 else MANY_ROWS:
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
    return "torch" if best == "torch" else tuple(json.loads(best))


@contextmanager
def using(config: Any) -> Iterator[None]:
    """Context in which the delta rule runs by a configuration, or by torch's solve; None: by its default one."""
    original = delta_ops.delta_config
    if config is not None:
        delta_ops.delta_config = lambda _rows, _shape: None if config == "torch" else config
    try:
        yield
    finally:
        delta_ops.delta_config = original
