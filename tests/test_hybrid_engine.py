"""A hybrid target and a drafter that were trained for a moment: both engines say what the target says, and accept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import decode_once, make_engine, record_row, tiny_drafter, train_briefly
from test_hybrid import BUDGETS, LINEAR

from decode.engine import Engine, Method
from decode.fused_engine import FusedEngine, reason_against
from decode.hybrid_target import HybridTarget
from decode.sampling import Sampling
from dflash_kit.target import load_target
from dflash_kit.target_ends import TargetEnds
from helpers import make_tiny_target

pytestmark = pytest.mark.usefixtures("torch_rules")
METHODS = [Method("ar", 0), Method("chain", 7), *(Method("ddtree", budget) for budget in BUDGETS)]
PROMPT_TOKENS = (1, 2, 3, 30, 70)
NEW_TOKENS = 72


def stories(count: int, length: int) -> torch.Tensor:
    """Sequences (count, length) of a made-up language: words of 3 to 6 letters, drawn with some chance."""
    draw = torch.Generator().manual_seed(3)
    words = [torch.randint(0, 60, (3 + i % 4,), generator=draw) for i in range(12)]
    rows = []
    for _ in range(count):
        text = torch.cat([words[int(i)] for i in torch.randint(0, 12, (length,), generator=draw)])
        rows.append(text[:length])
    return torch.stack(rows)


def train_target(folder: Path) -> None:
    """Make the target's answers depend on what was said: a random one soon repeats a token."""
    model = load_target(folder).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = stories(4 * 30, 64)
    for batch in texts.split(4):
        loss = torch.nn.functional.cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny_target(tmp_path_factory.mktemp("trained") / "target", model_type="qwen3_5_text", **LINEAR)
    torch.manual_seed(0)
    train_target(folder)
    model = load_target(folder)
    drafter, ends = tiny_drafter(folder, sharpness=1.0)
    texts = stories(len(PROMPT_TOKENS) + 4, 90)
    reference = make_engine(load_target(folder), None)
    prompts = [text[:count].tolist() for text, count in zip(texts, PROMPT_TOKENS, strict=False)]
    answers = [decode_once(reference, prompt, "ar", 0, NEW_TOKENS).token_ids for prompt in prompts]
    rows = []
    for text in texts[-4:]:
        prompt = text[:8].tolist()
        rows.append(record_row(model, drafter, prompt, decode_once(reference, prompt, "ar", 0, 80).token_ids))
    train_briefly(drafter, ends, rows, steps=48)
    return {"folder": folder, "drafter": drafter, "ends": ends, "prompts": prompts, "answers": answers}


def engine(trained: dict[str, Any], kind: str, eos: tuple[int, ...] = ()) -> Engine | FusedEngine:
    drafter, _ = tiny_drafter(trained["folder"])
    drafter.load_state_dict(trained["drafter"].state_dict())  # fusing works in place
    model = load_target(trained["folder"])
    if kind == "portable":
        return make_engine(model, drafter, eos=eos)
    return FusedEngine(model, drafter, eos_token_ids=eos, max_context=512, max_budget=max(BUDGETS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_greedy_answers_are_those_of_autoregressive_decoding(trained: dict[str, Any], kind: str) -> None:
    """Rounds as a drafter's own mistakes make them; as many tokens by each method are compared in test_hybrid.py."""
    found, compared, rounds, said = engine(trained, kind), 0, 0, 0
    rejected_at_the_root = full = False
    for prompt, answer in zip(trained["prompts"], trained["answers"], strict=True):
        prefix = found.prefill(prompt, NEW_TOKENS, max(BUDGETS))
        for method in METHODS:
            done = found.decode(prefix, method)
            assert done.token_ids == answer, method
            compared += len(answer)
            rejected_at_the_root |= method.budget > 0 and 0 in done.log.num_accepted
            full |= 7 in done.log.num_accepted
            if method == METHODS[-1]:
                rounds, said = rounds + len(done.log.num_accepted), said + len(answer)
    assert compared >= 2000
    assert rejected_at_the_root and full
    assert said / rounds > 2, "the drafter accepts next to nothing, so trees were hardly tested"
    assert len({tuple(answer[-20:]) for answer in trained["answers"]}) > 2, "the target says the same whatever it reads"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_an_end_token_inside_the_accepted_path_ends_the_answer(trained: dict[str, Any], kind: str) -> None:
    answer = trained["answers"][3]
    eos = answer[20]
    found = engine(trained, kind, (eos,))
    expected = answer[: answer.index(eos) + 1]
    for method in METHODS:
        prefix = found.prefill(trained["prompts"][3], NEW_TOKENS, max(BUDGETS))
        assert found.decode(prefix, method).token_ids == expected, method


@pytest.mark.slow
def test_samples_have_the_targets_distribution(trained: dict[str, Any]) -> None:
    """At temperature 1, the second token of an answer, which a tree proposes, against the target's probabilities."""
    found, prompt = engine(trained, "portable"), trained["prompts"][3]
    prefix = found.prefill(prompt, 2, 15)
    first = prefix.logits.double().softmax(-1)
    every = torch.cat([torch.tensor([prompt] * len(first)), torch.arange(len(first))[:, None]], dim=1)
    exact = first @ load_target(trained["folder"])(every, logits_to_keep=1).logits[:, -1].double().softmax(-1)
    draw, counts, num_draws = torch.Generator().manual_seed(0), torch.zeros(exact.numel(), dtype=torch.double), 300
    for _ in range(num_draws):
        counts[found.decode(prefix, Method("ddtree", 15), sampling=Sampling(1.0), generator=draw).token_ids[1]] += 1
    spread = float((2 / torch.pi * exact * (1 - exact) / num_draws).sqrt().sum() / 2)  # mean distance of true samples
    assert float((counts / num_draws - exact).abs().sum() / 2) < 1.5 * spread


def test_the_fused_engine_takes_hybrids(trained: dict[str, Any]) -> None:
    model = load_target(trained["folder"])
    assert reason_against(model, trained["drafter"], [("ddtree", 64)]) is None
    found = engine(trained, "fused")
    assert isinstance(found, FusedEngine) and isinstance(found.target, HybridTarget)
    assert isinstance(TargetEnds.from_model(model), TargetEnds)
