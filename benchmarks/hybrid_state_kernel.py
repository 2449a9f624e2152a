"""The delta rule over a tree with a recurrent state for every node: what `decode_hybrid.py` compares against."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def state_per_node_kernel(
    q, k, v, g, beta, state, states, parents, out, num_rows,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Walk the nodes in order: read the parent's state, update it, write it, look at it. Grid: heads, value blocks."""
    head = tl.program_id(0)
    key_head = head // (HEADS // KEY_HEADS)
    key, value = tl.arange(0, KEY), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = (head * KEY + key)[:, None] * VALUE + value[None, :]
    size = HEADS * KEY * VALUE
    for row in range(num_rows):
        parent = tl.load(parents + row).to(tl.int64)
        if parent < 0:
            held = tl.load(state + at)
        else:
            held = tl.load(states + parent * size + at)
        held *= tl.exp(tl.load(g + row * HEADS + head))
        wrote = tl.load(k + (row * KEY_HEADS + key_head) * KEY + key)
        asked = tl.load(q + (row * KEY_HEADS + key_head) * KEY + key)
        given = tl.load(v + (row * HEADS + head) * VALUE + value)
        update = tl.load(beta + row * HEADS + head) * (given - tl.sum(held * wrote[:, None], axis=0))
        held += wrote[:, None] * update[None, :]
        tl.store(states + row.to(tl.int64) * size + at, held)
        result = tl.sum(held * asked[:, None], axis=0)
        tl.store(out + (row * HEADS + head) * VALUE + value, result.to(out.dtype.element_ty))
        tl.debug_barrier()
