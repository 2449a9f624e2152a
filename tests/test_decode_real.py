"""On the real target: decoding is exactly autoregressive, and replay equals live decoding round for round.

One autoregressive run of six real prompts serves all: it is checked against transformers in one pass, scripted drafts
(mostly right, so that few rounds go far) decode it again at every budget, and a small drafter is trained on it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import OracleEngine, make_engine, record_row, train_briefly

from decode.conversation import Conversation
from decode.engine import Method
from decode.target_runner import TargetRunner
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.replay import replay_row
from dflash_kit.target import TargetSpec, choose_mask_token_id, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds

NEW_TOKENS = 90
BUDGETS = [1, 16, 64]

pytestmark = pytest.mark.slow


@dataclass
class Answered:
    """Real prompts, and what the target says to them autoregressively (our loop at budget 0)."""

    model: Any
    spec: TargetSpec
    drafter: Drafter
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def answered(smollm2: Path) -> Answered:
    spec, tokenizer, model = TargetSpec.from_pretrained(smollm2), load_tokenizer(smollm2), load_target(smollm2)
    config = DrafterConfig.from_target(
        spec,
        mask_token_id=choose_mask_token_id(spec, tokenizer),
        num_hidden_layers=2,
        num_sliding_layers=1,
        sliding_window=64,
        block_size=8,
        num_taps=2,
    )
    torch.manual_seed(0)
    drafter = Drafter(config).eval().requires_grad_(False)
    prompts = [
        Conversation(tokenizer, prompt.turns, prompt.id).ask(0)
        for benchmark in ("gsm8k", "humaneval", "mt-bench")
        for prompt in load_benchmark(benchmark, 2)
    ]
    engine = make_engine(model, drafter, eos=spec.eos_token_ids, max_context=spec.max_position_embeddings)
    answers = []
    for prompt in prompts:
        prefix = engine.prefill(prompt, NEW_TOKENS, 0)
        answers.append(engine.decode(prefix, Method("ddtree", 0)).token_ids)
    return Answered(model, spec, drafter, prompts, answers)


def test_our_autoregressive_loop_is_the_targets_own(answered: Answered) -> None:
    """In one pass of transformers over prompt and answer, every token of the answer is the argmax behind the last."""
    for prompt, said in zip(answered.prompts, answered.answers, strict=True):
        with torch.no_grad():
            logits = answered.model(torch.tensor([prompt + said[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == said
        assert len(said) == NEW_TOKENS or said[-1] in answered.spec.eos_token_ids


def test_every_budget_gives_the_same_tokens(answered: Answered) -> None:
    num_tokens = sum(map(len, answered.answers))  # at budget 0
    seen: set[int] = set()
    for prompt, said in zip(answered.prompts, answered.answers, strict=True):
        engine = OracleEngine(
            TargetRunner(answered.model, answered.drafter.config.target_layer_ids),
            answered.drafter,
            TargetEnds.from_model(answered.model),
            eos_token_ids=answered.spec.eos_token_ids,
            max_context=answered.spec.max_position_embeddings,
            script=prompt + said,
            error_rate=0.1,
            least_boost=9.0,  # draft probabilities from 0.1 to 0.97 among 49152 tokens
        )
        prefix = engine.prefill(prompt, NEW_TOKENS, max(BUDGETS))
        for budget in BUDGETS:
            found = engine.decode(prefix, Method("ddtree", budget))
            assert found.token_ids == said, budget
            num_tokens += len(found.token_ids)
            seen.update(found.log.num_accepted)
    assert num_tokens >= 2000
    assert seen == set(range(8))


def test_trained_drafter_is_lossless_and_replays(answered: Answered) -> None:
    drafter, model, ends = answered.drafter, answered.model, TargetEnds.from_model(answered.model)
    prompts, answers = answered.prompts[:2], [said[:32] for said in answered.answers[:2]]
    rows = [record_row(model, drafter, prompt, said) for prompt, said in zip(prompts, answers, strict=True)]
    train_briefly(drafter, ends, rows, steps=16, lr=2e-3, max_anchors=12)
    engine = make_engine(
        model, drafter, eos=answered.spec.eos_token_ids, max_context=answered.spec.max_position_embeddings
    )
    seen: set[int] = set()
    for prompt, said, row in zip(prompts, answers, rows, strict=True):
        replayed = replay_row(drafter, ends, row, BUDGETS, eos_token_ids=answered.spec.eos_token_ids)
        prefix = engine.prefill(prompt, 32, max(BUDGETS))
        for method, (log,) in replayed.items():
            live = engine.decode(prefix, Method(*method))
            assert live.token_ids == said, method
            assert (log.num_accepted, log.cut) == (live.log.num_accepted, live.log.cut), method
            seen.update(log.num_accepted)
    assert len(seen) >= 3  # the drafter has learnt enough for the comparison to say something
