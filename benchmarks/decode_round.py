"""Time one decoding round on a GPU: autoregressive, chain and DDTree, by stage, beside the floor and the HF path.

    python benchmarks/decode_round.py --shapes qwen3-8b,smollm2-135m --contexts 512,8192 --budgets 64,256,1024

Weights and drafter are random, so almost nothing is accepted; the time of a round does not depend on that, because
every shape is fixed. A time is the median over replays of a CUDA graph (`round`), or over a graph of one stage alone
(`stages`, whose sum therefore differs a little). The floor of a round is the larger of bytes over copy bandwidth and
FLOPs over the matrix rate, both measured in the same run, summed over draft and verification. The last line of the
output is one JSON object.

The HF path (`hf`) is the same model, untransformed: transformers' modules, StaticCache and SDPA with a dense mask, in a
CUDA graph; verification only.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import captured_ms, time_ms

from decode.cuda_graphs import capture
from decode.device_tree import PREORDER_ROWS, TreeBuffers, TreeBuilder
from decode.fused_drafter import FusedDrafter
from decode.fused_round import FusedRound
from decode.fused_target import FusedTarget, padded_rows
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.target import tap_layer_ids

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "family": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "vocab_size": 151936,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "family": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728,
        "vocab_size": 151936,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "family": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
    "tiny": {
        "family": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1024,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
    },
}  # fmt: skip


def random_model(shape: dict[str, Any], device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A transformers model of this shape with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in shape.items() if key != "family"}
    config = AutoConfig.for_model(shape["family"], max_position_embeddings=16384, **settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def random_drafter(
    shape: dict[str, Any],
    block_size: int,
    num_layers: int,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_sliding: int = 0,
    window: int | None = None,
) -> Drafter:
    """A drafter of the target's width with random weights; sliding layers come first and are causal, as in recipes."""
    is_sliding = [index < num_sliding for index in range(num_layers)]
    taps = tap_layer_ids(shape["num_hidden_layers"], 5 if shape["num_hidden_layers"] > 7 else 1)
    config = DrafterConfig(
        **{name: shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        num_key_value_heads=shape["num_key_value_heads"], vocab_size=shape["vocab_size"], rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=16384, block_size=block_size, mask_token_id=7, target_layer_ids=tuple(taps),
        num_target_layers=shape["num_hidden_layers"], layer_causal=tuple(is_sliding), sliding_window=window,
        layer_types=tuple("sliding_attention" if sliding else "full_attention" for sliding in is_sliding),
    )  # fmt: skip
    with torch.device(device):
        return Drafter(config).to(dtype).eval().requires_grad_(False)


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes read + written) and bf16 matrix rate on random data, of this card now."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    copy = torch.empty_like(source)
    copy_ms = time_ms(lambda: copy.copy_(source))
    a, b = source[: 1 << 26].view(8192, 8192), source[1 << 26 : 1 << 27].view(8192, 8192)
    product = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matrix_ms = time_ms(lambda: torch.mm(a, b.t(), out=product), repeats=10)
    return {
        "copy_tb_s": 2 * source.numel() * 2 / copy_ms / 1e9,
        "matrix_tflop_s": 2 * 8192**3 / matrix_ms / 1e9,
    }


