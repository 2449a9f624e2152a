"""The fused engine for several prompts gives each response the tokens and rounds that it gets alone, whoever its neighbours are.

On a machine without a GPU the torch references run, and the kernels for two prompts in Triton's interpreter; on a GPU every test
runs through the kernels and CUDA graphs.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import assert_equal, decode_alone, decode_batch, requests
from test_fused_target import DEVICE, EXPERTS, KERNELS, error, needs_kernels, prompt, tiny_drafter, tiny_model

from decode import fused_batch, fused_ops, fused_round
from decode.batch_response import Request
from decode.device_tree import TreeBuffers, TreeBuilder, WalkBuffers, walk
from decode.engine import Method
from decode.fused_batch import FusedBatchEngine
from decode.fused_engine import FusedEngine
from decode.sampling import Sampling
from dflash_kit.errors import KitError
from dflash_kit.tree import Tree, ancestor_mask, build_tree
from helpers import HAS_TRITON

METHODS = [Method("ar", 0), Method("chain", 5), Method("ddtree", 7), Method("ddtree", 60)]
EOS = (3, 40)
LENGTHS = (8, 1, 14, 40, 3, 22, 5, 11, 90, 30, 7)
LIMITS = [16, 9, 14, 8, 1, 26, 12, 16, 5, 40, 33]
SETTINGS: dict[str, Any] = {"eos_token_ids": EOS, "max_context": 200, "max_budget": 60}


def prompts() -> list[list[int]]:
    return [prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone() -> FusedEngine:
    return FusedEngine(tiny_model(), tiny_drafter(), **SETTINGS)


@pytest.fixture(scope="module")
def batch() -> FusedBatchEngine:
    return FusedBatchEngine(tiny_model(), tiny_drafter(), batch_size=4, **SETTINGS)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name}-{method.budget}")
def test_tokens_and_rounds_are_those_of_one_prompt_at_a_time(
    alone: FusedEngine, batch: FusedBatchEngine, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = []
    honest = FusedBatchEngine._move
    monkeypatch.setattr(FusedBatchEngine, "_move", lambda self, *args: moves.append(args[1:]) or honest(self, *args))
    want = decode_alone(alone, prompts(), LIMITS, method)
    got, order = decode_batch(batch, prompts(), LIMITS, method)
    assert_equal(got, want)
    assert order != sorted(order), "no response overtook another, so lanes were hardly refilled"
    assert moves, "no lane moved, so the batch never shrank around one"
    if method.budget == 60:
        assert {found.log.cut for found in got} == {None, "eos", "length"}
        assert sum(sum(found.log.num_accepted) for found in got) > 10, "next to nothing was accepted"


@pytest.mark.parametrize(("family", "overrides"), [("mistral", {"sliding_window": 20}), ("qwen3_moe", EXPERTS)])
def test_other_targets_have_the_tokens_of_one_prompt_at_a_time(family: str, overrides: dict[str, Any]) -> None:
    def build(kind: type[Any], **more: Any) -> Any:
        return kind(tiny_model(family, **overrides), tiny_drafter(), **SETTINGS, **more)

    ids, limits = prompts()[2:6], LIMITS[4:8]
    want = decode_alone(build(FusedEngine), ids, limits, METHODS[2])
    assert_equal(decode_batch(build(FusedBatchEngine, batch_size=3), ids, limits, METHODS[2])[0], want)


def test_rounds_and_seconds_of_responses_add_up_to_those_of_the_batch(
    batch: FusedBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, read = 0, 0

    class Counted(fused_round.Telling):
        def read(self) -> list[list[int]]:
            nonlocal read
            read += 1
            return super().read()

    honest = fused_round.FusedRound.launch

    def launch(self: fused_round.FusedRound) -> None:
        nonlocal launched
        launched += 1
        honest(self)

    monkeypatch.setattr(fused_batch, "Telling", Counted)
    monkeypatch.setattr(fused_round.FusedRound, "launch", launch)
    got, _ = decode_batch(batch, prompts(), LIMITS, METHODS[2])
    assert sum(found.log.batch_rounds or 0 for found in got) == pytest.approx(read)
    assert 0 <= launched - read <= 1, "at most the last stretch ends with a round that nobody reads"
    for found in got:
        assert set(found.log.stage_s) == {"round"}
        assert found.log.decode_s == pytest.approx(found.log.stage_s["round"])
        assert (found.log.decode_s > 0) == bool(found.log.num_accepted)


def test_requests_may_be_added_meanwhile_and_runs_broken_off(alone: FusedEngine, batch: FusedBatchEngine) -> None:
    for _ in batch.decode(requests(prompts()[:3], [9, 5, 14]), METHODS[3]):
        break  # the others are left in their lanes
    waiting, said = requests([[1, 2, 3]], [6]), []
    for request, generation in batch.decode(waiting, METHODS[3]):
        said.append((request.prompt_ids, generation.token_ids))
        if len(said) < 4:
            waiting.append(Request(prompt_ids=request.prompt_ids + generation.token_ids, max_new_tokens=6))
    assert len(said) == 4
    for ids, tokens in said:
        assert decode_alone(alone, [ids], [6], METHODS[3])[0].token_ids == tokens


def test_graphs_for_long_contexts_give_the_same(
    alone: FusedEngine, batch: FusedBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_round, "LONG_CONTEXT_TOKENS", 40)
    assert_equal(
        decode_batch(batch, prompts(), LIMITS, METHODS[2])[0], decode_alone(alone, prompts(), LIMITS, METHODS[2])
    )


def test_samples_come_from_one_seed_and_all_tokens_are_possible(batch: FusedBatchEngine) -> None:
    sampling, method = Sampling(1.0, top_k=3), METHODS[2]
    found: list[dict[str, list[int]]] = []
    for _ in range(2):
        said = batch.decode(requests(prompts(), LIMITS, DEVICE), method, sampling)
        found.append({request.prompt_id: generation.token_ids for request, generation in said})
    assert found[0] == found[1]
    first = [found[0][str(i)] for i in range(len(LENGTHS))]
    model = tiny_model()
    for ids, tokens in zip(prompts(), first, strict=True):
        row = torch.tensor([ids + tokens], device=DEVICE)
        best = model(row).logits[0].topk(3, dim=-1).indices
        for i, token in enumerate(tokens):
            assert token in best[len(ids) - 1 + i]
    greedy = decode_batch(batch, prompts(), LIMITS, method)[0]
    assert first != [g.token_ids for g in greedy]


def test_lanes_that_are_too_short_are_refused(batch: FusedBatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.require_room(100, 100, 500)
    batch.require_room(400, 100, 200)  # the target's own limit
    with pytest.raises(KitError, match=r"leaves 200 tokens.*needs 250.*batch_size 3 would fit"):
        batch.require_room(150, 100, 500)
    with pytest.raises(KitError, match=r"long has 200 tokens; 1 to 199 fit"):
        list(batch.decode(deque([Request(prompt_ids=[1] * 200, max_new_tokens=4, name="long")]), METHODS[0]))
    monkeypatch.setattr(fused_batch, "tokens_that_fit", lambda _model, _drafter: 400)
    assert FusedBatchEngine(tiny_model(), tiny_drafter(), batch_size=4, **SETTINGS).max_context == 100


@needs_kernels
@pytest.mark.parametrize(("budget", "vocab", "preorder"), [(7, 40, False), (30, 700, False), (40, 40, True)])
def test_trees_of_several_prompts_are_those_of_each(budget: int, vocab: int, preorder: bool) -> None:
    generator = torch.Generator().manual_seed(budget)
    rows = -(-(budget + 1) // 8) * 8
    block = torch.randn(3, 6, vocab, generator=generator)  # the first of each are the anchors', and no depths
    logits = block.to(DEVICE)[:, 1:]
    many = TreeBuffers.allocate(rows, DEVICE, 3)
    if preorder:
        many.number_in_preorder()
    TreeBuilder(5, vocab, budget, many).build(logits)
    choices = torch.randint(0, vocab, (3 * rows,), generator=generator)
    parts = []
    for own in logits:
        one = TreeBuffers.allocate(rows, DEVICE)
        if preorder:
            one.number_in_preorder()
        TreeBuilder(5, vocab, budget, one).build(own)
        parts.append(one)
    for name in ("depths", "parents", "mask", "num_nodes"):
        assert torch.equal(getattr(many, name), torch.cat([getattr(one, name) for one in parts])), name
    for i, one in enumerate(parts):
        assert torch.equal(many.node_tokens[i, 1:], one.tokens[1:])
        path = ancestor_mask(one.parents[1 : budget + 1].cpu())[-1].nonzero().flatten()
        for row, child in zip(path[:-1].tolist(), path[1:].tolist(), strict=True):
            choices[i * rows + row] = one.tokens[child]
    out, anchors = WalkBuffers.allocate(5, DEVICE, 3), torch.zeros(3, dtype=torch.long, device=DEVICE)
    walk(many, choices.to(DEVICE), out, anchors, 5)
    for i, one in enumerate(parts):
        alone, anchor = WalkBuffers.allocate(5, DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
        walk(one, choices[i * rows : (i + 1) * rows].to(DEVICE), alone, anchor, 5)
        assert int(alone.num_accepted) > 0
        assert int(out.num_accepted[i]) == int(alone.num_accepted)
        count = int(alone.num_accepted) + 1
        assert torch.equal(out.path.view(3, -1)[i, :count], alone.path[:count])
        assert torch.equal(out.told[i, : count + 1], alone.told[0, : count + 1])
        assert int(anchors[i]) == int(anchor)


@needs_kernels
@pytest.mark.parametrize("window", [None, 12])
def test_rows_of_several_prompts_read_and_write_their_own_cache(window: int | None) -> None:
    """Rotary positions with cache write, attention, commit: the kernels equal the references, on lengths from nothing on."""
    generator = torch.Generator().manual_seed(3)
    heads, rows, held = fused_ops.Heads(6, 2, 32), 24, (50, 0, 17)
    trees: list[Tree] = [build_tree(torch.randn(5, 20, generator=generator), rows - 1) for _ in held]
    masks = torch.cat([fused_ops.pack_mask(ancestor_mask(tree.parents)) for tree in trees])
    depths = torch.cat([torch.cat([torch.zeros(1), tree.depths]) for tree in trees]).to(torch.int32)
    qkv = torch.randn(3 * rows, 10 * 32, generator=generator)
    caches = torch.randn(1, 2, 3 * 2, 128, 32, generator=generator)
    tables = torch.randn(100, 16, generator=generator), torch.randn(100, 16, generator=generator)
    norms = torch.rand(32, generator=generator), torch.rand(1, 32, generator=generator)
    lengths = torch.tensor(held, dtype=torch.int32)
    want_queries, want_out, want = torch.empty(3 * rows, 6, 32), torch.empty(3 * rows, 192), caches.clone()
    path = torch.tensor([[0, 2, 5, 9], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    accepted = torch.tensor([3, 1, 0], dtype=torch.int32)
    for i, count in enumerate(held):
        own, cache = slice(i * rows, (i + 1) * rows), want[:, :, 2 * i : 2 * i + 2]
        fused_ops._rope_write_reference(
            qkv[own].view(rows, 1, 10, 32), want_queries[own], cache, norms, tables, depths[own], count, heads, 1e-6
        )
        fused_ops._tree_attention_reference(
            want_queries[own], cache[0], masks[own], depths[own], count, want_out[own], 32**-0.5, window
        )
        moved = path[i, : accepted[i] + 1].long() + count
        cache[:, :, :, count : count + len(moved)] = cache[:, :, :, moved]
    got, queries = caches.to(DEVICE), torch.empty(3 * rows, 6, 32, device=DEVICE)
    on_device = [part.to(DEVICE) for part in (depths, lengths, masks)]
    fused_ops.rope_write(
        qkv.to(DEVICE), queries, got, tuple(n.to(DEVICE) for n in norms), tuple(t.to(DEVICE) for t in tables),
        *on_device[:2], heads, 1e-6,
    )  # fmt: skip
    assert error(queries.cpu(), want_queries) < 1e-6
    for config in ((16, 64, 3, 4, 1), (32, 64, 1, 4, 2)):
        out = torch.full((3 * rows, 192), float("nan"), device=DEVICE)
        fused_ops.tree_attention(
            queries, got[0], on_device[2], *on_device[:2], out, scale=32**-0.5, window=window, config=config
        )
        assert error(out.cpu(), want_out) < 1e-5
    fused_ops.commit_rows(got, path.flatten().to(DEVICE), accepted.to(DEVICE), on_device[1])
    assert error(got.cpu(), want) < 1e-6


@pytest.mark.skipif(not HAS_TRITON or KERNELS, reason="Triton is missing, or the kernels were tested already")
def test_kernels_in_the_interpreter_and_compiled(tmp_path: Path) -> None:
    """The kernels' tests above with every operation interpreted, in a process of its own; what ran there is compiled."""
    from kernel_compiling import interpret_and_compile

    _, kernels = interpret_and_compile(Path(__file__), "several_prompts", tmp_path)
    assert {"tree_attention_kernel", "rope_write_kernel", "commit_kernel", "walk_kernel", "preorder_kernel"} <= kernels
