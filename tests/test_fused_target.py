"""The fused target equals transformers, its rounds decode greedily without a difference, its kernels equal references.

On a machine without a GPU the torch references run (and a few kernels in Triton's interpreter, in their own process);
on a GPU every test runs through the kernels and CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode import fused_ops, fused_products, fused_round
from decode.device_tree import TreeBuffers, TreeBuilder, WalkBuffers, walk
from decode.fused_drafter import FusedDrafter
from decode.fused_round import FusedRound, decode_greedy
from decode.fused_target import FusedTarget, padded_rows
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.target import TapRecorder
from dflash_kit.tree import Tree, ancestor_mask, build_tree, path_log_probs
from helpers import HAS_TRITON

KERNELS = fused_ops.uses_kernels(torch.zeros(1)) or torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(not KERNELS, reason="compares Triton kernels with references: GPU or interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TAPS = (1, 3)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def tiny_model(family: str = "qwen3", **overrides: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(settings | overrides)), dtype=torch.float32
    )
    return model.to(DEVICE).eval().requires_grad_(False)


def tiny_drafter(kinds: tuple[str, ...] = ("sliding_attention", "full_attention"), window: int | None = 9) -> Drafter:
    config = DrafterConfig(
        hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=97,
        rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512, block_size=6, mask_token_id=96,
        target_layer_ids=TAPS, num_target_layers=4, layer_types=kinds,
        layer_causal=tuple(kind == "sliding_attention" for kind in kinds), sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(1)
    drafter = Drafter(config).eval().requires_grad_(False)
    for weight in drafter.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.2)
    return drafter.to(DEVICE)


@pytest.mark.skipif(fused_ops.INTERPRETED, reason="the interpreter has a shape of its own")
@pytest.mark.parametrize("packed_rows", [6, 96, 144, 1584])
def test_heads_of_256_dimensions_get_tiles_that_fit(packed_rows: int) -> None:
    """Of a hybrid target and of a drafter that takes its heads; 227 KB of shared memory a program on Hopper."""
    rows, keys, _, _, stages = fused_ops.attention_shape(packed_rows, 4, False, 256)
    assert 2 * 256 * (rows + stages * 2 * keys) <= 164 * 2**10
    assert fused_ops.attention_shape(packed_rows, 4, False) == fused_ops.attention_shape(packed_rows, 4, False, 128)


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error ‖ours − reference‖ / ‖reference‖."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def prompt(count: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 95, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
        ("mistral", {"sliding_window": 20}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0, 3], "use_sliding_window": True, "sliding_window": 20}),
    ],
)  # fmt: skip
def test_prefill_and_tree_verification_equal_transformers(family: str, overrides: dict[str, Any]) -> None:
    model, tokens = tiny_model(family, **overrides), prompt(40)
    if family == "qwen2":
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_()
    with TapRecorder(model, TAPS) as recorder:
        before = model(tokens[None]).logits[0]
        reference_taps = recorder.taps()[0]
    target = FusedTarget(model, TAPS, max_context_tokens=128, max_rows=32)
    assert error(model(tokens[None]).logits[0], before) < 1e-6, "fusing in place changed the model itself"
    pieces: list[torch.Tensor] = []
    logits, choice = target.prefill(tokens, lambda taps, _start: pieces.append(taps.clone()))
    assert error(logits, before[-1]) < 1e-5
    assert int(choice) == int(before[-1].argmax())
    assert error(torch.cat(pieces), reference_taps) < 1e-5
    tree = build_tree(torch.randn(5, 95, generator=torch.Generator().manual_seed(3)) * 2, 20)
    row_tokens = torch.cat([choice.cpu(), tree.tokens]).to(DEVICE)
    step = target.verify(row_tokens, tree.depths, tree.parents)
    mask = ancestor_mask(tree.parents)
    for row in (0, 7, 20):  # the path to a node, as a plain sequence, is the oracle
        path = mask[row].nonzero().flatten().to(DEVICE)
        with TapRecorder(model, TAPS) as recorder:
            plain = model(torch.cat([tokens, row_tokens[path]])[None]).logits[0, -1]
            plain_taps = recorder.taps()[0, -1]
        assert error(step.logits[row], plain) < 1e-5
        assert error(step.taps[row], plain_taps) < 1e-5
    path = mask[20].nonzero().flatten().to(DEVICE)
    target.commit(path)
    assert int(target.length) == 40 + path.numel()
    again = target.verify(row_tokens[:1], tree.depths[:0], tree.parents[:0])
    plain = model(torch.cat([tokens, row_tokens[path], row_tokens[:1]])[None]).logits[0, -1]
    assert error(again.logits[0], plain) < 1e-5, "the committed rows are not what a plain run would hold"


def greedy_reference(model: Any, tokens: torch.Tensor, count: int) -> list[int]:
    said = tokens
    for _ in range(count):
        said = torch.cat([said, model(said[None]).logits[0, -1:].argmax(-1)])
    return said[tokens.numel() :].tolist()


@pytest.mark.parametrize("budget", [0, None, 1, 5, 30])
def test_greedy_rounds_say_what_the_target_says(budget: int | None) -> None:
    model, tokens = tiny_model(), prompt(23)
    expected = greedy_reference(model, tokens, 40)
    target = FusedTarget(model, TAPS, max_context_tokens=128, max_rows=32)
    rounds = FusedRound(target, FusedDrafter(tiny_drafter(), target), budget)
    assert decode_greedy(rounds, tokens, 40, ()) == expected
    eos = expected[11]
    assert decode_greedy(rounds, tokens, 40, (eos,)) == expected[: expected.index(eos) + 1]


class Oracle:
    """Stands in for the drafter's logits: the target's own continuation, wrong at chosen offsets."""

    def __init__(self, said: list[int], wrong_every: int) -> None:
        self.said, self.wrong_every = said, wrong_every

    def logits(self, position: int, count: int) -> torch.Tensor:
        logits = torch.zeros(count, 97)
        for i in range(count):
            token = self.said[position + i] if position + i < len(self.said) else 0
            wrong = self.wrong_every and (position + i) % self.wrong_every == 0
            logits[i, (token + 1) % 95 if wrong else token] = 8.0
            logits[i, (token + 2) % 95] = 4.0
        return logits.to(DEVICE)


@pytest.mark.parametrize(("wrong_every", "budget"), [(0, None), (0, 12), (3, None), (4, 12), (1, 12), (4, 150)])
def test_accepted_rows_are_committed(wrong_every: int, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long accepted paths exercise the gather of cache rows, which a random drafter never does."""
    monkeypatch.setattr(fused_round, "PREORDER_ROWS", 100)  # the tree of 150 nodes has its rows in preorder, on a GPU
    model, tokens = tiny_model(), prompt(17)
    expected = greedy_reference(model, tokens, 45)
    target = FusedTarget(model, TAPS, max_context_tokens=128, max_rows=160)
    drafter = FusedDrafter(tiny_drafter(), target)
    rounds, oracle = FusedRound(target, drafter, budget), Oracle(expected, wrong_every)
    said, lengths = [rounds.start(tokens)], []
    rounds.stages = dict  # type: ignore[method-assign]
    while len(said) < 40:
        rounds._draft()
        drafter.logits[1:].copy_(oracle.logits(len(said), 5))
        rounds._build()
        rounds._verify()
        rounds._commit()
        count = int(rounds.walked.num_accepted)
        said += rounds.walked.told[0, 1 : count + 2].tolist()
        lengths.append(count)
        assert int(target.length) == tokens.numel() + len(said) - 1
    assert said[:40] == expected[:40]
    exact = {0: 5, 1: 0, 3: 2, 4: 3}[wrong_every]
    assert max(lengths) == exact or (
        budget == 150 and max(lengths) > exact
    )  # so many nodes hold what the oracle gets wrong


