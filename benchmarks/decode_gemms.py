"""Whether cuBLASLt has a faster algorithm for a verification's products than the one that torch takes.

    python benchmarks/decode_gemms.py --rows 72,264,1032

For each row count and each projection of an 8B target cuBLASLt is asked for up to ``--algorithms`` candidates, which are timed
beside ``torch.mm``, each in a CUDA graph over rotating weights that do not fit the L2 cache. Reported are microseconds (torch, what
the engine takes with DFLASH_FASTEST_PRODUCTS=1, the best candidate, the first one, how many ran), the largest difference of the best from torch's result, and the
sum over the target. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from decode_kernels import LAYERS, PROJECTIONS, random_weights  # noqa: E402
from measuring import Report, attempt, numbers  # noqa: E402

from decode.cublaslt import WORKSPACE_BYTES, Candidate, FastestProducts, Product  # noqa: E402
from decode.cuda_graphs import graph_us  # noqa: E402
from dflash_kit.provenance import git_commit  # noqa: E402


def measure(name: str, num_rows: int, count: int) -> dict[str, Any]:
    """One projection at one row count."""
    out_width, width = PROJECTIONS[name]
    weights = random_weights(name)[:6]
    x = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    out, want = (torch.empty(num_rows, out_width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch_us = graph_us([lambda w=w: torch.mm(x, w.t(), out=want) for w in weights])  # type: ignore[misc]
    product = Product(num_rows, width, out_width, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
    engine = FastestProducts()
    engine_us = graph_us([lambda w=w: engine.mm(x, w, out) for w in weights])  # type: ignore[misc]
    found: list[tuple[float, float, Candidate]] = []
    for candidate in product.candidates(count):

        def works(candidate: Candidate = candidate) -> float:
            return graph_us([lambda w=w: product.run(candidate, x, w, out) for w in weights])  # type: ignore[misc]

        us = attempt(works)
        if isinstance(us, float):
            found.append((us, (out.float() - want.float()).abs().max().item(), candidate))
    best = min(found, key=lambda each: each[0])
    return {
        "torch_us": round(torch_us, 2), "engine_us": round(engine_us, 2), "best_us": round(best[0], 2), "first_us": round(found[0][0], 2), "ran": len(found),
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
            for kind in ("torch", "engine", "best", "first")
            if all(isinstance(figures, dict) for figures in found.values())
        }
        report.add(**{f"rows_{num_rows}": found | sums})
    report.finish()


if __name__ == "__main__":
    main()
