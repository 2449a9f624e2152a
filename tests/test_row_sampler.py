"""Sampling in the fused engine: rows are drawn from the target's tempered and truncated distribution, and so are responses."""

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fused_target import prompt, tiny_drafter, tiny_model
from test_hybrid_target import tiny_hybrid

from decode.batch_response import Request
from decode.delta_ops import commit_states
from decode.delta_rule import DeltaRows, DeltaShape, tree_delta
from decode.engine import Method
from decode.fused_batch import FusedBatchEngine
from decode.fused_engine import FusedEngine
from decode.fused_ops import pack_mask
from decode.row_sampler import RowSampler, seed_device
from decode.sampling import Sampling
from dflash_kit.acceptance import DDTREE_AUTO
from helpers import HAS_GPU

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAMPLINGS = [Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.3, top_p=0.8)]
P_VALUE = 1e-6
NUM_RESPONSES = 300
DRAW = RowSampler.draw


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """χ² of counts against probabilities, outcomes of fewer than five expected ones put together."""
    total = sum(counts.values())
    pairs = [(counts[outcome], share * total) for outcome, share in exact.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    pairs = [pair for pair in pairs if pair[1] >= 5] + [(sum(n for n, _ in rare), sum(m for _, m in rare) + 1e-9)]
    chi_square = sum((n - mean) ** 2 / mean for n, mean in pairs if mean > 1e-6)
    half_freedom = torch.tensor((len(pairs) - 2) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(chi_square / 2, dtype=torch.float64)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_row_is_drawn_from_its_own_distribution(sampling: Sampling, device: str) -> None:
    logits = (2 * torch.randn(3, 11, generator=torch.Generator().manual_seed(1))).to(device)
    seed_device(torch.device(device), 5)
    many = logits.repeat(20_000, 1)
    drawn = (
        RowSampler(sampling, many).draw(many, torch.zeros(len(many), dtype=torch.long, device=device)).view(-1, 3).cpu()
    )
    for row, probabilities in enumerate(sampling.probabilities(logits).cpu().double()):
        exact = {(token,): float(p) for token, p in enumerate(probabilities) if p > 0}
        counts = Counter((token,) for token in drawn[:, row].tolist())
        assert set(counts) <= set(exact)
        assert p_value(counts, exact) > P_VALUE
    # Rows are independent of each other.
    together = Counter(map(tuple, drawn[:, :2].tolist()))
    first, second = (sampling.probabilities(logits)[i].cpu() for i in (0, 1))
    likely = (int(first.argmax()), int(second.argmax()))
    expected = float(first.max() * second.max())
    assert together[likely] / len(drawn) == pytest.approx(expected, abs=5 * (expected / len(drawn)) ** 0.5)


@pytest.mark.parametrize(
    "method", [Method("chain", 5), Method("ddtree", 7), Method(DDTREE_AUTO, 7)], ids=lambda m: m.name
)
def test_responses_have_the_targets_distribution(method: Method) -> None:
    sampling, ids = Sampling(1.5, top_k=3), prompt(12).tolist()
    engine = FusedEngine(tiny_model(), tiny_drafter(), eos_token_ids=(), max_context=60, max_budget=7)
    prefix = engine.prefill(ids, 3, 7)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(NUM_RESPONSES):
        said = engine.decode(prefix, method, sampling=sampling, generator=torch.Generator().manual_seed(seed)).token_ids
        counts[tuple(said[:2])] += 1
    exact = exact_pairs(ids, sampling)
    assert set(counts) <= set(exact)
    assert p_value(counts, exact) > P_VALUE


def test_responses_of_a_batch_have_the_targets_distribution() -> None:
    """Of two prompts in lanes beside each other, each its own."""
    sampling, asked = Sampling(1.5, top_k=3), [prompt(12).tolist(), prompt(7, 5).tolist()]
    engine = FusedBatchEngine(
        tiny_model(), tiny_drafter(), eos_token_ids=(), max_context=60, max_budget=7, batch_size=8
    )
    device = str(engine.target.device)
    waiting = deque(
        Request(prompt_ids=ids, max_new_tokens=3, generator=torch.Generator(device).manual_seed(2 * seed + i), tag=i)
        for seed in range(NUM_RESPONSES)
        for i, ids in enumerate(asked)
    )
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    for request, generation in engine.decode(waiting, TREE, sampling):
        counts[request.tag][tuple(generation.token_ids[:2])] += 1
    exact = [exact_pairs(ids, sampling) for ids in asked]
    for found, theirs in zip(counts, exact, strict=True):
        assert set(found) <= set(theirs)
        assert p_value(found, theirs) > P_VALUE
    assert p_value(counts[0], exact[1]) < P_VALUE, "the two prompts are not told apart"


def exact_pairs(ids: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probabilities of a response's first two tokens, from transformers' own passes."""
    model, expected = tiny_model(), {}
    first = sampling.probabilities(model(torch.tensor([ids], device=model.device)).logits[:, -1])[0]
    for token in first.nonzero().flatten().tolist():
        second = sampling.probabilities(model(torch.tensor([[*ids, token]], device=model.device)).logits[:, -1])[0]
        for follower in second.nonzero().flatten().tolist():
            expected[token, follower] = float(first[token] * second[follower])
    return expected


HYBRID_VOCAB, HYBRID_PROMPT, RESPONSE = 5, [1, 2, 0, 3, 3, 1, 0], 3
TREE = Method("ddtree", 7)


@pytest.fixture(scope="module")
def hybrid_engine(torch_rules: None) -> FusedEngine:
    """Of few tokens, so that drafts are accepted and every response is common; its answers depend on all that was said."""
    drafter = tiny_drafter()
    drafter.config = replace(drafter.config, vocab_size=HYBRID_VOCAB, mask_token_id=HYBRID_VOCAB - 1)
    model = tiny_hybrid(vocab_size=HYBRID_VOCAB, initializer_range=0.35)
    return FusedEngine(model, drafter, eos_token_ids=(), max_context=60, max_budget=TREE.budget)


@pytest.fixture(scope="module")
def exact_responses(torch_rules: None) -> dict[tuple[int, ...], float]:
    """Probabilities at temperature 1, from transformers' own pass over every response."""
    model = tiny_hybrid(vocab_size=HYBRID_VOCAB, initializer_range=0.35)
    responses = list(itertools.product(range(HYBRID_VOCAB), repeat=RESPONSE))
    ids = torch.tensor([HYBRID_PROMPT + list(response) for response in responses]).to(model.device)
    steps = model(ids).logits[:, len(HYBRID_PROMPT) - 1 : -1].double().softmax(-1)
    found = steps.gather(-1, ids[:, len(HYBRID_PROMPT) :, None])[..., 0].prod(-1)
    return dict(zip(responses, found.tolist(), strict=True))


def sample_hybrid(engine: FusedEngine, method: Method, count: int) -> tuple[Counter[tuple[int, ...]], Counter[int]]:
    """Responses, and how many nodes their rounds accepted."""
    prefix = engine.prefill(HYBRID_PROMPT, RESPONSE, TREE.budget)
    said, accepted = Counter[tuple[int, ...]](), Counter[int]()
    seed_device(engine.target.device, 3)
    for _ in range(count):
        done = engine.decode(prefix, method, sampling=Sampling(1.0))
        said[tuple(done.token_ids)] += 1
        accepted.update(done.log.num_accepted)
    return said, accepted


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method("chain", 5), TREE], ids=lambda m: m.name)
def test_responses_of_a_hybrid_have_its_distribution(
    method: Method, hybrid_engine: FusedEngine, exact_responses: dict[tuple[int, ...], float]
) -> None:
    said, accepted = sample_hybrid(hybrid_engine, method, 600)
    assert sum(share * 600 >= 5 for share in exact_responses.values()) > 10
    assert p_value(said, exact_responses) > 1e-3
    assert accepted[0] > 50 and accepted.total() - accepted[0] > 50, "rejections and acceptances both have to be common"


def row_behind(self: RowSampler, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return DRAW(self, logits.roll(1, 0), out)


def likeliest_at_nodes(self: RowSampler, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    DRAW(self, logits, out)
    out[1:] = logits[1:].argmax(-1)
    return out


def commits_windows_only(states: torch.Tensor, *args: Any) -> None:
    commit_states(states.clone(), *args)


def sees_all_rows(rows: DeltaRows, layer: int, state: torch.Tensor, mask: torch.Tensor, shape: DeltaShape) -> None:
    chain = torch.ones(len(mask), len(mask), dtype=torch.bool).tril()
    tree_delta(rows, layer, state, pack_mask(chain).to(mask.device), shape)


FAULTS = [
    ("decode.row_sampler.RowSampler.draw", row_behind),
    ("decode.row_sampler.RowSampler.draw", likeliest_at_nodes),
    ("decode.hybrid_target.commit_states", commits_windows_only),
    ("decode.hybrid_target.tree_delta", sees_all_rows),
]


@pytest.mark.skipif(HAS_GPU, reason="a captured graph would run the round as it was")
@pytest.mark.parametrize(("place", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_faults_of_a_hybrids_rounds_are_seen(
    place: str, fault: Callable[..., Any], hybrid_engine: FusedEngine, exact_responses: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(place, fault)
    assert p_value(sample_hybrid(hybrid_engine, TREE, 200)[0], exact_responses) < 1e-9


def test_a_seed_repeats_its_response_whatever_was_drawn_before() -> None:
    engine = FusedEngine(tiny_model(), tiny_drafter(), eos_token_ids=(), max_context=80, max_budget=7)
    prefix = engine.prefill(prompt(12).tolist(), 20, 7)

    def said(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return engine.decode(prefix, Method("ddtree", 7), sampling=Sampling(1.0), generator=generator).token_ids

    first = said(1)
    assert said(2) != first
    assert said(1) == first


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_captured_graph_draws_anew_and_repeats_with_its_seed() -> None:
    logits = torch.zeros(64, 1000, device="cuda")
    sampler, out = RowSampler(Sampling(1.0), logits), torch.zeros(64, dtype=torch.long, device="cuda")
    from decode.cuda_graphs import capture

    graph = capture(lambda: sampler.draw(logits, out))  # type: ignore[arg-type, return-value]
    drawn = []
    for seed in (7, 7, 8):
        seed_device(out.device, seed)
        for _ in range(2):
            graph.replay()
            drawn.append(out.tolist())
    assert drawn[0] == drawn[2] and drawn[1] == drawn[3]
    assert len({tuple(row) for row in drawn}) == 4