def test_draft_equals_the_drafter_module() -> None:
    model, tokens, drafter = tiny_model(), prompt(33), tiny_drafter()
    target = FusedTarget(model, TAPS, max_context_tokens=96, max_rows=16)
    fused, features = FusedDrafter(drafter, target), []
    target.prefill(tokens, lambda taps, _start: (features.append(taps.clone()), fused.extend(taps)))
    fused.anchor.fill_(5)
    ours = fused.draft()
    context = torch.cat(features)[None]
    noise = target.embedding[fused.slots][None]
    positions = torch.arange(33 + 6, device=DEVICE)[None]
    hidden = drafter(noise, context, positions)
    assert error(ours, (hidden @ target.head.t())[0, 1:]) < 1e-5


def test_device_tree_equals_the_heap() -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = [(5, 40, 16), (3, 4, 60), (1, 30, 8)] + (
        [(15, 3000, 64), (15, 3000, 256), (15, 3000, 1024)] if DEVICE == "cuda" else []
    )
    for depths, vocab, budget in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            logits = (torch.randn(depths, vocab, generator=generator) * 3).to(dtype)
            if dtype == torch.bfloat16:  # equal logits are common there; keep the cut at the last rank unambiguous
                logits = logits.float()
            buffers = TreeBuffers.allocate(padded_rows(budget + 1), DEVICE)
            builder = TreeBuilder(depths, vocab, budget, buffers, is_scored=True)
            builder.build(logits.to(DEVICE))
            tree = build_tree(logits, budget)
            count = len(tree)
            assert int(buffers.num_nodes) == count
            assert buffers.tokens[1 : count + 1].tolist() == tree.tokens.tolist()
            assert buffers.depths[1 : count + 1].tolist() == tree.depths.tolist()
            assert buffers.parents[1 : count + 1].tolist() == tree.parents.tolist()
            mask = fused_ops.unpack_mask(buffers.mask.cpu())[: count + 1, : count + 1]
            assert torch.equal(mask, ancestor_mask(tree.parents))
            log_probs = builder.path_log_probs[1 : count + 1].cpu()
            assert torch.allclose(log_probs, path_log_probs(tree, logits), rtol=0, atol=1e-5)
            for size in (0, 7, count):
                best = TreeBuffers.allocate(padded_rows(size + 1), DEVICE)
                best.take_best(buffers, size)
                smaller = tree.prefix(size)
                rows = slice(1, size + 1)
                assert int(best.num_nodes) == size
                for ours, exact in (
                    (best.tokens, smaller.tokens),
                    (best.depths, smaller.depths),
                    (best.parents, smaller.parents),
                ):
                    assert ours[rows].tolist() == exact.tolist()
                mask = fused_ops.unpack_mask(best.mask.cpu())[: size + 1, : size + 1]
                assert torch.equal(mask, ancestor_mask(smaller.parents))


