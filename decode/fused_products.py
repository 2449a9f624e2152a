"""Matrix products of the fused target, with SwiGLU: cuBLAS, or kernels that read the weights once for few rows.

Shape legend: R rows (tree nodes, padded), D and N features in and out, F feed-forward width.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .kernel_launch import INTERPRETED, SKINNY_FEATURES, SKINNY_ROWS, launch_options, power_of_two, uses_kernels


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, F) = silu(gate) * up of ``gate_up`` (R, 2 F)."""
    if not uses_kernels(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return out.copy_(functional.silu(gate) * up)
    from .kernels import silu_mul_kernel

    rows, width = out.shape
    block = min(1024, power_of_two(width))
    silu_mul_kernel[(rows, -(-width // block))](gate_up, out, width, BLOCK=block, num_warps=4, **launch_options(out))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out`` (R, N) = x (R, D) @ weight.T + bias; few rows go through kernels that read the weights once."""
    if x.shape[0] == 1 and uses_kernels(x):
        return gemv(x, weight, bias, out)
    if uses_kernels(x) and x.shape[0] <= SKINNY_ROWS and weight.shape[0] >= SKINNY_FEATURES:
        return skinny(x, weight, bias, out)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def swiglu(x: Tensor, weight: Tensor, gate_up: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, F) = silu(gate) * up for the fused projection ``weight`` = [gate; up]; ``gate_up`` is scratch."""
    if x.shape[0] == 1 and uses_kernels(x):
        return gemv(x, weight, None, out, swiglu=True)
    if uses_kernels(x) and x.shape[0] <= SKINNY_ROWS and weight.shape[0] >= SKINNY_FEATURES:
        return skinny(x, weight, None, out, swiglu=True)
    return silu_mul(linear(x, weight, None, gate_up), out)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, swiglu: bool = False) -> Tensor:
    """One row times a weight matrix; ``swiglu`` reads [gate; up] and writes silu(gate) * up. Kernel only."""
    from .kernels import gemv_kernel

    width_in, width_out = x.shape[-1], out.shape[-1]
    rows, block, warps = gemv_shape(width_in, width_out, swiglu)
    gemv_kernel[(-(-width_out // rows),)](
        x, weight, bias if bias is not None else weight, out, width_in, width_out, SWIGLU=swiglu,
        HAS_BIAS=bias is not None, ROWS=rows, BLOCK=block, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


def gemv_shape(width_in: int, width_out: int, swiglu: bool) -> tuple[int, int, int]:
    """Rows a program, columns a step, warps: many small programs, 16 bytes a thread."""
    return (2 if width_out > 50000 else 1), min(1024, power_of_two(width_in)), 4


def skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, swiglu: bool = False) -> Tensor:
    """At most 80 rows times a weight matrix; arguments as for ``gemv``. Kernel only."""
    from .kernels import skinny_kernel

    (num_rows, width_in), width_out = x.shape, out.shape[-1]
    main, extra = (16, 0) if num_rows <= 16 else (64, 0) if num_rows <= 64 else (64, 16)
    assert num_rows <= main + extra, f"{num_rows} rows are not few"
    features, step, stages, warps = skinny_shape(width_in, width_out, num_rows)
    skinny_kernel[(-(-width_out // features),)](
        x, weight, bias if bias is not None else weight, out, num_rows, width_in, width_out, SWIGLU=swiglu,
        HAS_BIAS=bias is not None, FEATURES=features, STEP=step, MAIN=main, EXTRA=extra, num_warps=warps,
        num_stages=stages, **launch_options(x),
    )  # fmt: skip
    return out


def skinny_shape(width_in: int, width_out: int, num_rows: int) -> tuple[int, int, int, int]:
    """Weight rows a program, columns a step, pipeline stages, warps."""
    if INTERPRETED:
        return 16, 64, 1, 4
    return (64, 128, 4, 4) if width_out > 50000 else (32, 128, 4, 4)


@contextlib.contextmanager
def preferred_library(num_rows: int) -> Iterator[None]:
    """Let cuBLASLt choose the algorithm where its choice is better: measured at 72 rows, 2.5 % over all products."""
    if not (torch.cuda.is_available() and SKINNY_ROWS < num_rows <= 128):
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)
