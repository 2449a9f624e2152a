"""Hybrid targets (Gated DeltaNet and attention layers): trees are verified exactly, and every state is committed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import OracleEngine, decode_once, generate, oracle_engine, tiny_drafter

from decode.delta_layers import DeltaLayers
from decode.engine import Method
from decode.target_runner import TargetRunner
from dflash_kit.errors import KitError
from dflash_kit.target import load_target
from dflash_kit.tree import Tree, ancestor_mask, build_tree
from helpers import make_tiny_target

LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "initializer_range": 0.08,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS,
    "qwen3_next": LINEAR | EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
BUDGETS = (1, 15, 64, 256)
DRAFTED = [Method("chain", 15), *(Method("ddtree", budget) for budget in BUDGETS)]
Answers = list[tuple[list[int], list[int], tuple[float, ...]]]
pytestmark = pytest.mark.usefixtures("torch_rules")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "target"
    return make_tiny_target(folder, model_type=request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def reference(target: Path) -> Any:
    """The model as transformers runs it: the oracle."""
    return load_target(target)


@pytest.fixture(scope="module")
def answers(reference: Any) -> Answers:
    """Prompts, what transformers says to them, and how often drafts shall be wrong: 740 tokens by each method."""
    asked = (([7], 150, (0.0, 0.25)), (tokens(3, 2).tolist(), 320, (0.0,)), (tokens(40, 1).tolist(), 60, (0.0, 0.25)))
    return [(prompt, generate(reference, prompt, limit), rates) for prompt, limit, rates in asked]


@pytest.fixture(scope="module")
def runner(target: Path) -> TargetRunner:
    return TargetRunner(load_target(target), [1, 2, 4])


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed))


def random_tree(seed: int, budget: int = 40, depth: int = 7) -> Tree:
    logits = 8 * torch.randn(depth, 300, generator=torch.Generator().manual_seed(seed))
    return build_tree(logits, budget)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).norm() <= 1e-5 * right.norm())


@torch.no_grad()
def run_plainly(model: Any, ids: torch.Tensor) -> Any:
    return model(ids[None], output_hidden_states=True, use_cache=True)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 63, 64, 150])
def test_prefill_equals_transformers(reference: Any, runner: TargetRunner, count: int) -> None:
    ids = tokens(count, count)
    runner.reserve(200)
    logits, taps = runner.prefill(ids)
    plain = run_plainly(reference, ids)
    assert close(logits, plain.logits[0, -1])
    assert close(taps[0], torch.cat([plain.hidden_states[i + 1][0] for i in (1, 2, 4)], dim=-1))


@pytest.mark.parametrize("count", [1, 2, 30])
def test_every_node_sees_its_own_path_only(reference: Any, runner: TargetRunner, count: int) -> None:
    ids, tree = tokens(count + 1, 5), random_tree(count)
    runner.reserve(200)
    runner.prefill(ids[:-1])
    logits = runner.verify(int(ids[-1]), tree)
    visible = ancestor_mask(tree.parents)
    rows = torch.cat([ids[-1:], tree.tokens])
    assert int(tree.depths.max()) >= 4
    for row in range(0, len(rows), 3):
        path = rows[visible[row].nonzero().flatten()]
        assert close(logits[row], run_plainly(reference, torch.cat([ids[:-1], path])).logits[0, -1]), row


@pytest.mark.parametrize("budget", BUDGETS)
def test_states_after_commits_are_those_of_a_plain_run(reference: Any, runner: TargetRunner, budget: int) -> None:
    ids, said = tokens(2, 6), []
    runner.reserve(400)
    runner.prefill(ids)
    for turn in range(9):
        tree, anchor = random_tree(turn, budget), int(tokens(1, turn))
        assert len(tree.tokens) == budget
        runner.verify(anchor, tree)
        visible = ancestor_mask(tree.parents)
        row = [0, 1, len(tree.tokens) // 2, len(tree.tokens)][turn % 4]
        path = visible[row].nonzero().flatten().tolist()
        taps = runner.commit(path)
        said += [anchor, *(int(tree.tokens[i - 1]) for i in path[1:])]
        plain = run_plainly(reference, torch.cat([ids, torch.tensor(said)]))
        assert close(taps[0], torch.cat([plain.hidden_states[i + 1][0] for i in (1, 2, 4)], dim=-1)[-len(path) :])
        cache = getattr(plain, "past_key_values", None) or plain.cache
        linear = [i for i, kind in enumerate(LINEAR["layer_types"]) if kind == "linear_attention"]
        for layer, index in zip(runner._delta.layers, linear, strict=True):
            assert close(layer.state_HKV, cache.layers[index].recurrent_states[0][0])
            assert close(layer.inputs_CW, cache.layers[index].conv_states[0][0][:, -3:])
        for index in (2, 5):
            kept, wanted = runner._cache.layers[index], cache.layers[index]
            assert close(kept.keys[:, :, : runner.num_committed], wanted.keys)
            assert close(kept.values[:, :, : runner.num_committed], wanted.values)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_greedy_decoding_equals_transformers(target: Path, answers: Answers, kind: str) -> None:
    """By every method at least 2,000 tokens of all families together, so a third of that in each."""
    compared, most_accepted = Counter[Method](), 0
    for prompt, expected, error_rates in answers:
        for error_rate in error_rates:
            engine = oracle_engine(kind, target, prompt + expected, error_rate, block_size=16, max_budget=max(BUDGETS))
            prefix = engine.prefill(prompt, len(expected), max(BUDGETS))
            undrafted = [Method("ar", 0)] if error_rate == 0.0 else []  # whatever the drafter gets wrong
            for method in [*undrafted, *DRAFTED]:
                found = engine.decode(prefix, method)
                assert found.token_ids == expected, (method, error_rate)
                compared[method] += len(expected)
                most_accepted = max(most_accepted, *found.log.num_accepted)
    for method in DRAFTED:
        assert len(FAMILIES) * compared[method] >= 2000, method
    assert most_accepted == 15


def test_eos_inside_the_accepted_path(reference: Any, target: Path) -> None:
    prompt = tokens(5, 3).tolist()
    drafter, ends = tiny_drafter(target)
    whole = generate(reference, prompt, 30)
    runner = TargetRunner(load_target(target), drafter.config.target_layer_ids)
    engine = OracleEngine(
        runner, drafter, ends, eos_token_ids=(whole[11],), max_context=512, script=prompt + whole, error_rate=0.1
    )
    expected = whole[: whole.index(whole[11]) + 1]
    for method, budget in (("ar", 0), ("chain", 7), ("ddtree", 64)):
        assert decode_once(engine, prompt, method, budget, 30).token_ids == expected


def test_linear_layers_of_other_kinds_are_refused(target: Path) -> None:
    model = load_target(target)
    for layer in model.get_decoder().layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = torch.nn.Identity()
    with pytest.raises(KitError, match="Identity layers"):
        DeltaLayers(model)