def preorder(tree: Tree) -> list[int]:
    """Nodes of a tree, from 1, every subtree in a run, siblings by their likelihood."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist(), start=1):
        children.setdefault(parent, []).append(node)
    order, waiting = [], children[0][::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    return order


@needs_kernels
def test_a_tree_in_preorder_is_the_same_tree() -> None:
    generator = torch.Generator().manual_seed(14)
    sizes = [(5, 40, 30, 3.0), (15, 12, 20, 9.0), (1, 30, 8, 3.0)] + (
        [(15, 3000, 256, 3.0), (15, 3000, 1024, 9.0)] if DEVICE == "cuda" else []
    )
    for depths, vocab, budget, scale in sizes:
        logits = torch.randn(depths, vocab, generator=generator) * scale
        buffers = TreeBuffers.allocate(padded_rows(budget + 1), DEVICE)
        buffers.number_in_preorder()
        builder = TreeBuilder(depths, vocab, budget, buffers, is_scored=True)
        builder.build(logits.to(DEVICE))
        tree = build_tree(logits, budget)
        order, count = preorder(tree), len(tree)
        assert int(buffers.num_nodes) == count
        index = torch.tensor(order) - 1
        assert buffers.tokens[1 : count + 1].tolist() == tree.tokens[index].tolist()
        assert buffers.depths[1 : count + 1].tolist() == tree.depths[index].tolist()
        row_of = {0: 0} | {node: row for row, node in enumerate(order, start=1)}
        parents = torch.tensor([row_of[int(tree.parents[node - 1])] for node in order])
        assert buffers.parents[1 : count + 1].tolist() == parents.tolist()
        seen = ancestor_mask(parents)
        assert torch.equal(fused_ops.unpack_mask(buffers.mask.cpu())[: count + 1, : count + 1], seen)
        log_probs = builder.path_log_probs[1 : count + 1].cpu()
        assert torch.allclose(log_probs, path_log_probs(tree, logits)[index], rtol=0, atol=1e-5)
        assert buffers.ancestors is not None
        for row, told in enumerate(buffers.ancestors.tolist()[1:], start=1):
            above = seen[row, :row].nonzero().flatten().tolist() if row <= count else [0]  # padding sees the root
            assert sorted(set(told) - {-1}) == above
            assert len(set(told) - {-1}) == sum(entry >= 0 for entry in told)  # none counts twice


@needs_kernels
@pytest.mark.parametrize("window", [None, 22])
def test_attention_of_a_tree_in_preorder(window: int | None) -> None:
    """Far ancestors are gathered: tiles of nodes between are skipped, and what little is seen of them counts once."""
    generator = torch.Generator().manual_seed(5)
    held, budget, heads = 20, 100, 3
    tree = TreeBuffers.allocate(padded_rows(budget + 1), DEVICE)
    tree.number_in_preorder()
    rows = tree.num_rows
    logits = torch.randn(9, 40, generator=generator)
    logits[:, :3] += 6  # deep
    TreeBuilder(9, 40, budget, tree).build(logits.to(DEVICE))
    queries, cache = torch.randn(rows, heads, 32, generator=generator), torch.randn(2, 1, 128, 32, generator=generator)
    mask, depths = tree.mask.cpu(), tree.depths.cpu()
    exact = fused_ops._tree_attention_reference(
        queries.double(), cache.double(), mask, depths, held, torch.zeros(rows, 96).double(), 32**-0.5, window
    )
    far = fused_ops.unpack_mask(mask)[64:, :64].sum(1)
    assert far.max() > 3  # else nothing is tested
    length = torch.tensor([held], dtype=torch.int32, device=DEVICE)
    for config in ((16, 64, 3, 4, 1), (32, 64, 1, 4, 2), (32, 128, 2, 4, 2)):
        out = torch.full((rows, 96), float("nan"), device=DEVICE)
        fused_ops.tree_attention(
            queries.to(DEVICE), cache.to(DEVICE), tree.mask, tree.depths, length, out, scale=32**-0.5, window=window,
            ancestors=tree.ancestors, config=config,
        )  # fmt: skip
        assert error(out.cpu(), exact) < 1e-5


@needs_kernels
@pytest.mark.parametrize("is_coarse", [False, True], ids=["logits", "ties"])
def test_a_tree_starts_from_the_best_tokens_of_each_depth(is_coarse: bool) -> None:
    """Over a vocabulary of many groups, where torch's topk would choose among ties as it likes."""
    num_depths, vocab = 3, 9001
    logits = torch.randn(num_depths, vocab, generator=torch.Generator().manual_seed(7)) * 3
    if is_coarse:
        logits = logits.round()
        logits[1] = 0.0
        logits[1, ::3] = -0.0
        logits[2, :8000] = -float("inf")
    for budget in (20, 128):
        builder = TreeBuilder(num_depths, vocab, budget, TreeBuffers.allocate(padded_rows(budget + 1), DEVICE))
        assert builder.group
        builder.build(logits.to(DEVICE))
        found = builder._buffers(torch.device(DEVICE))["ranked_ids"].view(num_depths, -1).tolist()
        values = logits.tolist()
        assert found == [sorted(range(vocab), key=lambda i, row=row: (-row[i], i))[:budget] for row in values]


