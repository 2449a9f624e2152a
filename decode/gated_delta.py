"""Verify a tree over Gated DeltaNet layers in one pass, without a recurrent state per node.

Written twice. ``sequential_delta_rule`` walks each path of the tree from the root, in float64, by the recurrence of Gated
DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464, eq. 10) in the order of transformers' ``torch_recurrent_gated_delta_rule``:
S ← e^g S, u = β (v − Sᵀk), S ← S + k uᵀ, o = Sᵀq. It is what the other form is held against.

``tree_delta_rule`` takes all nodes at once. Along a path, with G the decay summed from the root and S₀ the committed state,
the recurrence unrolls to

    u_i = β_i (v_i − e^{G_i} S₀ᵀk_i − Σ_{j ancestor of i} e^{G_i − G_j} (k_j·k_i) u_j)
    o_i = e^{G_i} S₀ᵀq_i + Σ_{j ancestor of i, or i} e^{G_i − G_j} (k_j·q_i) u_j
    S_i = e^{G_i} S₀ + Σ_{j ancestor of i, or i} e^{G_i − G_j} k_j u_jᵀ

The first line is a unit lower triangular system in u, since parents come before their children: the UT (WY) form of a chunk
(arXiv 2406.06484, section 3), with ancestors where a chunk has earlier tokens.

Shape legend: N nodes, H value heads, KH key heads, Dk key width, Dv value width. H is a multiple of KH, and value head h reads
key head h // (H / KH), as in the models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_kit.tree import ancestor_mask


def sequential_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference: one sequential pass per root-to-leaf path, in float64 whatever it is given.

    Args:
        q, k, v, g, beta, state, parents: as for ``tree_delta_rule``; nothing is written to.

    Returns:
        Outputs (N, H, Dv) and the states (N, H, Dk, Dv) after every node, float64.

    Raises:
        ValueError: a parent that does not come before its child.
    """
    _require_order(parents)
    heads, above = v.shape[-2], parents.tolist()
    q, k = (spread_heads(x.double(), heads) for x in (q, k))
    v, g, beta, start = (x.double() for x in (v, g, beta, state))
    outputs, states = torch.zeros_like(v), start.new_zeros(len(above), *start.shape)
    for leaf in sorted(set(range(len(above))) - set(above)):
        path = [leaf]
        while above[path[-1]] >= 0:
            path.append(above[path[-1]])
        held = start
        for node in reversed(path):
            held = held * g[node].exp()[:, None, None]
            update = beta[node][:, None] * (v[node] - (held * k[node][:, :, None]).sum(1))
            held = held + k[node][:, :, None] * update[:, None, :]
            outputs[node], states[node] = (held * q[node][:, :, None]).sum(1), held
    return outputs, states


def tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor
) -> tuple[Tensor, Callable[[int], Tensor]]:
    """Outputs of every node given its own path, and the state after any node.

    Args:
        q: (N, KH, Dk) queries, normalised and scaled.
        k: (N, KH, Dk) keys, normalised.
        v: (N, H, Dv) values.
        g: (N, H) logarithm of each node's decay, at most 0.
        beta: (N, H) write strengths.
        state: (H, Dk, Dv) committed state; only read.
        parents: (N,) number of each node's parent, -1 where that is the committed state. Parents come first.

    Returns:
        Outputs (N, H, Dv) in the dtype of ``v``, and ``commit``: ``commit(i)`` is the state (H, Dk, Dv) after
        node i in the dtype of ``state``, ``commit(-1)`` a copy of the committed one.

    Raises:
        ValueError: a parent that does not come before its child.
    """
    _require_order(parents)
    return delta_rule_on_paths(q, k, v, g, beta, state, on_path(parents))


