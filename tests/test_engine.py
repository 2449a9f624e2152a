"""Decoding over trees gives exactly the target's own tokens, or its own distribution."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import OracleEngine, decode_once, generate, make_engine, record_row, tiny_drafter, train_briefly

from decode.engine import Engine, Method
from decode.sampling import Sampling, choose_tokens
from decode.target_runner import TargetRunner
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.target import load_target
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import build_tree
from helpers import make_tiny_target

METHODS = [("ar", 0), ("chain", 7), ("ddtree", 0), ("ddtree", 1), ("ddtree", 16), ("ddtree", 64)]
PROMPTS = [list(range(10, 18)), [7], [3, 250, 99, 98, 97, 40, 41, 42, 43, 44, 45, 46, 47, 1, 2]]


@pytest.fixture(scope="module")
def tiny_model(tiny_target: Path) -> Any:
    return load_target(tiny_target)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_transformers(tiny_model: Any, tiny_target: Path, prompt: list[int]) -> None:
    expected = generate(tiny_model, prompt, 28)
    drafter, ends = tiny_drafter(tiny_target)
    for error_rate in (None, 0.0, 0.3):
        if error_rate is None:
            engine = make_engine(tiny_model, drafter)
        else:
            engine = OracleEngine(
                TargetRunner(tiny_model, drafter.config.target_layer_ids),
                drafter,
                ends,
                eos_token_ids=(),
                max_context=512,
                script=prompt + expected,
                error_rate=error_rate,
            )
        for name, budget in METHODS:
            found = decode_once(engine, prompt, name, budget, 28)
            assert found.token_ids == expected, (name, budget, error_rate)
            if error_rate == 0.0 and budget >= 16:
                assert max(found.log.num_accepted) == 7  # all accepted
            if budget == 0:
                assert set(found.log.num_accepted) == {0}


def test_eos_inside_a_block_and_max_length_inside_a_tree(tiny_model: Any, tiny_target: Path) -> None:
    prompt = PROMPTS[0]
    whole = generate(tiny_model, prompt, 30)
    drafter, ends = tiny_drafter(tiny_target)
    cuts = set()
    for eos_at in (0, 1, 4, 9, 17, None):
        eos = () if eos_at is None else (whole[eos_at],)
        engine = OracleEngine(
            TargetRunner(tiny_model, drafter.config.target_layer_ids),
            drafter,
            ends,
            eos_token_ids=eos,
            max_context=512,
            script=prompt + whole,
            error_rate=0.15,
        )
        for limit in (1, 2, 3, 5, 8, 13, 30):
            expected = generate(tiny_model, prompt, limit, eos)
            for name, budget in METHODS:
                found = decode_once(engine, prompt, name, budget, limit)
                assert found.token_ids == expected, (eos_at, limit, name, budget)
                assert found.log.new_tokens == len(expected)
                cuts.add(found.log.cut)
    assert cuts == {None, "eos", "length"}


def test_one_prefill_serves_every_method(tiny_model: Any, tiny_target: Path) -> None:
    drafter, _ = tiny_drafter(tiny_target)
    engine = make_engine(tiny_model, drafter)
    prefix = engine.prefill(PROMPTS[2], 25, 64)
    expected = generate(tiny_model, PROMPTS[2], 25)
    for name, budget in [*METHODS, *reversed(METHODS)]:
        assert engine.decode(prefix, Method(name, budget)).token_ids == expected


def test_context_limit(tiny_model: Any, tiny_target: Path) -> None:
    drafter, _ = tiny_drafter(tiny_target)
    engine = make_engine(tiny_model, drafter, max_context=20)
    expected = generate(tiny_model, PROMPTS[0], 12)
    for name, budget in METHODS:
        assert decode_once(engine, PROMPTS[0], name, budget, 100).token_ids == expected
    with pytest.raises(KitError, match=r"prompt long has 20 tokens; 1 to 19 fit"):
        engine.prefill([1] * 20, 5, 16, "long")
    with pytest.raises(KitError, match="0 tokens"):
        engine.prefill([], 5, 16)


def test_long_prompts_are_prefilled_in_chunks(
    tiny_model: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, _ = tiny_drafter(tiny_target)
    whole = TargetRunner(tiny_model, drafter.config.target_layer_ids)
    whole.reserve(50)
    logits, taps = whole.prefill(torch.arange(45))
    monkeypatch.setattr("decode.target_runner.PREFILL_CHUNK_TOKENS", 7)
    chunked = TargetRunner(tiny_model, drafter.config.target_layer_ids)
    chunked.reserve(50)
    other_logits, other_taps = chunked.prefill(torch.arange(45))
    torch.testing.assert_close(other_logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other_taps, taps, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def check_tree_against_paths(model: Any, layer_ids: list[int], prompt: list[int]) -> None:
    """Verify two trees in a row; every row equals a plain pass of transformers over its own path."""
    runner = TargetRunner(model, layer_ids)
    runner.reserve(200)
    runner.prefill(torch.tensor(prompt))
    committed = list(prompt)
    for seed, anchor in ((1, 11), (2, 12)):  # the second tree stands on what the first one committed
        tree = build_tree(torch.randn(6, 200, generator=torch.Generator().manual_seed(seed)) * 3, 30)
        paths: list[list[int]] = [[anchor]]
        rows_of: list[list[int]] = [[0]]
        nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        for row, (token, parent) in enumerate(nodes, 1):
            paths.append([*paths[parent], token])
            rows_of.append([*rows_of[parent], row])
        logits = runner.verify(anchor, tree)
        for row, path in enumerate(paths):
            plain = model(torch.tensor([committed + path])).logits[0, -1]
            torch.testing.assert_close(logits[row], plain, atol=2e-4, rtol=1e-4)
        deepest = max(range(len(paths)), key=lambda r: len(paths[r]))
        assert len(paths[deepest]) >= 4
        taps = runner.commit(rows_of[deepest])
        states = model(torch.tensor([committed + paths[deepest]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[i + 1] for i in layer_ids], dim=-1)[:, len(committed) :]
        torch.testing.assert_close(taps, expected, atol=2e-4, rtol=1e-4)
        committed += paths[deepest]
        assert runner.num_committed == len(committed)


def test_tree_rows_equal_their_own_paths(tiny_model: Any) -> None:
    check_tree_against_paths(tiny_model, [1, 4], PROMPTS[2])


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("mistral", {"sliding_window": 6}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": ["full_attention", "sliding_attention"] * 3,
            },
        ),
        (
            "gemma3_text",
            {
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "query_pre_attn_scalar": 32,
            },
        ),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_windows_and_experts(tmp_path: Path, model_type: Any, overrides: dict[str, Any]) -> None:
    model = load_target(make_tiny_target(tmp_path / "target", model_type=model_type, **overrides))
    check_tree_against_paths(model, [1, 4], PROMPTS[2])
    expected = generate(model, PROMPTS[0], 25)
    drafter, ends = tiny_drafter(tmp_path / "target")
    engine = OracleEngine(
        TargetRunner(model, drafter.config.target_layer_ids),
        drafter,
        ends,
        eos_token_ids=(),
        max_context=512,
        script=PROMPTS[0] + expected,
        error_rate=0.2,
    )
    for name, budget in METHODS:
        assert decode_once(engine, PROMPTS[0], name, budget, 25).token_ids == expected


def test_trained_drafter_is_accepted_and_lossless(tiny_model: Any, tiny_target: Path) -> None:
    """The real drafter (context pass, cache, block pass), trained a little, has several tokens accepted."""
    drafter, ends = tiny_drafter(tiny_target, sharpness=1.0)
    answers = {tuple(p): generate(tiny_model, p, 30) for p in PROMPTS}
    rows = [record_row(tiny_model, drafter, list(p), answer) for p, answer in answers.items()]
    train_briefly(drafter, ends, rows, steps=60)
    engine = make_engine(tiny_model, drafter)
    for name, budget in METHODS:
        rounds = []
        for prompt, expected in answers.items():
            found = decode_once(engine, list(prompt), name, budget, 30)
            assert found.token_ids == expected
            rounds += found.log.num_accepted
        if budget >= 7:
            assert sum(rounds) / len(rounds) > 1.0


# -- sampling
# ----------------------------------------------------------------------------------------------------

VOCAB, LENGTH = 6, 3


@pytest.fixture(scope="module")
def sampling_engine() -> Engine:
    """A one-layer target of six tokens and an untrained drafter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_hidden_layers=1,
        head_dim=16,
        initializer_range=0.4,
        max_position_embeddings=64,
        **sizes,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    drafter_config = DrafterConfig(
        **sizes,
        head_dim=16,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        block_size=4,
        mask_token_id=5,
        target_layer_ids=(0,),
        num_target_layers=1,
        layer_types=("full_attention",),
        layer_causal=(False,),
    )
    drafter = Drafter(drafter_config).eval()
    ends = TargetEnds.from_model(model)
    return Engine(TargetRunner(model, [0]), drafter, ends, eos_token_ids=(), max_context=64)