def test_walk_follows_choices() -> None:
    tree = build_tree(torch.randn(5, 40, generator=torch.Generator().manual_seed(5)), 30)
    buffers = TreeBuffers.allocate(32, DEVICE)
    buffers.set_nodes(tree.tokens, tree.depths, tree.parents)
    mask = ancestor_mask(tree.parents)
    for leaf in (0, 9, 30):
        path = mask[leaf].nonzero().flatten()
        choices = torch.full((32,), 96)
        for row, child in zip(path[:-1].tolist(), path[1:].tolist(), strict=True):
            choices[row] = tree.tokens[child - 1]
        out, anchor = WalkBuffers.allocate(5, DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
        walk(buffers, choices.to(DEVICE), out, anchor, 5)
        assert int(out.num_accepted) == path.numel() - 1
        assert int(out.told[0, 0]) == path.numel() - 1
        assert out.path[: path.numel()].tolist() == path.tolist()
        expected = [*(int(tree.tokens[i - 1]) for i in path[1:].tolist()), 96]
        assert out.told[0, 1 : path.numel() + 1].tolist() == expected
        assert int(anchor) == 96


def test_other_architectures_are_refused() -> None:
    with pytest.raises(KitError, match=r"Gemma2DecoderLayer.*portable"):
        FusedTarget(tiny_model("gemma2"), TAPS, max_context_tokens=64)
    target = FusedTarget(tiny_model(), TAPS, max_context_tokens=64)
    with pytest.raises(KitError, match=r"65 tokens.*1\.\.64"):
        target.prefill(prompt(65))
    with pytest.raises(KitError, match="needs a drafter"):
        FusedRound(target, None, 4)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "held", "window"), [(1, 37, None), (7, 0, None), (24, 50, None), (24, 50, 12)])
