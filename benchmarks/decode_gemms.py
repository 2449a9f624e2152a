"""Whether cuBLASLt has a faster algorithm for a verification's products than the one that torch takes.

    python benchmarks/decode_gemms.py --rows 72,264,1032

For each row count and each projection of an 8B target cuBLASLt is asked for up to ``--algorithms`` candidates, which are timed
beside ``torch.mm``, each in a CUDA graph over rotating weights that do not fit the L2 cache. Reported are microseconds (torch, the
best candidate, the first one, how many ran), the largest difference from torch's result, and the sum over the target. What the best
candidates would save is what the engine could gain by choosing them itself; it does not. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from decode_kernels import LAYERS, PROJECTIONS, random_weights, replay_us  # noqa: E402
from measuring import Report, attempt, numbers  # noqa: E402

from dflash_kit.provenance import git_commit  # noqa: E402

COMPUTE_F32, REAL_F32, REAL_BF16 = 68, 0, 14
TRANSPOSE_A, TRANSPOSED = 3, 1
MAX_WORKSPACE_BYTES = 1
WORKSPACE_BYTES = 32 << 20


class Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product:
    """x @ w.T in bfloat16 by cuBLASLt, with an algorithm of one's choice.

    Args:
        num_rows: of x.
        width: columns of x and w.
        out_width: rows of w.
    """

    def __init__(self, num_rows: int, width: int, out_width: int) -> None:
        self._lib = load_library()
        self._handle, self._description, self._preference = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._call("cublasLtMatmulDescCreate", ctypes.byref(self._description), COMPUTE_F32, REAL_F32)
        transposed = ctypes.c_int32(TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute",
            self._description,
            TRANSPOSE_A,
            ctypes.byref(transposed),
            ctypes.c_size_t(4),
        )
        # Columns first, as cuBLAS counts: w (width, out_width) transposed, x (width, rows), out (out_width, rows).
        self._w, self._x, self._out = (
            self._layout(*shape) for shape in ((width, out_width), (width, num_rows), (out_width, num_rows))
        )
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(self._preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            self._preference,
            MAX_WORKSPACE_BYTES,
            ctypes.byref(limit),
            ctypes.c_size_t(8),
        )
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def candidates(self, count: int) -> list[Candidate]:
        """What cuBLASLt would try, the likeliest first."""
        found, num_found = (Candidate * count)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._w, self._x, self._out, self._out,
            self._preference, count, found, ctypes.byref(num_found),
        )  # fmt: skip
        return [found[i] for i in range(num_found.value) if found[i].state == 0]

    def run(self, candidate: Candidate, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """Queue the product on the current stream."""
        w_at, x_at, out_at, workspace_at = (ctypes.c_void_p(t.data_ptr()) for t in (w, x, out, self._workspace))
        self._call(
            "cublasLtMatmul", self._handle, self._description, ctypes.byref(self._one), w_at, self._w, x_at, self._x,
            ctypes.byref(self._zero), out_at, self._out, out_at, self._out, ctypes.byref(candidate.algorithm),
            workspace_at, ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), REAL_BF16,
            ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} says {status}")


def load_library() -> ctypes.CDLL:
    """cuBLASLt as torch has loaded it."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line}
    return ctypes.CDLL(next(iter(loaded)))


def measure(name: str, num_rows: int, count: int) -> dict[str, Any]:
    """One projection at one row count."""
    out_width, width = PROJECTIONS[name]
    weights = random_weights(name)[:6]
    x = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    out, want = (torch.empty(num_rows, out_width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch_us = replay_us([lambda w=w: torch.mm(x, w.t(), out=want) for w in weights])  # type: ignore[misc]
    product = Product(num_rows, width, out_width)
    found: list[tuple[float, float, Candidate]] = []
    for candidate in product.candidates(count):

        def works(candidate: Candidate = candidate) -> float:
            return replay_us([lambda w=w: product.run(candidate, x, w, out) for w in weights])  # type: ignore[misc]

        us = attempt(works)
        if isinstance(us, float):
            found.append((us, (out.float() - want.float()).abs().max().item(), candidate))
    best = min(found, key=lambda each: each[0])
    return {
        "torch_us": round(torch_us, 2), "best_us": round(best[0], 2), "first_us": round(found[0][0], 2), "ran": len(found),
        "difference": round(best[1], 4), "tflop_s": round(2e-6 * num_rows * width * out_width / best[0], 1),
        "waves": round(best[2].waves, 2), "workspace_bytes": best[2].workspace_bytes,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=numbers, default="72,264,1032", help="comma-separated row counts")
    parser.add_argument("--algorithms", type=int, default=64, help="candidates to ask for")
    parser.add_argument("--limit_s", type=float, default=120.0, help="seconds for the whole; 0: no limit")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is visible here")
    torch.mm(*torch.ones(2, 64, 64, device="cuda", dtype=torch.bfloat16))  # loads cuBLAS
    report = Report(
        options.limit_s, options.out, benchmark="decode_gemms", device=torch.cuda.get_device_name(),
        torch=torch.__version__, commit=git_commit(),
    )  # fmt: skip
    for num_rows in options.rows:
        found = {}
        for name in PROJECTIONS:
            report.at(f"{name}, {num_rows} rows")
            found[name] = attempt(lambda name=name, num_rows=num_rows: measure(name, num_rows, options.algorithms))  # type: ignore[misc]
        sums = {
            f"{kind}_ms": round(sum(figures[f"{kind}_us"] * LAYERS[name] for name, figures in found.items()) / 1e3, 3)
            for kind in ("torch", "best", "first")
            if all(isinstance(figures, dict) for figures in found.values())
        }
        report.add(**{f"rows_{num_rows}": found | sums})
    report.finish()


if __name__ == "__main__":
    main()