def _require_order(parents: Tensor) -> None:
    order = torch.arange(parents.numel(), device=parents.device)
    if bool((parents >= order).any()) or bool((parents < -1).any()):
        raise ValueError(f"parents {parents.tolist()} must each lie in -1 … node - 1")


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """(…, KH, Dk) to (…, H, Dk): each key head once for every value head of its group."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


def on_path(parents: Tensor) -> Tensor:
    """(N, N) bool: whether the second node is the first one or an ancestor of it; ``parents`` as above."""
    return ancestor_mask(parents + 1)[1:, 1:]


def delta_rule_on_paths(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, on_path: Tensor
) -> tuple[Tensor, Callable[[int], Tensor]]:
    """``tree_delta_rule`` where all layers share one ``on_path`` (N, N); nothing waits for the device."""
    outputs, updates, summed = solve_on_paths(q, k, v, g, beta, state, on_path)

    def commit(node: int) -> Tensor:
        if node < 0:
            return state.clone()
        return _state_behind(k, updates, summed, state, summed[node], on_path[node])

    return outputs.to(v.dtype), commit


def solve_on_paths(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, on_path: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs o (N, H, Dv) and updates u (N, H, Dv) of the equations above, at least float32, and decays G (N, H) float64.

    Everything may have leading dimensions, one tree with a state of its own for each of them. Where a node on the way has
    forgotten nearly all, G_i - G_j is a small difference of large sums: float32 would lose two digits of it.
    """
    compute = torch.promote_types(state.dtype, torch.float32)
    q, k = (spread_heads(x, v.shape[-2]) for x in (q, k))
    q, k, values = (x.to(compute).transpose(-3, -2) for x in (q, k, v))  # heads first
    g, beta = (x.to(compute).transpose(-2, -1) for x in (g, beta))
    start = state.to(compute)
    summed = g.double() @ on_path.double().mT  # (H, N): G
    # Masked before the exponential: between branches G_i - G_j may be large, and infinity times 0 is no
    # number.
    between = summed[..., :, None] - summed[..., None, :]
    decay = between.masked_fill(~on_path[..., None, :, :], float("-inf")).to(compute).exp()
    shrink = summed.exp().to(compute)[..., None]
    system = beta[..., None] * decay * (k @ k.mT)  # its diagonal is not read
    right = beta[..., None] * (values - shrink * (k @ start))
    updates = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    outputs = shrink * (q @ start) + (decay * (q @ k.mT)) @ updates
    return outputs.transpose(-3, -2), updates.transpose(-3, -2), summed.mT


def states_after(k: Tensor, updates: Tensor, summed: Tensor, state: Tensor, on_path: Tensor, leaves: Tensor) -> Tensor:
    """States (A, H, Dk, Dv) of A trees behind a node each; ``solve_on_paths`` gave updates and summed decays.

    Args:
        k: (A, N, KH, Dk).
        updates: (A, N, H, Dv).
        summed: (A, N, H) float64.
        state: (A, H, Dk, Dv) committed states.
        on_path: (A, N, N).
        leaves: (A,) the last node that is committed, in each tree.
    """
    trees = torch.arange(len(leaves), device=leaves.device)
    return _state_behind(k, updates, summed, state, summed[trees, leaves], on_path[trees, leaves])


def _state_behind(k: Tensor, updates: Tensor, summed: Tensor, state: Tensor, leaf: Tensor, is_kept: Tensor) -> Tensor:
    """State (H, Dk, Dv) behind a node with summed decays ``leaf`` (H,) whose path is ``is_kept`` (N,) bool.

    Everything may have leading dimensions, one tree for each of them.
    """
    compute = updates.dtype
    k = spread_heads(k, updates.shape[-2])
    weight = (leaf.unsqueeze(-2) - summed).masked_fill(~is_kept[..., None], float("-inf")).to(compute).exp()  # (N, H)
    written = torch.einsum("...nhk,...nhv->...hkv", weight[..., None] * k.to(compute), updates)
    return (leaf.exp().to(compute)[..., None, None] * state.to(compute) + written).to(state.dtype)