def test_attention_kernel(dtype: torch.dtype, rows: int, held: int, window: int | None) -> None:
    if fused_ops.INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    generator = torch.Generator().manual_seed(rows)
    tree = build_tree(torch.randn(5, 20, generator=generator), rows - 1)
    mask = fused_ops.pack_mask(ancestor_mask(tree.parents))
    depths = torch.cat([torch.zeros(1), tree.depths]).to(torch.int32)
    queries, cache = torch.randn(rows, 6, 32, generator=generator), torch.randn(2, 2, 256, 32, generator=generator)
    queries, cache = queries.to(dtype), cache.to(dtype)
    exact = fused_ops._tree_attention_reference(
        queries.double(), cache.double(), mask, depths, held, torch.zeros(rows, 192).double(), 32**-0.5, window
    )
    length = torch.tensor([held], dtype=torch.int32, device=DEVICE)
    for config in ((16, 64, 3, 4, 1), (32, 128, 1, 4, 2)):
        out = torch.full((rows, 192), float("nan"), dtype=dtype, device=DEVICE)
        fused_ops.tree_attention(
            queries.to(DEVICE), cache.to(DEVICE), mask.to(DEVICE), depths.to(DEVICE), length, out, scale=32**-0.5,
            window=window, config=config,
        )  # fmt: skip
        assert error(out.cpu(), exact) < (1e-5 if dtype == torch.float32 else 8e-3)


@needs_kernels
@pytest.mark.parametrize("width", [48, 64])
def test_row_kernels(width: int) -> None:
    generator = torch.Generator().manual_seed(6)
    x, w = torch.randn(1, width, generator=generator), torch.randn(2 * 40, width, generator=generator)
    out, pair = torch.empty(1, 80), torch.empty(1, 40)
    bias = torch.randn(80, generator=generator)
    ours = fused_products.gemv(x.to(DEVICE), w.to(DEVICE), bias.to(DEVICE), out.to(DEVICE))
    assert error(ours.cpu(), x.double() @ w.double().t() + bias) < 1e-6
    ours = fused_products.gemv(x.to(DEVICE), w.to(DEVICE), None, pair.to(DEVICE), swiglu=True)
    gate, up = (x.double() @ w.double().t()).chunk(2, dim=-1)
    assert error(ours.cpu(), torch.nn.functional.silu(gate) * up) < 1e-6
    caches = torch.randn(3, 2, 2, 64, 32, generator=generator)
    moved, path, held = caches.clone(), torch.tensor([0, 1, 4, 9, 30, 0, 0, 0], dtype=torch.int32), 20
    moved[:, :, :, 20:25] = caches[:, :, :, [20, 21, 24, 29, 50]]
    on_device = caches.to(DEVICE)
    scalars = [torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (4, held)]
    fused_ops.commit_rows(on_device, path.to(DEVICE), *scalars)
    assert torch.equal(on_device.cpu(), moved)


@pytest.mark.skipif(not HAS_TRITON or KERNELS, reason="Triton is missing, or the kernels were tested already")
def test_kernels_in_the_interpreter_and_compiled(tmp_path: Path) -> None:
    """Run this file's tiny tests with every operation as an interpreted kernel, in a process of its own; compile what ran there."""
    from kernel_compiling import interpret_and_compile

    chosen = "(attention_kernel and float32) or row_kernels or device_tree or preorder or best_tokens or walk"
    _, kernels = interpret_and_compile(Path(__file__), chosen, tmp_path)
    assert {"tree_attention_kernel", "merge_kernel", "preorder_kernel"} <= kernels, kernels


@pytest.mark.gpu
def test_bfloat16_stays_close_to_transformers() -> None:
    model = tiny_model(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=8).bfloat16()
    tokens = prompt(600)
    exact = tiny_model(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=8)(tokens[None]).logits[
        0, -1
    ]
    theirs = error(model(tokens[None]).logits[0, -1], exact)
    target = FusedTarget(model, TAPS, max_context_tokens=700, max_rows=32)
    assert error(target.prefill(tokens)[0], exact) < 1.5 * theirs + 2e-3
