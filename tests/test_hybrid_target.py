"""The fused hybrid target equals transformers, its rounds say what the target says, its kernels equal the references.

On a machine without a GPU the torch references run, and the kernels in Triton's interpreter in a process of their own.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fused_target import DEVICE, TAPS, error, greedy_reference, prompt, tiny_drafter

from decode import fused_ops
from decode.delta_ops import commit_states, delta_inputs, gated_norm, gated_rope
from decode.delta_rule import DeltaConfig, DeltaRows, DeltaShape, delta_config, tree_delta
from decode.fused_drafter import FusedDrafter
from decode.fused_ops import INTERPRETED, pack_mask
from decode.fused_round import FusedRound, decode_greedy
from decode.gated_delta import solve_on_paths
from decode.hybrid_target import HybridTarget, convolution_columns
from dflash_kit.errors import KitError
from dflash_kit.target import TapRecorder
from dflash_kit.tree import ancestor_mask, build_tree
from helpers import HAS_TRITON

pytestmark = pytest.mark.usefixtures("torch_rules")
KERNELS = fused_ops.uses_kernels(torch.zeros(1)) or torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(not KERNELS, reason="compares Triton kernels with references: GPU or interpreter")


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": EXPERTS,
    "qwen3_next": EXPERTS | {"mlp_only_layers": [0, 2]},
}


def tiny_hybrid(family: str = "qwen3_5_text", **overrides: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.06,
        tie_word_embeddings=False, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(settings | FAMILIES[family] | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():  # norms start at 0 or 1, which would hide how they are applied
        if "norm" in name:
            weight.data.add_(0.2 * torch.randn_like(weight))
    return model.to(DEVICE).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "count"),
    [*(("qwen3_5_text", count) for count in (1, 2, 3, 40)), ("qwen3_5_moe_text", 2), ("qwen3_5_moe_text", 40),
     ("qwen3_next", 2), ("qwen3_next", 40)],
)  # fmt: skip
def test_verification_and_every_commit_equal_transformers(family: str, count: int) -> None:
    model, tokens = tiny_hybrid(family), prompt(count)
    before = model(tokens[None]).logits[0]
    target = HybridTarget(model, TAPS, max_context_tokens=256, max_rows=32)
    assert error(model(tokens[None]).logits[0], before) < 1e-6, "fusing in place changed the model itself"
    pieces: list[torch.Tensor] = []
    logits, choice = target.prefill(tokens, lambda taps, _start: pieces.append(taps.clone()))
    with TapRecorder(model, TAPS) as recorder:
        model(tokens[None])
        reference_taps = recorder.taps()[0]
    assert error(logits, before[-1]) < 1e-5
    assert error(torch.cat(pieces), reference_taps) < 1e-5
    said = tokens
    for turn, leaf in enumerate((20, 0, 7, 1, 13)):  # leaf 0: nothing accepted
        tree = build_tree(torch.randn(5, 95, generator=torch.Generator().manual_seed(turn)) * 2, 20)
        row_tokens = torch.cat([choice.cpu(), tree.tokens]).to(DEVICE)
        step = target.verify(row_tokens, tree.depths, tree.parents)
        mask = ancestor_mask(tree.parents)
        for row in range(0, 21, 4):  # the path to a node, as a plain sequence, is the oracle
            path = mask[row].nonzero().flatten().to(DEVICE)
            with TapRecorder(model, TAPS) as recorder:
                plain = model(torch.cat([said, row_tokens[path]])[None]).logits[0, -1]
                plain_taps = recorder.taps()[0, -1]
            assert error(step.logits[row], plain) < 1e-5
            assert error(step.taps[row], plain_taps) < 1e-5
        path = mask[leaf].nonzero().flatten().to(DEVICE)
        target.commit(path)
        said = torch.cat([said, row_tokens[path]])
        choice = step.choices[leaf : leaf + 1].clone()
        run = model(said[None], use_cache=True)
        cache = getattr(run, "past_key_values", None) or run.cache
        for ours, index in enumerate((0, 1, 3)):
            assert error(target.states[ours], cache.layers[index].recurrent_states[0][0]) < 1e-5
            assert error(target.windows[ours].T, cache.layers[index].conv_states[0][0, :, -3:]) < 1e-5
        assert int(target.length) == said.numel()
        for kept, wanted in zip(target.caches[0], (cache.layers[2].keys, cache.layers[2].values), strict=True):
            assert error(kept[:, : said.numel()], wanted[0]) < 1e-5


@pytest.mark.parametrize("budget", [0, None, 1, 5, 30])
def test_greedy_rounds_say_what_the_target_says(budget: int | None) -> None:
    model, tokens = tiny_hybrid(), prompt(23)
    expected = greedy_reference(model, tokens, 40)
    target = HybridTarget(model, TAPS, max_context_tokens=128, max_rows=32)
    rounds = FusedRound(target, FusedDrafter(tiny_drafter(), target), budget)
    assert decode_greedy(rounds, tokens, 40, ()) == expected
    first = torch.tensor(expected[:1], device=DEVICE)
    rounds.resume_at(23, first)  # whatever was decoded since, the prompt's end comes back
    assert [expected[0], *rounds.advance()][:2] == expected[:2]


SHAPE = DeltaShape(key_heads=1, heads=2, key=16, value=24, kernel=4)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("delta_ops", "delta_rule"):
        monkeypatch.setattr(f"decode.{module}.uses_kernels", lambda _tensor: False)


@needs_kernels
@pytest.mark.parametrize("num_nodes", [0, 9, 24])
def test_kernels_equal_their_references(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, delta rule and commit through kernels and through torch, on a tree of one tile or two."""
    generator = torch.Generator().manual_seed(num_nodes)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    tree = build_tree(2 * draw(15, 97), num_nodes)
    parents = torch.cat([torch.tensor([-1]), tree.parents])
    mask, count = pack_mask(ancestor_mask(tree.parents)).to(DEVICE), num_nodes + 1
    columns = convolution_columns(parents, SHAPE.kernel).int().to(DEVICE)
    window, conv = draw(3, SHAPE.channels).to(DEVICE), draw(SHAPE.channels, 4).to(DEVICE)
    a_log, dt_bias, gain = draw(2).to(DEVICE), draw(2).to(DEVICE), draw(SHAPE.value).to(DEVICE)
    states, windows = draw(2, 2, 16, 24).to(DEVICE), draw(2, 3, SHAPE.channels).to(DEVICE)
    leaf = ancestor_mask(tree.parents)[num_nodes // 2].nonzero().flatten()
    path = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    path[: len(leaf)] = leaf
    accepted = torch.tensor([len(leaf) - 1], dtype=torch.int32, device=DEVICE)
    mixed, found = draw(2, count, SHAPE.width), []
    for kernels in (True, False):
        if not kernels:
            without_kernels(monkeypatch)
        rows = DeltaRows.allocate(2, count, SHAPE, torch.zeros(1, device=DEVICE))
        rows.mixed.copy_(mixed)
        kept, kept_windows = states.clone(), windows.clone()
        for layer in range(2):
            delta_inputs(rows, layer, window, columns, conv, a_log, dt_bias, SHAPE)
            tree_delta(rows, layer, states[layer], mask, SHAPE)
        gate = rows.mixed[0][:, SHAPE.channels : SHAPE.channels + SHAPE.heads * SHAPE.value]
        normed = gated_norm(rows.out, gate, gain, 1e-6, torch.empty_like(rows.out))
        commit_states(kept, kept_windows, rows, path, accepted, SHAPE)
        found.append(
            (rows.q, rows.k, rows.v, rows.g, rows.beta, rows.out, rows.updates, rows.summed, normed, kept, kept_windows)
        )
    for index, (ours, reference) in enumerate(zip(*found, strict=True)):
        assert error(ours, reference) < 1e-5, index


@needs_kernels
@pytest.mark.parametrize(
    "config",
    [DeltaConfig(32, 16, 4, 16, 3, 32, 2, 16, 2, "ieee"), DeltaConfig(64, 64, 8, 32, 2, 16, 4, 32, 2, "ieee")],
)
def test_delta_kernel_reference_on_a_chain(config: DeltaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is longer than any tree's path, and fills its tiles: in both sizes of tile."""
    generator, found = torch.Generator().manual_seed(3), []
    mask = pack_mask(torch.ones(70, 70, dtype=torch.bool).tril()).to(DEVICE)
    state = torch.randn(2, 16, 24, generator=generator).to(DEVICE)
    rows = DeltaRows.allocate(1, 70, SHAPE, torch.zeros(1, device=DEVICE))
    for part, size in ((rows.q, 0.25), (rows.k, 0.25), (rows.v, 1.0), (rows.beta, 0.3)):
        part.copy_(size * torch.randn(part.shape, generator=generator))
    rows.g.copy_(-0.1 * torch.rand(rows.g.shape, generator=generator))
    for kernels in (True, False):
        if not kernels:
            without_kernels(monkeypatch)
        tree_delta(rows, 0, state, mask, SHAPE, config)
        found.append([x.clone() for x in (rows.out, rows.updates, rows.summed)])
    for ours, reference in zip(*found, strict=True):
        assert error(ours, reference) < 1e-5


def coarse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's tf32 products drop what tensor cores drop: the lower 13 bits of what they multiply."""
    import numpy
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    exact = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision == ir.INPUT_PRECISION.TF32:
            a, b = (
                TensorHandle((x.data.view(numpy.int32) & -0x2000).view(numpy.float32), x.dtype.scalar) for x in (a, b)
            )
        return exact(self, a, b, d, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@needs_kernels
@pytest.mark.parametrize(
    ("tile", "rows_of_config", "precision"),
    [(16, 16, "tf32x3"), (16, 72, "tf32x3"), (32, 264, "ieee"), (32, 264, "tf32x3"), (64, None, "tf32x3")],
)
def test_delta_kernels_equal_the_float64_reference(
    tile: int, rows_of_config: int | None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of 64 nodes, three value heads to a key head: an ordinary one, one whose keys are all but equal and are
    written in full, one that forgets nearly all at every node; whatever was left in the buffers is not read."""
    if INTERPRETED:
        coarse_products(monkeypatch)
    generator, shape = torch.Generator().manual_seed(tile), DeltaShape(key_heads=2, heads=6, key=24, value=12, kernel=4)
    tree = build_tree(3 * torch.randn(15, 97, generator=generator), 64)
    on_path, rows = ancestor_mask(tree.parents), DeltaRows.allocate(1, 65, shape, torch.zeros(1, device=DEVICE))
    assert max(on_path[first : first + 16, first : first + 16].sum(1).max() for first in range(0, 65, 16)) > 4

    def unit(*size: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*size, generator=generator), dim=-1)

    q, k, v = unit(65, 2, 24) * 24**-0.5, unit(65, 2, 24), torch.randn(65, 6, 12, generator=generator)
    k[:, 1] = torch.nn.functional.normalize(k[:1, 1] + 1e-3 * k[:, 1], dim=-1)
    beta, g = torch.rand(65, 6, generator=generator), -torch.rand(65, 6, generator=generator)
    beta[:, 4], g[:, 4], g[:, 5] = 1.0, -1e-4, -90.0
    state = torch.randn(6, 24, 12, generator=generator)
    repeated = [x.repeat_interleave(3, dim=1) for x in (q, k)]
    exact = solve_on_paths(*(x.double() for x in (*repeated, v, g, beta, state)), on_path)
    for part, drawn in ((rows.q, q), (rows.k[0], k), (rows.v, v), (rows.g, g), (rows.beta, beta)):
        part.copy_(drawn)
    for part in (*(getattr(rows.scratch, field.name) for field in fields(rows.scratch)), rows.updates, rows.summed):
        part.fill_(float("nan"))
    chosen = delta_config(rows_of_config) if rows_of_config else DeltaConfig(64, 64, 8, 16, 3, 32, 4, 32, 2)
    if INTERPRETED or chosen is None:
        chosen = DeltaConfig(tile, 16, 4, 16, 2, 16, 4, 16, 2)
    chosen = chosen._replace(precision=precision)
    assert chosen.rows == tile
    tree_delta(rows, 0, state.to(DEVICE), pack_mask(on_path).to(DEVICE), shape, chosen)
    for ours, reference in zip((rows.out.view(65, 6, 12), rows.updates[0], rows.summed[0]), exact, strict=True):
        for head in range(6):
            assert error(ours[:, head], reference[:, head].to(DEVICE)) < (1e-6 if INTERPRETED else 1e-5)


@needs_kernels
def test_gated_rope_kernel_equals_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(5, (2 * 4 + 2 * 2) * 32, generator=generator).to(DEVICE)
    gains = tuple(torch.rand(32, generator=generator).to(DEVICE) + 0.5 for _ in range(2))
    tables = tuple(torch.randn(40, 4, generator=generator).to(DEVICE) for _ in range(2))
    depths = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    found = []
    for kernels in (True, False):
        if not kernels:
            without_kernels(monkeypatch)
        queries, cache = torch.zeros(5, 4, 32, device=DEVICE), torch.zeros(2, 2, 20, 32, device=DEVICE)
        gated_rope(qkv, queries, cache, gains, tables, depths, length, 1e-6)
        found.append((queries, cache))
    for ours, reference in zip(*found, strict=True):
        assert error(ours, reference) < 1e-5


@pytest.mark.skipif(KERNELS or not HAS_TRITON, reason="starts the interpreter; needs triton and no GPU")
def test_kernels_run_in_the_interpreter_and_compile(tmp_path: Path) -> None:
    from kernel_compiling import interpret_and_compile

    words, kernels = interpret_and_compile(Path(__file__), "reference", tmp_path)
    assert "passed" in words
    assert len(kernels) >= 1


def test_biases_and_other_layers_are_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with pytest.raises(KitError, match="attention has biases"):
        HybridTarget(tiny_hybrid(attention_bias=True), TAPS, 64)
    config = AutoConfig.for_model("qwen3", vocab_size=97, hidden_size=48, num_hidden_layers=2)
    with pytest.raises(KitError, match="layers are Qwen3DecoderLayer"):
        HybridTarget(AutoModelForCausalLM.from_config(config), (0,), 64)
