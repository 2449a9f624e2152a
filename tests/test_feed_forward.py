"""Targets with experts through the fused passes: what they say, how experts are computed meanwhile, what is refused.

That passes and states equal transformers' is tested with the other families, in `test_fused_target` and `test_hybrid_target`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting import generate
from test_fused_target import DEVICE, EXPERTS, TAPS, error, prompt, tiny_drafter, tiny_model
from test_hybrid_target import tiny_hybrid

from decode import feed_forward
from decode.feed_forward import graph_safe
from decode.fused_drafter import FusedDrafter
from decode.fused_engine import reason_against
from decode.fused_round import FusedRound, decode_greedy
from decode.fused_target import FusedTarget
from decode.hybrid_target import HybridTarget
from dflash_kit.tree import ancestor_mask, build_tree

pytestmark = pytest.mark.usefixtures("torch_rules")
FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "qwen3_next")


def tiny(family: str, **overrides: Any) -> Any:
    """A tiny random model with experts; Qwen3-Next has dense layers, too."""
    if family == "qwen3_moe":
        return tiny_model(family, **(EXPERTS | overrides))
    return tiny_hybrid(family, **overrides)


def fused(model: Any, family: str, max_rows: int = 72) -> FusedTarget:
    return (FusedTarget if family == "qwen3_moe" else HybridTarget)(model, TAPS, 128, max_rows)


def drawn_tree(seed: int, budget: int = 20) -> Any:
    return build_tree(torch.randn(5, 95, generator=torch.Generator().manual_seed(seed)) * 2, budget)


def along_paths(model: Any, tokens: torch.Tensor, rows: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """The model's logits behind each row of a tree, whose path it reads as a plain sequence."""
    paths = [row.nonzero().flatten().to(DEVICE) for row in ancestor_mask(parents)]
    return torch.stack([model(torch.cat([tokens, rows[path]])[None]).logits[0, -1] for path in paths])


