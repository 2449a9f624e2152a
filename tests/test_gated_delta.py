"""One pass over a tree of Gated DeltaNet nodes equals one sequential pass per root-to-leaf path."""

import importlib
import inspect
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.delta_layers import unit
from decode.delta_ops import commit_states
from decode.delta_rule import DeltaRows, DeltaShape, tree_delta
from decode.fused_ops import pack_mask
from decode.gated_delta import sequential_delta_rule, tree_delta_rule
from dflash_kit.tree import ancestor_mask

Inputs = dict[str, Tensor]


def random_inputs(
    num_nodes: int, heads: int, key: int, value: int, seed: int, *, key_heads: int | None = None
) -> Inputs:
    """Float64 inputs as a layer makes them: unit keys, scaled unit queries, decays from mild to nearly total."""
    key_heads = key_heads or heads
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": unit(draw(num_nodes, key_heads, key)) * key**-0.5,
        "k": unit(draw(num_nodes, key_heads, key)),
        "v": draw(num_nodes, heads, value),
        "g": -torch.exp(2 * draw(num_nodes, heads)),
        "beta": torch.sigmoid(draw(num_nodes, heads)),
        "state": draw(heads, key, value),
    }


def random_parents(num_nodes: int, seed: int, *, chain: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if chain:
        return torch.arange(num_nodes) - 1
    return torch.tensor([int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(num_nodes)])


@pytest.mark.parametrize(("num_nodes", "heads", "key", "value"), [(1, 1, 4, 4), (9, 2, 8, 6), (33, 3, 16, 24)])
@pytest.mark.parametrize("chain", [False, True])
def test_equals_a_pass_per_path(num_nodes: int, heads: int, key: int, value: int, chain: bool) -> None:
    for seed in range(3):
        inputs = random_inputs(num_nodes, heads, key, value, seed)
        parents = random_parents(num_nodes, seed, chain=chain)
        expected, states = sequential_delta_rule(**inputs, parents=parents)
        kept = inputs["state"].clone()
        outputs, commit = tree_delta_rule(**inputs, parents=parents)
        torch.testing.assert_close(outputs, expected, atol=1e-10, rtol=1e-10)
        for node in range(num_nodes):
            torch.testing.assert_close(commit(node), states[node], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(commit(-1), kept, atol=0, rtol=0)
        assert torch.equal(inputs["state"], kept)


def deep_tree(seed: int = 7, num_nodes: int = 257, depth: int = 16) -> Tensor:
    """Parents of a root and its tree of exactly ``depth`` levels: 257 nodes and 16 levels as a budget of 256 gives them."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    for node in range(1, num_nodes):
        parent = node - 1 if node <= depth else int(torch.randint(0, node, (1,), generator=generator))
        while depths[parent] >= depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    assert max(depths) == depth
    return torch.tensor(parents)


def test_a_large_deep_tree_equals_a_pass_per_path() -> None:
    """In float64 to 1e-10, every third node's state as well; in float32 to 1e-5 of the float64 passes."""
    inputs, parents = random_inputs(257, 2, 16, 8, 5), deep_tree()
    expected, states = sequential_delta_rule(**inputs, parents=parents)
    outputs, commit = tree_delta_rule(**inputs, parents=parents)
    torch.testing.assert_close(outputs, expected, atol=1e-10, rtol=1e-10)
    single = {name: tensor.float() for name, tensor in inputs.items()}
    rounded, commit_rounded = tree_delta_rule(**single, parents=parents)
    assert float((rounded - expected).norm() / expected.norm()) < 1e-5
    for node in range(0, 257, 3):
        torch.testing.assert_close(commit(node), states[node], atol=1e-10, rtol=1e-10)
        assert float((commit_rounded(node) - states[node]).norm() / states[node].norm()) < 1e-5


def extreme(inputs: Inputs, kind: str) -> Inputs:
    """The same with what strains the sums: keys written in full, nothing forgotten, everything, or a node of each by turns."""
    if kind != "ordinary":
        inputs["beta"] = torch.ones_like(inputs["beta"])
    if kind == "keeps all":
        inputs["g"] = torch.zeros_like(inputs["g"])
        # All but one and the same key: each write takes back what the last one wrote.
        inputs["k"] = unit(inputs["k"][:1] + 1e-3 * inputs["k"])
    if kind == "forgets all":
        inputs["g"] = torch.full_like(inputs["g"], -90.0)
    if kind == "by turns":
        inputs["g"][1::3], inputs["g"][2::3] = -400.0, 0.0
    return inputs


KINDS = ("ordinary", "keeps all", "forgets all", "by turns")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_nodes", "depth", "key_heads"), [(18, 16, 1), (65, 9, 2), (257, 16, 2)])
def test_grouped_value_heads_equal_a_pass_per_path(num_nodes: int, depth: int, key_heads: int, kind: str) -> None:
    """Six value heads over fewer key heads, in float64 to 1e-10: all outputs, and states after every fifth node."""
    for seed in range(3):
        inputs = extreme(random_inputs(num_nodes, 6, 16, 8, seed, key_heads=key_heads), kind)
        parents = deep_tree(seed, num_nodes, depth)
        expected, states = sequential_delta_rule(**inputs, parents=parents)
        outputs, commit = tree_delta_rule(**inputs, parents=parents)
        torch.testing.assert_close(outputs, expected, atol=1e-10, rtol=1e-10)
        for node in range(seed, num_nodes, 5):
            torch.testing.assert_close(commit(node), states[node], atol=1e-10, rtol=1e-10)


def test_a_value_head_reads_the_key_head_of_its_group() -> None:
    """Value head h reads key head h // 3 of two: written out, the result is the same; any other order gives another one."""
    inputs, parents = random_inputs(30, 6, 16, 8, 4, key_heads=2), random_parents(30, 4)
    for rule in (sequential_delta_rule, tree_delta_rule):
        outputs, _ = rule(**inputs, parents=parents)
        for order, is_so in (([0, 0, 0, 1, 1, 1], True), ([0, 1, 0, 1, 0, 1], False)):
            spread = inputs | {name: inputs[name][:, order] for name in ("q", "k")}
            assert torch.equal(rule(**spread, parents=parents)[0], outputs) is is_so


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_layers_operation_and_its_commit_share_keys_likewise(dtype: torch.dtype, bound: float, kind: str) -> None:
    """``tree_delta`` and ``commit_states`` of the fused target, which write to buffers that all layers share.

    Its buffers are float32; for float64 others are put in their place. Decays that float32 sums to some -2,000 along a path
    leave 1e-4 between two of them, where the portable engine sums in float64: "by turns" shows that, and bounds it.
    """
    if dtype == torch.float32 and kind == "by turns":
        bound = 1e-4
    shape, parents = DeltaShape(key_heads=2, heads=6, key=16, value=8, kernel=4), deep_tree(3)
    inputs = extreme(random_inputs(257, 6, 16, 8, 9, key_heads=2), kind)
    expected, states = sequential_delta_rule(**inputs, parents=parents)
    rows = DeltaRows.allocate(1, 257, shape, torch.zeros(1))
    for name in ("q", "k", "v", "g", "beta", "updates", "summed", "out"):
        setattr(rows, name, getattr(rows, name).to(dtype))
    rows.k[0].copy_(inputs["k"])
    for name in ("q", "v", "g", "beta"):
        getattr(rows, name).copy_(inputs[name])
    mask, state = ancestor_mask(parents[1:]), inputs["state"].to(dtype)
    tree_delta(rows, 0, state, pack_mask(mask), shape)
    assert float((rows.out.view(257, 6, 8) - expected).norm() / expected.norm()) < bound
    for leaf in (0, 7, 39, 256):
        path = mask[leaf].nonzero().flatten().int()
        kept = state[None].clone()
        commit_states(kept, torch.zeros(1, 3, shape.channels), rows, path, torch.tensor([len(path) - 1]).int(), shape)
        assert float((kept[0] - states[leaf]).norm() / states[leaf].norm()) < bound


def test_siblings_do_not_see_each_other() -> None:
    inputs = random_inputs(6, 2, 8, 8, 1)
    parents = torch.tensor([-1, -1, 0, 0, 1, 2])
    before, _ = tree_delta_rule(**inputs, parents=parents)
    for name in ("k", "v", "g", "beta"):
        inputs[name][3] = inputs[name][3] * 0.3
    after, _ = tree_delta_rule(**inputs, parents=parents)
    for node in (0, 1, 2, 4, 5):
        assert torch.equal(after[node], before[node])
    assert not torch.allclose(after[3], before[3])


def test_strong_decay_across_branches_stays_finite() -> None:
    inputs = random_inputs(8, 2, 8, 8, 2)
    inputs["g"] = torch.full_like(inputs["g"], -90.0)
    parents = torch.tensor([-1, 0, 1, 2, 3, 4, 5, -1])  # node 7 decayed by 90, its elder cousins by up to 630
    as_float32 = {name: tensor.float() for name, tensor in inputs.items()}
    outputs, commit = tree_delta_rule(**as_float32, parents=parents)
    assert outputs.isfinite().all()
    assert commit(7).isfinite().all()
    torch.testing.assert_close(
        outputs.double(), sequential_delta_rule(**inputs, parents=parents)[0], atol=1e-6, rtol=1e-5
    )


class Float64Torch:
    """Stands for the module ``torch`` in a function that casts to float32: there the cast goes to float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def models_own_rule(family: str) -> Any:
    """transformers' sequential torch function of a family's layers, which would compute in float32, in float64."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rule = inspect.unwrap(modeling.torch_recurrent_gated_delta_rule)
    names = rule.__globals__ | {"torch": Float64Torch()}
    return FunctionType(rule.__code__, names, rule.__name__, rule.__defaults__, rule.__closure__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_both_forms_are_the_models_own_recurrence(family: str, kind: str) -> None:
    """transformers' function along every path, in float64 to 1e-10; it repeats key heads, normalises and scales by itself."""
    rule = models_own_rule(family)
    inputs = extreme(random_inputs(40, 6, 16, 8, 3, key_heads=2), kind)
    raw = inputs | {"q": inputs["q"] * 5.0, "k": inputs["k"] * 0.5}  # of other lengths, before its own norm
    inputs["q"], inputs["k"] = unit(raw["q"]) * 16**-0.5, unit(raw["k"])
    parents = deep_tree(4, 40, 12)
    expected, states = sequential_delta_rule(**inputs, parents=parents)
    outputs, commit = tree_delta_rule(**inputs, parents=parents)
    for node in range(40):
        path = [node]
        while int(parents[path[0]]) >= 0:
            path.insert(0, int(parents[path[0]]))
        along = {name: raw[name][path][None] for name in ("q", "k", "v", "g", "beta")}
        q, k = (along[name].repeat_interleave(3, dim=2) for name in ("q", "k"))  # as the layer does before the call
        theirs, state = rule(
            q,
            k,
            along["v"],
            along["g"],
            along["beta"],
            initial_state=raw["state"][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert state.dtype == torch.float64
        for ours, their in ((expected[node], theirs[0, -1]), (states[node], state[0])):
            torch.testing.assert_close(ours, their.double(), atol=1e-10, rtol=1e-10)
        for ours, their in ((outputs[node], theirs[0, -1]), (commit(node), state[0])):
            torch.testing.assert_close(ours, their.double(), atol=1e-10, rtol=1e-10)


def test_children_before_parents_are_refused() -> None:
    inputs = random_inputs(3, 1, 4, 4, 0)
    for parents in ([-1, 2, 0], [-1, 1, 0], [-2, 0, 0]):
        for rule in (tree_delta_rule, sequential_delta_rule):
            with pytest.raises(ValueError, match="must each lie in"):
                rule(**inputs, parents=torch.tensor(parents))
