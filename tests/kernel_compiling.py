"""Whether kernels that ran in Triton's interpreter also compile for a GPU: the interpreter takes types that the compiler refuses.

A process with ``TRITON_INTERPRET=1`` and ``DFLASH_LAUNCHES=FILE`` notes there what its kernels were launched with (``record_launches``,
by ``conftest``); another compiles that for Hopper, which needs no GPU (``compile_launches``). ``interpret_and_compile`` does both for tests.
"""

from __future__ import annotations

import atexit
import importlib
import json
from pathlib import Path
from typing import Any

import torch

from helpers import REPO, run_command

HOPPER = ("cuda", 90, 32)
VARIANTS = 2
"""Of each kernel, by its constants and types."""
POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1", torch.int16: "*i16",
}  # fmt: skip


def record_launches(file: Path) -> None:
    """Note what each kernel is launched with from now on; written when the process ends."""
    from triton.runtime import interpreter

    run, seen = interpreter.GridExecutor.__call__, dict[str, list[dict[str, Any]]]()

    def noted(self: Any, *inputs: Any, **named: Any) -> Any:
        values = dict(zip(self.arg_names, inputs, strict=False)) | named
        launch: dict[str, Any] = {
            "module": self.fn.__module__,
            "kernel": self.fn.__name__,
            "types": {},
            "constants": {},
        }
        launch["warps"] = named.get("num_warps", 4)
        for name in self.arg_names:
            value = values.get(name)
            if name in self.constexprs or value is None:
                launch["constants"][name] = value
            else:
                launch["types"][name] = _type_of(value)
        known = seen.setdefault(f"{launch['module']}.{launch['kernel']}", [])
        if launch not in known and len(known) < VARIANTS:
            known.append(launch)
        return run(self, *inputs, **named)

    interpreter.GridExecutor.__call__ = noted
    atexit.register(lambda: file.write_text(json.dumps([launch for known in seen.values() for launch in known])))


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def interpret_and_compile(tests: Path, chosen: str, folder: Path) -> tuple[str, set[str]]:
    """Run the chosen tests of a file in the interpreter, in a process of its own, and compile what ran: pytest's words, the kernels' names."""
    launches = folder / "launches.json"
    settings = {"TRITON_INTERPRET": "1", "DFLASH_LAUNCHES": str(launches)}
    done = run_command("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests, "-k", chosen, cwd=REPO, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout, compile_launches(launches)


def compile_launches(file: Path) -> set[str]:
    """Compile what was noted; the kernels' names.

    Raises:
        triton.compiler.errors.CompilationError: one does not compile; its source stands in the message.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launches = json.loads(file.read_text())
    for launch in launches:
        kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
        types = launch["types"] | dict.fromkeys(launch["constants"], "constexpr")
        source = ASTSource(kernel, types, constexprs=launch["constants"])
        triton.compile(source, target=GPUTarget(*HOPPER), options={"num_warps": launch["warps"]})
    return {launch["kernel"] for launch in launches}