PLAIN = Sampling(1.0)


def chi_square_excess(engine: Engine, method: Method, num_samples: int, sampling: Sampling = PLAIN) -> float:
    """χ² of the first three tokens against exact enumeration, minus its mean, in standard deviations."""
    prompt = [1, 2, 3]
    model = engine.target.model
    exact = torch.ones(VOCAB**LENGTH)
    prefixes = torch.tensor([prompt + list(tail) for tail in itertools.product(range(VOCAB), repeat=LENGTH)])
    with torch.no_grad():
        logits = model(prefixes).logits[:, len(prompt) - 1 : -1]
    step = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape).gather(-1, prefixes[:, len(prompt) :, None])
    exact = step[..., 0].prod(-1)
    torch.testing.assert_close(exact.sum(), torch.tensor(1.0))
    counts = torch.zeros(VOCAB**LENGTH)
    generator = torch.Generator().manual_seed(1)
    prefix = engine.prefill(prompt, LENGTH, max(method.budget, 1))
    for _ in range(num_samples):
        a, b, c = engine.decode(prefix, method, sampling=sampling, generator=generator).token_ids
        counts[(a * VOCAB + b) * VOCAB + c] += 1
    assert counts[exact == 0].sum() == 0
    common = exact * num_samples >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([exact[common], exact[~common].sum()[None]]) * num_samples
    freedom = len(expected) - 1
    assert freedom > 6
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("method", [Method("ar", 0), Method("chain", 3), Method("ddtree", 6)])
def test_sampling_has_the_targets_distribution(sampling_engine: Engine, method: Method) -> None:
    assert abs(chi_square_excess(sampling_engine, method, 800)) < 4


def test_truncated_sampling_has_the_targets_truncated_distribution(sampling_engine: Engine) -> None:
    assert abs(chi_square_excess(sampling_engine, Method("ddtree", 6), 800, Sampling(1.2, 0.9, 4))) < 4


def test_planted_faults_are_seen(sampling_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = choose_tokens

    def greedy_nodes(logits: Any, sampling: Sampling, generator: Any) -> list[int]:
        return [*honest(logits[:1], sampling, generator), *logits[1:].argmax(-1).tolist()]

    def prefers_the_draft(logits: Any, sampling: Sampling, generator: Any) -> list[int]:
        """Accepting a draft token with probability p and drawing afresh otherwise counts it twice."""
        first, second = honest(logits, sampling, generator), honest(logits, sampling, generator)
        return [a if a in (0, 3) else b for a, b in zip(first, second, strict=True)]

    for fault in (greedy_nodes, prefers_the_draft):
        monkeypatch.setattr("decode.engine.choose_tokens", fault)
        assert chi_square_excess(sampling_engine, Method("ddtree", 6), 400) > 8, fault.__name__
