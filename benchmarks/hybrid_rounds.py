"""Whole rounds of a hybrid target and a drafter of its recipe's shape: what `decode_hybrid.py --rounds` times."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from decode_round import floor_ms as dense_floor_ms
from decode_round import random_drafter, round_entry
from hybrid_shapes import SHAPES, floor_ms, linear_shape
from measuring import Report, attempt
from torch import Tensor

from decode.fused_drafter import FusedDrafter
from decode.fused_target import padded_rows
from decode.hybrid_target import HybridTarget
from dflash_kit.recipe import read_section

RECIPES = Path(__file__).resolve().parents[1] / "configs"
SLOTS_BEHIND = 600
"""Tokens behind the prompt that the caches hold, as in the other measurements."""


def measure_rounds(
    model: Any, prompt: Tensor, budgets: list[int], rates: dict[str, float] | None, report: Report
) -> dict[str, Any]:
    """Milliseconds of a round of each method, by stage, and over the autoregressive and the chain's round.

    Next to nothing of a random drafter is accepted. The time of a round does not depend on that, but for the commit, which
    adds up what was accepted: microseconds a token.

    Args:
        model: a hybrid that the fused engine takes; its projections are fused in place.
        prompt: (T,) int64, the committed tokens.
        budgets: of trees.
        rates: of the device, see ``floor_ms``; None leaves floors out.
        report: takes the figures as they come.
    """
    text = model.config.get_text_config()
    has_experts = hasattr(text, "num_experts")
    recipe = RECIPES / ("qwen3.6-35b-a3b.yaml" if has_experts else "qwen3.6-27b.yaml")
    wanted = read_section(recipe, "train")["drafter"]
    shape = {key: getattr(text, key) for key in SHAPES["27b"] if key != "intermediate_size"}
    # As wide as the experts that a token runs through, where the target has them: what `TargetSpec` says.
    width = text.moe_intermediate_size * text.num_experts_per_tok if has_experts else text.intermediate_size
    shape["intermediate_size"] = width
    num_layers, num_sliding = wanted["num_hidden_layers"], wanted["num_sliding_layers"]
    module = random_drafter(
        shape, wanted["block_size"], num_layers, model.device, model.dtype,
        num_sliding=num_sliding, window=wanted["sliding_window"],
    )  # fmt: skip
    config, rows = module.config, padded_rows(max(*budgets, module.config.block_size) + 1)
    target = HybridTarget(model, config.target_layer_ids, prompt.numel() + SLOTS_BEHIND, rows)
    drafter = FusedDrafter(module, target)
    report.add(
        drafter={
            "recipe": recipe.name, "parameters": sum(p.numel() for p in module.parameters()), "layers": num_layers,
            "sliding_layers": num_sliding, "sliding_window": config.sliding_window, "block_size": config.block_size,
            "heads": [config.num_attention_heads, config.num_key_value_heads, config.head_dim],
            "taps": config.num_taps,
        }
    )  # fmt: skip
    methods = {"ar": 0, "chain": None} | {f"ddtree-{budget}": budget for budget in budgets}
    rounds: dict[str, Any] = {}
    for method, budget in methods.items():
        report.at(f"rounds: {method}")
        count = config.block_size if budget is None else budget + 1
        floor = None
        if rates is not None:
            floor = max(floor_ms(model, linear_shape(model), count, prompt.numel(), rates).values())
            if budget != 0:
                floor += dense_floor_ms(shape, config.block_size, prompt.numel(), rates, num_layers, config.num_taps)
        rounds[method] = attempt(
            lambda budget=budget, floor=floor: round_entry(target, drafter, budget, prompt, floor)  # type: ignore[misc]
        )
        report.add(rounds=rounds)
        gc.collect()  # graphs hold memory until they are gone
        if prompt.is_cuda:
            torch.cuda.empty_cache()
    return {"over_ar": ratios(rounds, "ar"), "over_chain": ratios(rounds, "chain")}


def ratios(rounds: dict[str, Any], to: str) -> dict[str, float]:
    """Each method's round over one's: how many times as many tokens it has to accept to be as fast."""
    timed = {name: entry["round_ms"] for name, entry in rounds.items() if isinstance(entry, dict)}
    return {name: round(ms / timed[to], 3) for name, ms in timed.items()} if to in timed else {}
