"""Matrix products by cuBLASLt, by whichever of its algorithms is fastest for a shape; ``DFLASH_FASTEST_PRODUCTS=1`` has it.

torch takes the first algorithm that cuBLASLt proposes. For the few dozen to few hundred rows of a verification that is not
always the best: of an 8B target's products one in five is 9 to 13 % faster by another (`benchmarks/decode_gemms.py`). What whole
rounds gain has not been measured in one run, and since timing decides, two runs may round bfloat16 sums differently: so it is
off unless asked for. cuBLASLt is the library that torch has loaded; where there is none, torch's own product is taken.

Shape legend: R rows, D and N features in and out.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cuda_graphs import graph_us

COMPUTE_F32, REAL_F32, REAL_BF16 = 68, 0, 14
TRANSPOSE_A, TRANSPOSED = 3, 1
MAX_WORKSPACE_BYTES = 1
WORKSPACE_BYTES = 32 << 20
CACHE_BYTES = 160 << 20
"""Copies of a weight that are read in turn take so much: far more than a GPU's L2 cache, in which no layer finds its weights."""
NUM_CANDIDATES = 16
ALIGNMENT_BYTES = 256
"""What cuBLASLt's candidates may count on unless told otherwise."""
WORTH_IT = 0.97
"""Share of torch's time that an algorithm must stay below to be taken: closer than that, noise would decide."""
TOLERANCE = 2.0**-6
"""Largest difference from torch's result, over the largest value: two roundings to bfloat16, and sums in another order."""


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
        num_rows: R, of x.
        width: D, columns of x and w.
        out_width: N, rows of w.
        workspace: (WORKSPACE_BYTES,) uint8, on the device.

    Raises:
        RuntimeError: cuBLASLt is not loaded, or refuses a call.
    """

    def __init__(self, num_rows: int, width: int, out_width: int, workspace: Tensor) -> None:
        self._lib, self._handle = _library(workspace.device)
        self._description, self._preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(self._description), COMPUTE_F32, REAL_F32)
        transposed = ctypes.c_int32(TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute", self._description, TRANSPOSE_A, ctypes.byref(transposed), ctypes.c_size_t(4)
        )  # fmt: skip
        # Columns first, as cuBLAS counts: w (width, out_width) transposed, x (width, rows), out (out_width, rows).
        self._w, self._x, self._out = (
            self._layout(*shape) for shape in ((width, out_width), (width, num_rows), (out_width, num_rows))
        )
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(self._preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", self._preference, MAX_WORKSPACE_BYTES, ctypes.byref(limit),
            ctypes.c_size_t(8),
        )  # fmt: skip
        self._workspace = workspace
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def candidates(self, count: int) -> list[Candidate]:
        """Up to ``count`` of what cuBLASLt would try, the likeliest first."""
        found, num_found = (Candidate * count)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._w, self._x, self._out, self._out,
            self._preference, count, found, ctypes.byref(num_found),
        )  # fmt: skip
        return [found[i] for i in range(num_found.value) if found[i].state == 0]

    def run(self, candidate: Candidate, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        """Queue the product of contiguous x (R, D) and w (N, D) on the current stream; returns ``out`` (R, N)."""
        w_at, x_at, out_at, workspace_at = (ctypes.c_void_p(t.data_ptr()) for t in (w, x, out, self._workspace))
        self._call(
            "cublasLtMatmul", self._handle, self._description, ctypes.byref(self._one), w_at, self._w, x_at, self._x,
            ctypes.byref(self._zero), out_at, self._out, out_at, self._out, ctypes.byref(candidate.algorithm),
            workspace_at, ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return out

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), REAL_BF16,
            ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._lib, name, *arguments)


@functools.cache
def _library(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """cuBLASLt as torch has loaded it, and a handle for a device."""
    loaded = sorted(
        {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line}
    )
    if not loaded:
        raise RuntimeError("torch has not loaded cuBLASLt")
    library, handle = ctypes.CDLL(loaded[0]), ctypes.c_void_p()
    with torch.cuda.device(device):
        _call(library, "cublasLtCreate", ctypes.byref(handle))
    return library, handle


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise RuntimeError(f"{name} says {status}")


class FastestProducts:
    """The fastest way to each product's result, found when its shape comes for the first time.

    For passes that run one after another: all products of a device share a workspace, which captured graphs keep using.
    """

    def __init__(self) -> None:
        self.serves = False
        """Whether ``linear`` comes here: set for the time of a pass, whose row count is one of a few."""
        self._workspaces: dict[torch.device, Tensor] = {}
        self._chosen: dict[tuple[Any, ...], tuple[Product, Candidate] | None] = {}

    def mm(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """``out`` (R, N) = x (R, D) @ weight.T on a GPU; torch's, unless all are bfloat16, contiguous and aligned.

        A shape's first product takes some 0.2 s more, and memory for copies of the weight; never while a graph is being
        captured, where an unknown shape goes to torch.
        """
        suits = all(
            t.dtype == torch.bfloat16 and t.is_contiguous() and t.data_ptr() % ALIGNMENT_BYTES == 0
            for t in (x, weight, out)
        )
        if not suits:
            return torch.mm(x, weight.t(), out=out)
        with torch.cuda.device(x.device):
            shape = (x.device, x.shape, weight.shape)
            if shape not in self._chosen and not torch.cuda.is_current_stream_capturing():
                self._chosen[shape] = self._choose(x, weight, out)
            chosen = self._chosen.get(shape)
            if chosen is None:
                return torch.mm(x, weight.t(), out=out)
            product, candidate = chosen
            return product.run(candidate, x, weight, out)

    def _choose(self, x: Tensor, weight: Tensor, out: Tensor) -> tuple[Product, Candidate] | None:
        """None: torch's own way is as good, or the only one."""
        try:
            if x.device not in self._workspaces:
                self._workspaces[x.device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
            # What lies in the buffers at first may be zeros, with which products are faster.
            x = torch.randn(x.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(0)).to(x.dtype)
            weights = [weight, *(weight.clone() for _ in range(min(8, CACHE_BYTES // weight.nbytes)))]
            product = Product(x.shape[0], x.shape[1], weight.shape[0], self._workspaces[x.device])
            found = timed(product, product.candidates(NUM_CANDIDATES), x, weights, out)
            limit_us = WORTH_IT * graph_us([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights])  # type: ignore[misc]
        except (RuntimeError, OSError, AttributeError):  # memory, the library, or a call of it
            return None
        best = min(found, key=lambda each: each[0], default=None)
        return (product, best[1]) if best is not None and best[0] < limit_us else None


def timed(
    product: Product, candidates: Sequence[Candidate], x: Tensor, weights: Sequence[Tensor], out: Tensor
) -> list[tuple[float, Candidate]]:
    """Microseconds of each candidate that gives torch's result, and the same bits each time; over ``weights`` in turn."""
    want, found = torch.mm(x, weights[0].t()).float(), list[tuple[float, Candidate]]()
    for candidate in candidates:
        try:
            first = product.run(candidate, x, weights[0], out).clone()
            is_right = (first.float() - want).abs().max() <= TOLERANCE * want.abs().max()
            if not is_right or not all(product.run(candidate, x, weights[0], out).equal(first) for _ in range(3)):
                continue
            works = [lambda w=w, c=candidate: product.run(c, x, w, out) for w in weights]
            found.append((graph_us(works), candidate))
        except RuntimeError:  # an algorithm that does not run for this shape after all
            continue
    return found


products = FastestProducts()
IS_ON = os.environ.get("DFLASH_FASTEST_PRODUCTS", "0") == "1"
