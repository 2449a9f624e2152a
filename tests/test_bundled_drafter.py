"""The drafter in data/drafters, on the real target: lossless, and as good as its card says."""

import json
from pathlib import Path

import pytest
import torch
from drafting import make_engine, record_row

from decode.conversation import Conversation
from decode.engine import Method
from dflash_kit.acceptance import RoundLog, summarise
from dflash_kit.benchmark_prompts import load_benchmark
from dflash_kit.drafter import Drafter
from dflash_kit.replay import replay_row
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds
from helpers import REPO

DRAFTER = REPO / "data" / "drafters" / "smollm2-135m-instruct"
NEW_TOKENS = 64
NUM_PROMPTS = 4
BUDGETS = [16, 64, 256]
PINNED = {"chain": 3.432, "ddtree-16": 4.722, "ddtree-64": 5.333, "ddtree-256": 5.818}
"""Pooled acceptance lengths replayed on the first 64 tokens of four GSM8K test answers, float32."""


@pytest.mark.slow
def test_replayed_acceptance_is_what_it_was_and_live_rounds_agree(smollm2: Path) -> None:
    spec, tokenizer, model = TargetSpec.from_pretrained(smollm2), load_tokenizer(smollm2), load_target(smollm2)
    drafter = Drafter.from_pretrained(DRAFTER).float().eval().requires_grad_(False)
    ends = TargetEnds.from_model(model)
    engine = make_engine(model, drafter, eos=spec.eos_token_ids, max_context=spec.max_position_embeddings)
    logs: dict[str, list[RoundLog]] = {name: [] for name in PINNED}
    for number, prompt in enumerate(load_benchmark("gsm8k", NUM_PROMPTS)):
        ids = Conversation(tokenizer, prompt.turns, prompt.id).ask(0)
        prefix = engine.prefill(ids, NEW_TOKENS, max(BUDGETS))
        said = engine.decode(prefix, Method("ddtree", 0)).token_ids
        row = record_row(model, drafter, ids, said)
        replayed = replay_row(drafter, ends, row, BUDGETS, eos_token_ids=spec.eos_token_ids)
        for (name, budget), found in replayed.items():
            logs[name if name == "chain" else f"{name}-{budget}"] += found
        for method in (("chain", 15), ("ddtree", 64)) if number < 2 else ():
            live = engine.decode(prefix, Method(*method))
            (log,) = replayed[method]
            assert live.token_ids == said
            assert (live.log.num_accepted, live.log.cut) == (log.num_accepted, log.cut)
    lengths = {name: summarise(found, drafter.config.num_draft_tokens) for name, found in logs.items()}
    found = {name: round(result.acceptance_length_pooled, 3) for name, result in lengths.items()}
    assert found == pytest.approx(PINNED, abs=0.06), found  # a round may flip where another processor rounds otherwise


def test_the_checkpoint_is_small_16_bit_and_says_where_it_comes_from() -> None:
    assert (DRAFTER / "model.safetensors").stat().st_size <= 40e6
    assert Drafter.from_pretrained(DRAFTER, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16
    provenance = json.loads((DRAFTER / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["shards_header"]["weights_hash"] and provenance["metrics"]["step"] == 6000
    assert "/tmp" not in json.dumps(provenance)
