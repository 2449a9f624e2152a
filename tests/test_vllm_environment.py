"""What vLLM's processes are told: in float32 its Triton kernels multiply in float32."""

from pathlib import Path

import pytest

from helpers import HAS_TRITON, HAS_VLLM, REPO, run_command

SCRIPT = """
import sys
from dflash_kit.vllm_environment import prepare_environment
prepare_environment(dtype=sys.argv[1])
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def product(left, right, out):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))

source = ASTSource(product, dict.fromkeys(("left", "right", "out"), "*fp32"), constexprs={})
print("tf32" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.skipif(not (HAS_TRITON and HAS_VLLM), reason="needs vLLM and triton")
@pytest.mark.parametrize(("dtype", "has_tf32"), [("float32", "False"), ("bfloat16", "True")])
def test_float32_is_multiplied_in_float32(dtype: str, has_tf32: str, tmp_path: Path) -> None:
    script = tmp_path / "product.py"
    script.write_text(SCRIPT)
    done = run_command(script, dtype, cwd=REPO, PYTHONPATH=str(REPO))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == has_tf32
