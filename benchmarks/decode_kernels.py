"""Time the single operations of a decoding round on a GPU, to choose row padding, tile shapes and splits.

    python benchmarks/decode_kernels.py gemm gemv attention tree

Each operation is captured several times in one CUDA graph, over rotating weights that do not fit the L2 cache.
Shapes are those of an 8B target. Prints a table; the numbers chosen from it stand in `decode/fused_ops.py` and `fused_products.py`.
"""

# ruff: noqa: B023 (every closure runs before its loop variable changes)
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode import fused_ops, fused_products
from decode.cuda_graphs import graph_us
from decode.device_tree import TreeBuffers, TreeBuilder

PROJECTIONS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
LAYERS = {"qkv": 36, "out": 36, "gate_up": 36, "down": 36, "head": 1}

ROW_COUNTS = (1, 8, 16, 24, 64, 65, 72, 80, 96, 128, 256, 257, 264, 272, 320, 384, 1024, 1025, 1032, 1040, 1088)
GEMV_TRIALS = [
    (1, 1024, 4),
    (1, 2048, 4),
    (1, 4096, 8),
    (2, 512, 4),
    (2, 1024, 4),
    (2, 2048, 8),
    (4, 512, 4),
    (4, 1024, 4),
    (1, 512, 2),
]
"""Rows a program, columns a step, warps."""
SKINNY_TRIALS = [
    (32, 128, 4, 4),
    (32, 128, 6, 4),
    (32, 256, 3, 4),
    (64, 128, 4, 4),
    (64, 64, 6, 4),
    (16, 256, 4, 4),
    (16, 256, 5, 2),
]
"""Features a program, columns a step, stages, warps."""
ATTENTION_TRIALS: dict[int, list[tuple[int, int, int, int, int]]] = {
    1: [(16, 64, 16, 4, 3), (16, 128, 8, 4, 2), (16, 64, 8, 4, 4)],
    16: [(64, 64, 8, 4, 3), (64, 64, 16, 4, 3), (16, 64, 4, 4, 3), (32, 64, 8, 4, 3)],
    72: [
        (64, 64, 3, 4, 3),
        (64, 128, 3, 4, 2),
        (32, 64, 2, 4, 3),
        (64, 128, 2, 4, 2),
        (128, 128, 5, 8, 2),
        (64, 64, 6, 4, 3),
        (128, 64, 5, 8, 3),
        (128, 64, 11, 8, 3),
    ],
    264: [
        (64, 64, 1, 4, 3),
        (64, 128, 1, 4, 2),
        (64, 128, 2, 4, 2),
        (128, 64, 2, 8, 3),
        (128, 128, 2, 8, 2),
        (64, 64, 2, 4, 3),
        (64, 64, 3, 4, 2),
        # Nine tiles of 128 rows for each of eight heads are 72 programs: two splits fill an H200 1.1 times, five 2.7, eleven 6 times.
        (128, 64, 5, 8, 3),
        (128, 128, 5, 8, 2),
        (128, 64, 11, 8, 3),
        (128, 128, 11, 8, 2),
    ],
    1032: [(128, 128, 1, 8, 2), (64, 128, 1, 4, 2), (128, 64, 1, 8, 4), (64, 64, 1, 4, 3), (64, 64, 1, 4, 2)],
}
"""Tile rows, tile keys, splits, warps, stages."""


def random_weights(name: str) -> list[torch.Tensor]:
    rows, columns = PROJECTIONS[name]
    count = max(2, int(4e8 / (rows * columns * 2)))
    return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]