@pytest.mark.parametrize("budget", [0, None, 15, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rounds_say_what_transformers_generates(family: str, budget: int | None) -> None:
    model, tokens = tiny(family), prompt(23)
    expected = generate(model, tokens.tolist(), 40)
    assert len(set(expected)) > 5, "the target repeats itself, whatever it reads"
    target = fused(model, family)
    rounds = FusedRound(target, FusedDrafter(tiny_drafter(), target), budget)
    assert decode_greedy(rounds, tokens, 40, ()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_batched_product_says_the_same_in_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, tree = tiny(family), prompt(30), drawn_tree(1)
    target, asked = fused(model, family, 24), []
    _, choice = target.prefill(tokens)
    rows = torch.cat([choice, tree.tokens.to(DEVICE)])
    grouped = target.verify(rows, tree.depths, tree.parents).logits[:21].clone()
    monkeypatch.setattr(feed_forward, "graph_safe", lambda weight: asked.append(weight) or "batched_mm")
    monkeypatch.setattr(feed_forward, "BATCHED_BYTES", 5 * 2 * (3 * 32 * 48) * 4 + 1)  # five rows' two experts
    target._passes.clear()
    batched = target.verify(rows, tree.depths, tree.parents).logits[:21]
    assert asked
    assert error(batched, grouped) < 1e-5
    assert error(batched, along_paths(model, tokens, rows, tree.parents)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_padding_disturb_nothing(family: str) -> None:
    """They hold what an earlier tree left, and choose experts as the others do."""
    target, tree = fused(tiny(family), family), drawn_tree(2, 12)
    _, choice = target.prefill(prompt(30))
    rows = torch.cat([choice, tree.tokens.to(DEVICE)])
    step, found = target.verify(rows, tree.depths, tree.parents), []
    for seed in (3, 4):
        step.tree.tokens.copy_(prompt(16, seed))
        found.append(target.verify(rows, tree.depths, tree.parents).logits[:13].clone())
    assert error(*found) < 1e-6


def test_the_models_own_setting_comes_back() -> None:
    model = tiny("qwen3_moe")
    model.set_experts_implementation("eager")
    target, used = fused(model, "qwen3_moe"), []
    block = model.model.layers[1].mlp
    handle = block.gate.register_forward_hook(lambda *_args: used.append(model.config._experts_implementation))
    target.prefill(prompt(9))
    assert used == [graph_safe(block.experts.down_proj)]
    assert model.config._experts_implementation == "eager"
    handle.remove()
    block.gate.register_forward_hook(lambda *_args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.prefill(prompt(9))
    assert model.config._experts_implementation == "eager"


def test_the_implementation_is_one_that_a_graph_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(capability: tuple[int, int], dtype: torch.dtype) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        weight: Any = SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype)
        return graph_safe(weight)

    assert chosen((9, 0), torch.bfloat16) == chosen((10, 0), torch.bfloat16) == "grouped_mm"
    assert chosen((8, 0), torch.bfloat16) == chosen((12, 0), torch.bfloat16) == "batched_mm"
    assert chosen((9, 0), torch.float32) == chosen((9, 0), torch.float16) == "batched_mm"


@pytest.mark.parametrize("family", FAMILIES)
def test_other_feed_forwards_are_refused_by_name(family: str) -> None:
    def reason(change: Any, **overrides: Any) -> str:
        model = tiny(family, **overrides)
        if DEVICE == "cuda":
            model = model.bfloat16()
        change(model.model.layers[1].mlp)
        return reason_against(model, tiny_drafter(), [("ddtree", 15)]) or "none"

    def quantise(block: Any) -> None:
        block.experts.down_proj = torch.nn.Parameter(block.experts.down_proj.to(torch.float8_e4m3fn), False)

    def replace(block: Any) -> None:
        block.experts = torch.nn.ModuleList()

    assert reason(lambda _block: None) == "none"
    assert "'gelu'" in reason(lambda _block: None, hidden_act="gelu")
    assert "experts are not plain" in reason(quantise)
    assert "ModuleList" in reason(replace)
    assert "feed-forward is OtherBlock" in reason(
        lambda block: setattr(block, "__class__", type("OtherBlock", (type(block),), {}))
    )


def test_a_dense_layer_between_is_checked_as_well() -> None:
    model = tiny("qwen3_next").to(torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    mlp = model.model.layers[2].mlp
    mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(80), False)
    assert "feed-forward has biases" in (reason_against(model, tiny_drafter(), [("ddtree", 15)]) or "none")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_pass_is_replayed_over_other_trees(family: str, dtype: torch.dtype) -> None:
    """A step that waited for the device would break the capture; in bfloat16 close calls of the router may flip."""
    model, exact = tiny(family).to(dtype), tiny(family)
    target, tokens = fused(model, family), prompt(40)
    _, choice = target.prefill(tokens)
    for num_nodes in (0, 15, 23, 64):
        for seed in (5, 6):
            tree = drawn_tree(seed, num_nodes)
            rows = torch.cat([choice, tree.tokens.to(DEVICE)])
            step = target.verify(rows, tree.depths, tree.parents)
            assert step.graph is not None
            replayed = step.logits[: num_nodes + 1].clone()
            target.run(step)
            assert error(replayed, step.logits[: num_nodes + 1]) < 1e-6, "a replay differs from the same work launched"
            wanted = along_paths(exact, tokens, rows, tree.parents)
            theirs = error(along_paths(model, tokens, rows, tree.parents), wanted)
            assert error(replayed, wanted) < (1e-5 if dtype == torch.float32 else 2 * theirs + 5e-2)
    path = torch.tensor([0], device=DEVICE)
    target.commit(path)
    assert int(target.length) == 41


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_rounds_in_bfloat16_go_on(family: str) -> None:
    """Whole rounds as graphs, twice from one prompt: the same tokens, which the passes alone say as well."""
    model, tokens = tiny(family).bfloat16(), prompt(23)
    target = fused(model, family)
    rounds = FusedRound(target, FusedDrafter(tiny_drafter().bfloat16(), target), 15)
    said = decode_greedy(rounds, tokens, 40, ())
    assert decode_greedy(rounds, tokens, 40, ()) == said
    assert len(said) == 40
