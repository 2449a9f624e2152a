"""What a half-precision target says in float32: the pass of a float32 copy of the same weights, from which nothing is left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_fused_target import EXPERTS
from test_hybrid import FAMILIES as HYBRIDS

from decode.float32_pass import plain_logits
from decode.fused_target import FusedTarget
from decode.hybrid_target import HybridTarget
from decode.target_runner import TargetRunner
from dflash_kit.target import load_target
from dflash_kit.tree import empty_tree
from helpers import make_tiny_target

TARGETS: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {"tied": True}, "qwen3_moe": EXPERTS, **HYBRIDS}
RUNNERS = {
    "plain": lambda model: model,
    "portable": lambda model: TargetRunner(model, [1]),
    "fused": lambda model: (HybridTarget if model.config.model_type in HYBRIDS else FusedTarget)(model, [1], 128),
}
IDS = [5, 9, 200, 31, 7, 7, 64, 120, 3]


@pytest.fixture(scope="module", params=TARGETS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("float32") / "target"
    return make_tiny_target(place, model_type=request.param, **TARGETS[request.param])


@pytest.mark.usefixtures("torch_rules")
@pytest.mark.parametrize("runner", RUNNERS)
def test_equals_a_float32_copy(folder: Path, runner: str) -> None:
    model = load_target(folder, dtype=torch.bfloat16)
    kept = RUNNERS[runner](model)
    held = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    with torch.no_grad():
        half = model(torch.tensor([IDS]), use_cache=False).logits[0, -4:] if runner == "plain" else None
    said = plain_logits(model, IDS, 4)
    own, found = said.own, said.read_float32()
    copy = load_target(folder, dtype=torch.bfloat16).float()
    with torch.no_grad():
        truth = copy(torch.tensor([IDS]), use_cache=False).logits[0, -4:]
    assert found.dtype == own.dtype == torch.float32
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    if half is not None:
        assert torch.equal(own, half.float())
        assert (own - truth).abs().max() > 100 * (found - truth).abs().max()
    for name, weight in model.named_parameters():
        place, values = held[name]
        assert weight.dtype == torch.bfloat16 and weight.data_ptr() == place and torch.equal(weight, values)
    assert kept is not None


@pytest.mark.usefixtures("torch_rules")
def test_a_failure_leaves_the_weights_as_they_were(folder: Path) -> None:
    model = load_target(folder, dtype=torch.bfloat16)
    with pytest.raises(IndexError):
        plain_logits(model, [10**6], 1)
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    said = plain_logits(model, IDS, 1)
    norm = model.get_decoder().norm
    norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        said.read_float32()
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())


@pytest.mark.usefixtures("torch_rules")
def test_what_was_prefilled_stays(folder: Path) -> None:
    runner = TargetRunner(load_target(folder, dtype=torch.bfloat16), [1])
    runner.reserve(64)
    ids = torch.tensor(IDS)
    runner.prefill(ids)
    expected = runner.verify(3, empty_tree())
    runner.reserve(64)
    runner.prefill(ids)
    plain_logits(runner.model, [4, 4, 4], 8).read_float32()
    assert torch.equal(runner.verify(3, empty_tree()), expected)
