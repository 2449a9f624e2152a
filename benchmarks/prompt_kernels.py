"""Configurations of flash-linear-attention's kernels for prompts, so that their first use compiles six of them and not 59.

    eval $(python benchmarks/prompt_kernels.py runs/fla)

Without them Triton compiles and times every choice at the first prompt. The package reads a folder of
files, one a kernel, at its import; the choices here are among its own and were not tuned.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

CHOICES: dict[str, tuple[dict[str, int], int, int]] = {
    "l2norm_fwd_kernel": ({"BT": 32}, 4, 3),
    "chunk_local_cumsum_scalar_kernel": ({}, 2, 3),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 2, 3),
    "recompute_w_u_fwd_kernel": ({}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 3),
    "chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
}
"""Arguments, warps, stages."""


def write_choices(folder: Path) -> dict[str, str]:
    """Write the files; the environment under which the package, imported later, takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (arguments, warps, stages) in CHOICES.items():
        config = {"kwargs": arguments, "num_warps": warps, "num_stages": stages, "num_ctas": 1}
        (folder / f"{name}.json").write_text(json.dumps({"kernel_name": name, "default_config": config}))
    return {"FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": str(folder)}


def reads_prompts() -> bool:
    """Whether transformers takes the package's kernels: it may be installed and fail to import."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except Exception:  # as transformers does
        return False
    return callable(chunk_gated_delta_rule) and callable(fused_recurrent_gated_delta_rule)


def use_choices(folder: Path) -> None:
    """Let this process take them, unless its environment says otherwise already."""
    if "FLA_CACHE_MODE" not in os.environ:
        os.environ.update(write_choices(folder))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: name one folder to write to: python benchmarks/prompt_kernels.py FOLDER")
    for name, value in write_choices(Path(sys.argv[1]).resolve()).items():
        print(f"export {name}={shlex.quote(value)}")
