"""Prompts read by flash-linear-attention's kernels leave the logits and states of transformers' own torch functions.

Where that package is installed: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1, which some versions of it do not
take as they are). The truth is the same model in float64 on a CPU. On GPUs the kernels multiply in tf32, whose products see
ten bits of float32's 23. What that does to these very prompts is computed: the torch functions with the inputs of every
product rounded to ten bits, and cut to them, as hardware does either; the kernels may be FACTOR times as far from the truth
as the worse of the two. The interpreter multiplies in float32.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hybrid import FAMILIES, random_tree, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from decode import hybrid_target, target_runner
from decode.fused_ops import INTERPRETED
from decode.hybrid_target import HybridTarget
from decode.target_runner import TargetRunner
from dflash_kit.target import load_target
from helpers import HAS_GPU, make_tiny_target

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None or not (HAS_GPU or INTERPRETED),
    reason="needs flash-linear-attention, and a GPU or Triton's interpreter",
)
DEVICE = "cuda" if HAS_GPU else "cpu"
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
Rules = dict[str, Callable[..., Any]]
ROUNDED = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.linalg_solve_triangular}
FACTOR = 4
"""In the interpreter the kernels are up to 1.2 times as far with ten bits of either kind, 4.4 to 10.5 with bfloat16's seven."""
FLOAT32 = 2e-5
"""What another order of float32's sums may add, relative to the norm, after the layers of these models."""
MOST_ALLOWED = 5e-2
"""Beyond, the bound would say little: a state that lacks a piece of the prompt is off by its own size."""


class Tf32Products(TorchDispatchMode):
    """Products of float32 see ten bits of their inputs, nearest or cut (``added`` 0x1000 or 0)."""

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in ROUNDED:
            args = [self.ten_bits(x) if isinstance(x, torch.Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))

    def ten_bits(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return ((x.view(torch.int32) + self.added) & -0x2000).view(torch.float32)


def in_tf32(rules: Rules, added: int) -> Rules:
    def wrap(rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with Tf32Products(added):
                return rule(*args, **kwargs)

        return run

    return {name: wrap(rule) for name, rule in rules.items()}


def sizes_of(family: str) -> dict[str, Any]:
    """Every row takes every expert: a choice that rounding can flip is a jump, which says nothing of kernels."""
    sizes = FAMILIES[family]
    return sizes | {"num_experts_per_tok": sizes["num_experts"]} if "num_experts" in sizes else sizes


def modeling_of(model: Any) -> Any:
    """The module of transformers that a target's linear layers call."""
    (mixer, *_) = [layer.linear_attn for layer in model.get_decoder().layers if hasattr(layer, "linear_attn")]
    return sys.modules[type(mixer).__module__]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_prompts_read_by_its_kernels_leave_the_same_states(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one piece and in several, where states go on; then a tree behind them, whose root is committed."""
    if kind == "fused" and family != "qwen3_5_text":
        pytest.skip("both engines let the model read prompts: one family is enough")
    folder = make_tiny_target(tmp_path / "target", model_type=family, **sizes_of(family))
    modeling = modeling_of(load_target(folder))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions are not what is compared
    for module in (hybrid_target, target_runner):
        monkeypatch.setattr(module, "PREFILL_CHUNK_TOKENS", 66)
    called, is_rounded_elsewhere = list[str](), False
    fast = {name: getattr(modeling, name) for name in RULES}
    plain: Rules = {name: inspect.unwrap(rule) for name, rule in fast.items()}

    def counted(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: (called.append(name), fast[name](*args, **kwargs))[1]

    def look(
        engine: str, rules: Rules, ids: torch.Tensor, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        for name, rule in rules.items():
            monkeypatch.setattr(modeling, name, rule)
        model = load_target(folder).to(device=device, dtype=dtype)
        if dtype == torch.float64:
            model.config.get_text_config()._experts_implementation = "eager"  # the others take no float64
        return [part.cpu().double() for part in read_and_look(engine, model, ids.to(device))]

    for count in (3, 67, 90):
        ids = tokens(count, count)
        exact = look("portable", plain, ids, dtype=torch.float64)
        nearest, cut = (look("portable", in_tf32(plain, added), ids) for added in (0x1000, 0))
        theirs = look(kind, plain, ids, DEVICE)
        found = look(kind, {name: counted(name) for name in RULES}, ids, DEVICE)
        for ours, torch_float32, *ten_bits, truth in zip(found, theirs, nearest, cut, exact, strict=not INTERPRETED):
            allowed = FLOAT32 + distance(torch_float32, truth)  # on that device, by the torch functions
            if HAS_GPU:
                allowed += FACTOR * max(distance(part, truth) for part in ten_bits)
            assert distance(ours, truth) <= allowed <= MOST_ALLOWED, count
            assert distance(ours, torch_float32) <= (3e-2 if HAS_GPU else 1e-5), count
            is_rounded_elsewhere |= not torch.equal(ours, torch_float32)
    assert set(called) == set(RULES)
    assert is_rounded_elsewhere, "bit for bit the torch functions: the package's kernels were not taken"


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """‖found − truth‖ / ‖truth‖"""
    return float((found - truth).norm() / truth.norm())


def read_and_look(kind: str, model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits and taps of a prompt, each layer's recurrent state and window; logits of a tree, states behind its root."""
    tree, taps = random_tree(3, budget=20), list[torch.Tensor]()
    if kind == "portable":
        runner = TargetRunner(model, [1, 2, 4])
        runner.reserve(200)
        logits, features = runner.prefill(ids)
        layers = runner._delta.layers
        read = [logits, features[0], *(layer.state_HKV for layer in layers), *(layer.inputs_CW for layer in layers)]
        looked = runner.verify(7, tree)
        runner.commit([0])
        return [*read, looked, *(layer.state_HKV for layer in layers)]
    target = HybridTarget(model, [1, 2, 4], max_context_tokens=256, max_rows=32)
    logits, _ = target.prefill(ids, lambda piece, _start: taps.append(piece.clone()))
    read = [logits, torch.cat(taps), *target.states.clone(), *target.windows.mT.clone()]
    if INTERPRETED:  # our own kernels would be interpreted, too: test_hybrid_target.py
        return read
    step = target.verify(torch.cat([torch.tensor([7]), tree.tokens]).to(ids.device), tree.depths, tree.parents)
    looked = step.logits[: len(tree) + 1].clone()
    target.commit(torch.tensor([0], device=ids.device))
    return [*read, looked, *target.states]