def floor_ms(
    shape: dict[str, Any], rows: int, context: int, rates: dict[str, float], num_layers: int, taps: int = 0
) -> float:
    """Larger of memory and arithmetic time of one pass of ``rows`` rows; ``taps`` > 0 adds the drafter's ``fc``."""
    hidden, heads, kv, dim = (
        shape[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    weights = num_layers * layer + shape["vocab_size"] * hidden + taps * hidden * hidden
    bytes_moved = 2 * (weights + 2 * num_layers * kv * dim * context)
    flops = 2 * rows * weights + 4 * num_layers * rows * heads * dim * (context + rows)
    return max(bytes_moved / rates["copy_tb_s"], flops / rates["matrix_tflop_s"]) / 1e9


def time_round(rounds: FusedRound, tokens: torch.Tensor) -> tuple[float, dict[str, float], float]:
    """Milliseconds of a whole round, of each stage alone, and of a round with its host read."""
    rounds.start(tokens)
    length = rounds.target.length.clone()

    def back(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            work()
            rounds.target.length.copy_(length)

        return run

    whole = time_ms(back(rounds.launch))
    begin = time.perf_counter()
    for _ in range(30):
        rounds.advance(ahead=True)
        rounds.target.length.copy_(length)
    with_host = (time.perf_counter() - begin) / 30 * 1e3
    stages = {}
    for name, stage in rounds.stages().items():
        stages[name] = captured_ms(back(stage))
    return whole, stages, with_host


def round_entry(
    target: FusedTarget, drafter: FusedDrafter, budget: int | None, tokens: torch.Tensor, floor: float | None
) -> dict[str, Any]:
    """Figures of the rounds of one method, budget as for ``FusedRound``, behind the prompt ``tokens`` (T,)."""
    rounds = FusedRound(target, None if budget == 0 else drafter, budget)
    whole, stages, with_host = time_round(rounds, tokens)
    return {
        "rows_padded": rounds.step.tree.num_rows,
        "round_ms": round(whole, 3), "with_host_ms": round(with_host, 3),
        "floor_ms": None if floor is None else round(floor, 3),
        "stages_ms": {stage: round(value, 3) for stage, value in stages.items()},
    }  # fmt: skip


def zipf_logits(num_depths: int, vocab_size: int) -> torch.Tensor:
    """Logits shaped like a trained drafter's: power-law tails, two thirds of the mass on the first token at depth 1."""
    ranks = torch.arange(1, vocab_size + 1, device="cuda").log()
    rows = []
    for depth in range(num_depths):
        noise = 0.3 * torch.randn(vocab_size, device="cuda")
        rows.append((noise - (2.2 - 0.06 * depth) * ranks)[torch.randperm(vocab_size, device="cuda")])
    return torch.stack(rows).bfloat16()


def time_build(num_depths: int, vocab_size: int, budgets: list[int]) -> dict[str, dict[str, float]]:
    """Milliseconds of building a tree on the device, ancestor bits included; nothing is copied to the host."""
    cases = {
        "zipf": zipf_logits(num_depths, vocab_size),
        "normal": (3 * torch.randn(num_depths, vocab_size, device="cuda")).bfloat16(),
    }
    times: dict[str, dict[str, float]] = {}
    for name, logits in cases.items():
        times[name] = {}
        for budget in budgets:
            tree = TreeBuffers.allocate(padded_rows(budget + 1), "cuda")
            if tree.num_rows > PREORDER_ROWS:
                tree.number_in_preorder()
            builder = TreeBuilder(num_depths, vocab_size, budget, tree)
            graph = capture(lambda builder=builder, logits=logits: builder.build(logits))  # type: ignore[misc]
            times[name][str(budget)] = round(time_ms(graph.replay), 4)
    return times


def time_hf(model: Any, context: int, num_rows: int) -> float:
    """The untransformed model: ``num_rows`` tokens behind ``context`` cached ones, in a CUDA graph, with argmax."""
    from transformers import StaticCache

    slots = context + num_rows
    cache = StaticCache(config=model.config, max_cache_len=slots)
    tokens = torch.randint(0, 1000, (1, num_rows), device="cuda")
    positions = torch.arange(context, slots, device="cuda")
    mask = torch.ones(1, 1, num_rows, slots, dtype=torch.bool, device="cuda").tril(context)

    def work() -> torch.Tensor:
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions[None], past_key_values=cache, use_cache=True
        ).logits
        for layer in cache.layers:  # every replay writes the same slots
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(context) if torch.is_tensor(layer.cumulative_length) else setattr(
                    layer, "cumulative_length", context
                )
        return logits.argmax(-1)

    with torch.no_grad():
        graph = capture(work)  # type: ignore[arg-type]
        return time_ms(graph.replay, repeats=10)


def measure_shape(name: str, args: argparse.Namespace, rates: dict[str, float]) -> list[dict[str, Any]]:
    shape, results = SHAPES[name], []
    model = random_model(shape)
    module = random_drafter(shape, args.block_size, args.drafter_layers)
    contexts = [int(part) for part in args.contexts.split(",")]
    budgets = [int(part) for part in args.budgets.split(",")]
    target = FusedTarget(model, module.config.target_layer_ids, max(contexts) + 1200, max_rows=1032)
    drafter, taps = FusedDrafter(module, target), module.config.num_taps
    for context in contexts:
        tokens = torch.randint(0, 1000, (context,), device="cuda")
        for method, budget in [("ar", 0), ("chain", None), *(("ddtree", budget) for budget in budgets)]:
            rows = 1 + (args.block_size - 1 if budget is None else budget)
            floor = floor_ms(shape, rows, context, rates, shape["num_hidden_layers"])
            if budget != 0:
                floor += floor_ms(shape, args.block_size, context, rates, args.drafter_layers, taps)
            entry = {
                "shape": name, "context": context, "method": method, "budget": budget,
                **round_entry(target, drafter, budget, tokens, floor),
            }  # fmt: skip
            if args.hf and context == contexts[0] and (budget is None or budget <= 256):
                try:
                    entry["hf_verify_ms"] = round(time_hf(model, context, rows), 3)
                except Exception as error:  # the peer must not stop the measurement; its failure is reported
                    entry["hf_error"] = f"{type(error).__name__}: {error}"[:200]
            results.append(entry)
            print(json.dumps(entry), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-8b,smollm2-135m", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--contexts", default="512,8192", help="committed tokens before the round")
    parser.add_argument("--budgets", default="64,256,1024", help="DDTree budgets")
    parser.add_argument("--block_size", type=int, default=16)
    parser.add_argument("--drafter_layers", type=int, default=5)
    parser.add_argument("--hf", action=argparse.BooleanOptionalAction, default=True, help="also time the HF path")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark times CUDA graphs; no GPU is visible here")
    torch.manual_seed(0)
    rates = ceilings()
    print(json.dumps(rates), flush=True)
    build = time_build(args.block_size - 1, 151936, [int(part) for part in args.budgets.split(",")])
    print(json.dumps({"tree_build_ms": build}), flush=True)
    results = []
    for name in args.shapes.split(","):
        results += measure_shape(name, args, rates)
        torch.cuda.empty_cache()
    import transformers
    import triton

    report = {
        "benchmark": "decode_round", "date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "dtype": "bfloat16", "batch": 1, "weights": "random, target and drafter",
        "block_size": args.block_size, "drafter_layers": args.drafter_layers, "ceilings": rates,
        "tree_build_ms": build, "results": results,
    }  # fmt: skip
    line = json.dumps(report)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
