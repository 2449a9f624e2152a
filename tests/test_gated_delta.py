"""One pass over a tree of Gated DeltaNet nodes equals one sequential pass per root-to-node path."""

import pytest
import torch
from torch import Tensor

from decode.delta_ops import commit_states
from decode.delta_rule import DeltaRows, DeltaShape, tree_delta
from decode.fused_ops import pack_mask
from decode.gated_delta import tree_delta_rule
from dflash_kit.tree import ancestor_mask

Inputs = dict[str, Tensor]


def random_inputs(num_nodes: int, heads: int, key: int, value: int, seed: int) -> Inputs:
    """Float64 inputs as a layer makes them: unit keys, scaled unit queries, decays from mild to nearly total."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    return {
        "q": unit(draw(num_nodes, heads, key), dim=-1) * key**-0.5,
        "k": unit(draw(num_nodes, heads, key), dim=-1),
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


def sequential(inputs: Inputs, parents: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The recurrence itself, once per node over the node's whole path, in Python loops over heads and steps."""
    outputs, states = torch.zeros_like(inputs["v"]), []
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = int(parents[at])
        state = inputs["state"].clone()
        for i in reversed(path):
            for head in range(state.shape[0]):
                decayed = state[head] * torch.exp(inputs["g"][i, head])
                key = inputs["k"][i, head]
                update = inputs["beta"][i, head] * (inputs["v"][i, head] - decayed.T @ key)
                state[head] = decayed + torch.outer(key, update)
        outputs[node] = torch.einsum("hkv,hk->hv", state, inputs["q"][node])
        states.append(state)
    return outputs, states


@pytest.mark.parametrize(("num_nodes", "heads", "key", "value"), [(1, 1, 4, 4), (9, 2, 8, 6), (33, 3, 16, 24)])
@pytest.mark.parametrize("chain", [False, True])
def test_equals_a_pass_per_path(num_nodes: int, heads: int, key: int, value: int, chain: bool) -> None:
    for seed in range(3):
        inputs = random_inputs(num_nodes, heads, key, value, seed)
        parents = random_parents(num_nodes, seed, chain=chain)
        expected, states = sequential(inputs, parents)
        kept = inputs["state"].clone()
        outputs, commit = tree_delta_rule(**inputs, parents=parents)
        torch.testing.assert_close(outputs, expected, atol=1e-10, rtol=1e-10)
        for node in range(num_nodes):
            torch.testing.assert_close(commit(node), states[node], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(commit(-1), kept, atol=0, rtol=0)
        assert torch.equal(inputs["state"], kept)


def deep_tree(seed: int = 7) -> Tensor:
    """Parents of 257 rows, 16 levels behind the root row, as a budget of 256 gives them."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    for node in range(1, 257):
        parent = node - 1 if node <= 16 else int(torch.randint(0, node, (1,), generator=generator))
        while depths[parent] >= 16:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    assert max(depths) == 16
    return torch.tensor(parents)


def test_a_large_deep_tree_equals_a_pass_per_path() -> None:
    """In float64 to 1e-10, every third node's state as well; in float32 to 1e-5 of the float64 passes."""
    inputs, parents = random_inputs(257, 2, 16, 8, 5), deep_tree()
    expected, states = sequential(inputs, parents)
    outputs, commit = tree_delta_rule(**inputs, parents=parents)
    torch.testing.assert_close(outputs, expected, atol=1e-10, rtol=1e-10)
    single = {name: tensor.float() for name, tensor in inputs.items()}
    rounded, commit_rounded = tree_delta_rule(**single, parents=parents)
    assert float((rounded - expected).norm() / expected.norm()) < 1e-5
    for node in range(0, 257, 3):
        torch.testing.assert_close(commit(node), states[node], atol=1e-10, rtol=1e-10)
        assert float((commit_rounded(node) - states[node]).norm() / states[node].norm()) < 1e-5


def test_value_heads_share_the_keys_of_their_group() -> None:
    """Six value heads over two key heads, through the layers' operation and its commit: value head h reads key head h // 3."""
    shape, parents, layers = DeltaShape(key_heads=2, heads=6, key=16, value=8, kernel=4), random_parents(40, 3), 1
    parents[1:] = parents[1:].clamp(min=0)  # row 0 is the root of a pass
    inputs = random_inputs(40, 6, 16, 8, 9)
    for name in ("q", "k"):
        inputs[name] = inputs[name][:, [0, 0, 0, 1, 1, 1]]
    expected, states = sequential(inputs, parents)
    rows = DeltaRows.allocate(layers, 40, shape, torch.zeros(1))
    rows.q.copy_(inputs["q"][:, [0, 3]])
    rows.k[0].copy_(inputs["k"][:, [0, 3]])
    for name in ("v", "g", "beta"):
        getattr(rows, name).copy_(inputs[name])
    mask = ancestor_mask(parents[1:])
    tree_delta(rows, 0, inputs["state"].float(), pack_mask(mask), shape)
    assert float((rows.out.view(40, 6, 8) - expected).norm() / expected.norm()) < 1e-5
    for leaf in (0, 7, 39):
        path = mask[leaf].nonzero().flatten().int()
        kept = inputs["state"].float()[None].clone()
        commit_states(kept, torch.zeros(1, 3, shape.channels), rows, path, torch.tensor([len(path) - 1]).int(), shape)
        assert float((kept[0] - states[leaf]).norm() / states[leaf].norm()) < 1e-5


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
    torch.testing.assert_close(outputs.double(), sequential(inputs, parents)[0], atol=1e-6, rtol=1e-5)


def test_layout_is_that_of_the_models_own_kernel() -> None:
    """Committing a tree's path leaves the state, and gives the outputs, that transformers' recurrence gives."""
    kernels = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = {name: tensor.float() for name, tensor in random_inputs(12, 2, 16, 8, 3).items()}
    parents = random_parents(12, 4)
    outputs, commit = tree_delta_rule(**inputs, parents=parents)
    for node in range(12):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = int(parents[at])
        batched = {name: inputs[name][path][None] for name in ("q", "k", "v", "g", "beta")}
        theirs, state = kernels.torch_recurrent_gated_delta_rule(
            batched["q"] * 16**0.5,  # it scales queries itself
            batched["k"],
            batched["v"],
            batched["g"],
            batched["beta"],
            initial_state=inputs["state"][None],
            output_final_state=True,
        )
        torch.testing.assert_close(outputs[node], theirs[0, -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(commit(node), state[0], atol=1e-5, rtol=1e-4)


def test_children_before_parents_are_refused() -> None:
    inputs = random_inputs(3, 1, 4, 4, 0)
    for parents in ([-1, 2, 0], [-1, 1, 0], [-2, 0, 0]):
        with pytest.raises(ValueError, match="must each lie in"):
            tree_delta_rule(**inputs, parents=torch.tensor(parents))