def gemm(counts: Sequence[int] = ROW_COUNTS) -> None:
    """cuBLAS at many row counts: which padding is cheapest."""
    total = dict.fromkeys(counts, 0.0)
    print("rows  " + "".join(f"{name:>10}" for name in PROJECTIONS) + "  [us]   whole target [ms]")
    table: dict[int, list[float]] = {count: [] for count in counts}
    for name, (out_width, in_width) in PROJECTIONS.items():
        weights = random_weights(name)
        for count in counts:
            x = torch.randn(count, in_width, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(count, out_width, device="cuda", dtype=torch.bfloat16)
            us = graph_us([lambda w=w, x=x, out=out: torch.mm(x, w.t(), out=out) for w in weights[:6]])  # type: ignore[misc]
            table[count].append(us)
            total[count] += us * LAYERS[name] / 1e3
    for count in counts:
        print(f"{count:5d} " + "".join(f"{us:10.1f}" for us in table[count]) + f"{total[count]:12.3f}")


def gemm_lt() -> None:
    """The same through cuBLASLt's choice of algorithm."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    gemm([16, 72, 128, 256, 264, 272, 320, 1032])


def gemv() -> None:
    """The one-row kernel at several tile shapes."""
    for name in PROJECTIONS:
        weights = random_weights(name)
        out_width, in_width = PROJECTIONS[name]
        x = torch.randn(1, in_width, device="cuda", dtype=torch.bfloat16)
        swiglu = name == "gate_up"
        out = torch.empty(1, out_width // (2 if swiglu else 1), device="cuda", dtype=torch.bfloat16)
        for rows, block, warps in GEMV_TRIALS:
            fused_products.gemv_shape = lambda *_, shape=(rows, block, warps): shape  # type: ignore[assignment]
            us = graph_us([lambda w=w: fused_products.gemv(x, w, None, out, swiglu=swiglu) for w in weights[:6]])  # type: ignore[misc]
            print(
                f"{name:8} rows {rows:2} block {block:4} warps {warps}: {us:7.1f} us "
                f"{weights[0].numel() * 2 / us / 1e6:5.2f} TB/s"
            )


def skinny() -> None:
    """The few-row kernel at several tile shapes, against cuBLAS."""
    for count in (1, 16, 72):
        for name, (out_width, in_width) in PROJECTIONS.items():
            weights = random_weights(name)
            swiglu = name == "gate_up"
            x = torch.randn(count, in_width, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(count, out_width // (2 if swiglu else 1), device="cuda", dtype=torch.bfloat16)
            found = []
            for shape in SKINNY_TRIALS:
                fused_products.skinny_shape = lambda *_, shape=shape: shape  # type: ignore[assignment]
                try:
                    us = graph_us(
                        [lambda w=w: fused_products.skinny(x, w, None, out, swiglu=swiglu) for w in weights[:6]]
                    )  # type: ignore[misc]
                except Exception as error:
                    print(shape, type(error).__name__)
                    continue
                found.append((us, shape))
            print(f"rows {count:2} {name:8} " + ", ".join(f"{us:.1f} {shape}" for us, shape in sorted(found)))


def attention() -> None:
    """Tree attention at several tile shapes, one 8B layer."""
    for rows, contexts in [
        (1, (512, 8192)),
        (16, (512, 8192)),
        (72, (512, 8192)),
        (264, (512, 8192)),
        (1032, (512, 8192)),
    ]:
        for context in contexts:
            cache = torch.randn(2, 8, 9728, 128, device="cuda", dtype=torch.bfloat16)
            queries = torch.randn(rows, 32, 128, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)
            mask = fused_ops.pack_mask(torch.ones(rows, rows, device="cuda", dtype=torch.bool).tril())
            depths = torch.zeros(rows, device="cuda", dtype=torch.int32)
            length = torch.tensor([context], device="cuda", dtype=torch.int32)
            best = []
            for config in ATTENTION_TRIALS[rows]:
                try:
                    us = graph_us(
                        [
                            lambda config=config: fused_ops.tree_attention(  # type: ignore[misc]
                                queries, cache, mask, depths, length, out, scale=128**-0.5, config=config
                            )
                        ]
                        * 8
                    )
                except Exception as error:
                    print(config, type(error).__name__)
                    continue
                best.append((us, config))
            chosen = fused_ops.attention_shape(rows * 4, 8, context > 4096)
            print(
                f"rows {rows} context {context}: "
                + ", ".join(f"{us:.1f} us {c}" for us, c in sorted(best)[:4])
                + f"; now {chosen}"
            )


def tree() -> None:
    """Tree building, by part."""
    logits = torch.randn(15, 151936, device="cuda").mul_(3).bfloat16()
    for budget in (64, 256, 1024):
        buffers = TreeBuffers.allocate(-(-(budget + 1) // 8) * 8, "cuda")
        builder = TreeBuilder(15, 151936, budget, buffers)
        builder.build(logits)
        scratch = builder._buffers(logits.device)
        parts: dict[str, Callable[[], object]] = {
            "all": lambda: builder.build(logits),
            "topk": lambda: logits.topk(builder.num_ranks, dim=-1, sorted=False),
            "rank": lambda: builder._rank(logits, scratch),
            "grow": lambda: builder._grow(scratch),
            "number": lambda: builder._number(scratch),
        }
        print(f"tree {budget}: " + ", ".join(f"{name} {graph_us([work]):.1f} us" for name, work in parts.items()))


if __name__ == "__main__":
    for part in sys.argv[1:] or ("gemm", "gemv", "attention", "tree"):
        {"gemm": gemm, "gemv": gemv, "attention": attention, "skinny": skinny, "gemm_lt": gemm_lt, "tree": tree}[part]()
