"""Prompts read by flash-linear-attention's kernels leave the logits and states of transformers' own torch functions.

Where that package is installed: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1, which some versions of it do not
take as they are).
"""

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hybrid import FAMILIES, random_tree, tokens

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


def load(folder: Path) -> tuple[Any, Any]:
    """A target on the device, and the module of transformers that its linear layers call."""
    model = load_target(folder).to(DEVICE)
    (mixer, *_) = [layer.linear_attn for layer in model.get_decoder().layers if hasattr(layer, "linear_attn")]
    return model, sys.modules[type(mixer).__module__]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_prompts_read_by_its_kernels_leave_the_same_states(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one piece and in several, where states go on; then a tree behind them, whose root is committed."""
    if kind == "fused" and family != "qwen3_5_text":
        pytest.skip("the portable engine alone takes it")
    folder = make_tiny_target(tmp_path / "target", model_type=family, **FAMILIES[family])
    _, modeling = load(folder)
    fast = {name: getattr(modeling, name) for name in RULES}
    called, is_rounded_elsewhere = list[str](), False
    for module in (hybrid_target, target_runner):
        monkeypatch.setattr(module, "PREFILL_CHUNK_TOKENS", 66)

    def counted(name: str) -> Any:
        return lambda *args, **kwargs: (called.append(name), fast[name](*args, **kwargs))[1]

    for count in (3, 67, 90):
        ids, found = tokens(count, count).to(DEVICE), []
        for rules in ({name: counted(name) for name in RULES}, {name: inspect.unwrap(fast[name]) for name in RULES}):
            for name, rule in rules.items():
                monkeypatch.setattr(modeling, name, rule)
            found.append(read_and_look(kind, load(folder)[0], ids))
        for ours, plain in zip(*found, strict=True):
            # On GPUs its kernels multiply in tf32, which keeps ten bits: 2e-4 to 1.2e-2 (experts) were seen in these models.
            assert (ours - plain).norm() <= (3e-2 if HAS_GPU else 1e-5) * plain.norm(), count
            is_rounded_elsewhere |= not torch.equal(ours, plain)
    assert set(called) == set(RULES)
    assert is_rounded_elsewhere, "bit for bit the torch functions: the package's kernels were not taken"


def read_and_look(kind: str, model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits behind a prompt, recurrent states and windows; then logits of a tree, and the states behind its root."""
    tree = random_tree(3, budget=20)
    if kind == "portable":
        runner = TargetRunner(model, [1, 2, 4])
        runner.reserve(200)
        logits, taps = runner.prefill(ids)
        states = [part.clone() for layer in runner._delta.layers for part in (layer.state_HKV, layer.inputs_CW)]
        looked = runner.verify(7, tree)
        runner.commit([0])
        return [logits, taps, *states, looked, *(layer.state_HKV for layer in runner._delta.layers)]
    target = HybridTarget(model, [1, 2, 4], max_context_tokens=256, max_rows=32)
    logits, _ = target.prefill(ids)
    states = [target.states.clone(), target.windows.clone()]
    if INTERPRETED:  # our own kernels would be interpreted, too: test_hybrid_target.py
        return [logits, *states]
    step = target.verify(torch.cat([torch.tensor([7]), tree.tokens]).to(DEVICE), tree.depths, tree.parents)
    looked = step.logits[: len(tree) + 1].clone()
    target.commit(torch.tensor([0], device=DEVICE))
    return [logits, *states, looked, target.states]
