"""A pass over a tree of a hybrid target with a recurrent state for every node of every linear layer, as other engines keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measuring import ON_GPU, allocated, eager_ms, graph_ms, mib
from torch import Tensor

from decode import hybrid_target
from decode.delta_rule import DeltaRows, DeltaShape
from decode.hybrid_target import HybridPass, HybridTarget
from dflash_kit.tree import Tree


def time_state_per_node(target: HybridTarget, step: HybridPass, tree: Tree, repetitions: int) -> dict[str, Any]:
    """The same pass as ``target.run(step)``, its delta rule done node after node; milliseconds, MiB, and how its result differs."""
    before = allocated()
    rows, layers = len(tree) + 1, len(target.states)
    states = torch.zeros(layers, rows, *target.states.shape[1:], device=target.device)
    parents = torch.cat([tree.parents.new_tensor([-1]), tree.parents]).int().to(target.device)
    target.run(step)
    expected = step.delta.out[:rows].float().clone()
    with walking_nodes(states, parents):
        target.run(step)
        error = float((step.delta.out[:rows].float() - expected).norm() / expected.norm())
        timed = graph_ms(lambda: target.run(step)) if ON_GPU else eager_ms(lambda: target.run(step), repetitions)
    return {
        "state_per_node_ms": timed, "state_per_node_mib": mib(states.numel() * 4),
        "state_per_node_allocated_mib": mib(allocated() - before), "last_layer_differs_by": error,
    }  # fmt: skip


@contextmanager
def walking_nodes(states: Tensor, parents: Tensor) -> Iterator[None]:
    """Context in which hybrid targets walk the nodes; ``states`` (L, N, H, Dk, Dv) takes the state after each."""

    def per_node(delta: DeltaRows, layer: int, state: Tensor, _mask: Tensor, shape: DeltaShape) -> None:
        state_per_node(delta, layer, state, states[layer], parents, shape)

    original = hybrid_target.tree_delta
    hybrid_target.tree_delta = per_node  # type: ignore[assignment]
    try:
        yield
    finally:
        hybrid_target.tree_delta = original


def state_per_node(
    delta: DeltaRows, layer: int, state: Tensor, states: Tensor, parents: Tensor, shape: DeltaShape
) -> None:
    """Outputs of all rows and a state (N, H, Dk, Dv) after each, every row from its parent's."""
    count = parents.numel()
    if ON_GPU:
        from hybrid_state_kernel import state_per_node_kernel  # without a GPU there may be no Triton

        kernel: Any = state_per_node_kernel
        kernel[(shape.heads, -(-shape.value // 32))](
            delta.q, delta.k[layer], delta.v, delta.g, delta.beta, state, states, parents, delta.out, count,
            KEY_HEADS=shape.key_heads, HEADS=shape.heads, KEY=shape.key, VALUE=shape.value, BLOCK_V=32, num_warps=4,
        )  # fmt: skip
        return
    repeats = shape.heads // shape.key_heads
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (delta.q, delta.k[layer]))
    for row, parent in enumerate(parents.tolist()):
        held = (state if parent < 0 else states[parent]) * delta.g[row].exp()[:, None, None]
        update = delta.beta[row][:, None] * (delta.v[row] - torch.einsum("hkv,hk->hv", held, k[row]))
        states[row] = held + k[row][:, :, None] * update[:, None]
        delta.out[row] = torch.einsum("hkv,hk->hv", states[row], q[row]).flatten()
