"""Tree verification on a hybrid target: milliseconds a pass by budget, beside one autoregressive step and the floor.

    python benchmarks/decode_hybrid.py --shape 27b

Random weights of a hybrid's shape, made on the GPU; one prompt, batch 1. A pass is timed as a CUDA graph and without
one (``graph``, ``eager``); ``commit`` brings the states to a leaf. An autoregressive step is the same pass over one row
with its commit, and transformers' own step beside it. ``state_per_node`` is the same pass with the delta rule done the
other way: one kernel that walks the nodes in order and writes a recurrent state for each of them, in all layers. The floor is the larger
of bytes over copy bandwidth and operations over the matrix rate, both measured in the same run. What fails is reported
in place of its number. Without a GPU the torch references run, ``--shape tiny`` in seconds. The last line of the output
is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from decode_round import ceilings, time_ms  # noqa: E402
from torch import Tensor  # noqa: E402

from decode import hybrid_target  # noqa: E402
from decode.delta_ops import DeltaRows, DeltaShape, delta_config, tree_delta  # noqa: E402
from decode.fused_target import capture, padded_rows  # noqa: E402
from decode.gated_delta import solve_on_paths  # noqa: E402
from decode.hybrid_target import HybridPass, HybridTarget  # noqa: E402
from dflash_kit.errors import KitError  # noqa: E402
from dflash_kit.provenance import git_commit, package_versions  # noqa: E402
from dflash_kit.target import tap_layer_ids  # noqa: E402
from dflash_kit.tree import Tree, ancestor_mask, build_tree, empty_tree  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "27b": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
    },
    "9b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 500,
    },
}  # fmt: skip
MEMORY_SHAPES = {
    "Qwen3.6-27B": (48, DeltaShape(16, 48, 128, 128, 4)),
    "Qwen3.6-35B-A3B": (30, DeltaShape(16, 32, 128, 128, 4)),
}
"""Linear layers and their shape, from the models' configurations."""
CONFIGS = [
    (64, 32, 8, "tf32x3"), (64, 64, 8, "tf32x3"), (64, 32, 4, "tf32x3"), (32, 32, 4, "tf32x3"), (64, 32, 8, "tf32"),
]  # fmt: skip
"""Rows a tile, value columns a program, warps, precision: what is tried on more than 16 rows."""
ON_GPU = torch.cuda.is_available()
DEPTH = 15


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--context", type=int, default=512, help="committed tokens before the pass")
    parser.add_argument("--budgets", default="16,64,256")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--configs", type=int, default=len(CONFIGS), help="how many kernel configurations to try")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args()
    torch.manual_seed(0)
    budgets = [int(part) for part in options.budgets.split(",")]
    begin_s = time.perf_counter()
    rates = ceilings() if ON_GPU else None
    torch.set_grad_enabled(False)
    model = make_model(SHAPES[options.shape])
    prompt = torch.randint(1, 400, (options.context,), device=model.device)
    report: dict[str, Any] = {
        "benchmark": "decode_hybrid", "date": time.strftime("%Y-%m-%d"), "shape": options.shape,
        "context": options.context, "batch": 1, "dtype": str(model.dtype).removeprefix("torch."),
        "weights": "random", "weights_gb": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9, 2),
        "memory_mib": memory_table(budgets), "ceilings": rates,
        "made_s": round(time.perf_counter() - begin_s, 1),
    }  # fmt: skip
    report["transformers_step_ms"] = attempt(lambda: transformers_step_ms(model, prompt, options.repetitions))
    measured = attempt(lambda: measure(model, prompt, budgets, rates, options))
    report |= measured if isinstance(measured, dict) else {"error": measured}
    report |= {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "versions": package_versions(),
        "flash_linear_attention": has_fla(), "commit": git_commit(),
        "took_s": round(time.perf_counter() - begin_s, 1),
    }  # fmt: skip
    line = json.dumps(report)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


def measure(
    model: Any, prompt: Tensor, budgets: list[int], rates: dict[str, float] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Everything that the fused hybrid target does."""
    rows = padded_rows(max(budgets) + 1)
    taps = tap_layer_ids(model.config.num_hidden_layers, 5)
    target = HybridTarget(model, taps, options.context + 600, rows)
    begin_s = now_s()
    target.prefill(prompt)
    first_s = now_s() - begin_s
    begin_s = now_s()
    target.prefill(prompt)
    found: dict[str, Any] = {
        "layers": len(target.mixers), "linear_layers": len(target.states), "prefill_first_s": round(first_s, 3),
        "prefill_s": round(now_s() - begin_s, 3),
    }  # fmt: skip
    found["relative_error"] = attempt(lambda: relative_error(target, model, prompt))
    print(json.dumps(found), flush=True)
    if ON_GPU:
        found["delta_configs"] = {str(budget): try_configs(target, budget, options.configs) for budget in budgets}
        print(json.dumps(found["delta_configs"]), flush=True)
    found["passes"] = {}
    for budget in [0, *budgets]:
        best = best_config(found.get("delta_configs", {}).get(str(budget), {}))
        entry = time_pass(target, budget, best, options.repetitions)
        if rates:
            entry["floor_ms"] = floor_ms(model, target, budget + 1, options.context, rates)
        found["passes"][str(budget)] = entry
        print(json.dumps({budget: entry}), flush=True)
    step = [found["passes"]["0"].get("graph_ms"), found["passes"]["0"].get("eager_ms")]
    best_step = min((value for value in step if isinstance(value, float)), default=None)
    found["step_ms"] = best_step
    if best_step:
        found["over_one_step"] = {
            budget: {
                kind: round(entry[kind] / best_step, 3)
                for kind in ("eager_ms", "graph_ms", "state_per_node_ms")
                if isinstance(entry.get(kind), float)
            }
            for budget, entry in found["passes"].items()
        }
    return found


def time_pass(target: HybridTarget, budget: int, config: Any, repetitions: int) -> dict[str, Any]:
    """One pass over a tree of ``budget`` nodes: with and without a CUDA graph, its commit, and a state per node."""
    tree = make_tree(budget)
    before = allocated()
    step = target.new_pass(padded_rows(len(tree) + 1))
    assert isinstance(step, HybridPass)
    step.tree.tokens[0] = 7
    step.tree.set_nodes(tree.tokens, tree.depths, tree.parents)
    path = torch.zeros(1 if budget == 0 else 16, dtype=torch.int32, device=target.device)
    leaf = ancestor_mask(tree.parents)[len(tree)].nonzero().flatten()
    path[: len(leaf)] = leaf
    accepted = torch.tensor([len(leaf) - 1], dtype=torch.int32, device=target.device)

    def verify() -> None:
        target.run(step)

    def commit() -> None:
        target.keep(step, path, accepted)

    def autoregressive() -> None:
        verify()
        commit()

    work = verify if budget else autoregressive
    held = [(tensor, tensor.clone()) for tensor in target.carried()]
    with patched(config):
        entry: dict[str, Any] = {
            "rows": step.tree.num_rows, "deepest": int(tree.depths.max()) if budget else 0, "config": config,
            "eager_ms": attempt(lambda: eager_ms(work, repetitions)), "graph_ms": attempt(lambda: graph_ms(work)),
            "commit_ms": attempt(lambda: graph_ms(commit)), "pass_mib": mib(allocated() - before),
        }  # fmt: skip
    for tensor, kept in held:
        tensor.copy_(kept)
    if budget:
        entry |= attempt_all(lambda: time_state_per_node(target, step, tree, repetitions))
    return entry


def time_state_per_node(target: HybridTarget, step: HybridPass, tree: Tree, repetitions: int) -> dict[str, Any]:
    """The same pass with a recurrent state for every node of every linear layer."""
    before = allocated()
    rows, layers = len(tree) + 1, len(target.states)
    states = torch.zeros(layers, rows, *target.states.shape[1:], device=target.device)
    parents = torch.cat([tree.parents.new_tensor([-1]), tree.parents]).int().to(target.device)

    def per_node(delta: DeltaRows, layer: int, state: Tensor, _mask: Tensor, _steps: int, shape: DeltaShape) -> None:
        state_per_node(delta, layer, state, states[layer], parents, shape)

    target.run(step)
    expected = step.delta.out.clone()
    original = hybrid_target.tree_delta
    hybrid_target.tree_delta = per_node  # type: ignore[assignment]
    try:
        target.run(step)
        error = float((step.delta.out[:rows] - expected[:rows]).float().norm() / expected[:rows].float().norm())
        timed = graph_ms(lambda: target.run(step)) if ON_GPU else eager_ms(lambda: target.run(step), repetitions)
    finally:
        hybrid_target.tree_delta = original
    return {
        "state_per_node_ms": timed, "state_per_node_mib": mib(states.numel() * 4),
        "state_per_node_peak_mib": mib(allocated() - before), "last_layer_differs_by": error,
    }  # fmt: skip


def state_per_node(
    delta: DeltaRows, layer: int, state: Tensor, states: Tensor, parents: Tensor, shape: DeltaShape
) -> None:
    """Outputs of all rows and a state (N, H, Dk, Dv) after each, every row from its parent's."""
    count = parents.numel()
    if ON_GPU:
        kernel = state_per_node_kernel()
        kernel[(shape.heads, -(-shape.value // 32))](
            delta.q, delta.k[layer], delta.v, delta.g, delta.beta, state, states, parents, delta.out, count,
            KEY_HEADS=shape.key_heads, HEADS=shape.heads, KEY=shape.key, VALUE=shape.value, BLOCK_V=32, num_warps=4,
        )  # fmt: skip
        return
    repeats = shape.heads // shape.key_heads
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (delta.q, delta.k[layer]))
    for row, parent in enumerate(parents.tolist()):
        held = (state if parent < 0 else states[parent]) * delta.g[row].exp()[:, None, None]
        update = delta.beta[row][:, None] * (delta.v[row] - torch.einsum("hkv,hk->hv", held, k[row]))
        states[row] = held + k[row][:, :, None] * update[:, None]
        delta.out[row] = torch.einsum("hkv,hk->hv", states[row], q[row]).flatten()


def state_per_node_kernel() -> Any:
    """The kernel, made when it is first needed: without a GPU there may be no Triton."""
    import decode_hybrid_kernel

    return decode_hybrid_kernel.state_per_node_kernel


def make_model(shape: dict[str, Any]) -> Any:
    """A Qwen3.5 text model with random weights, three linear layers in four."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    layer_types = (kinds * shape["num_hidden_layers"])[: shape["num_hidden_layers"]]
    config = AutoConfig.for_model("qwen3_5_text", **shape, layer_types=layer_types, tie_word_embeddings=False)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def make_tree(budget: int, depth: int = DEPTH) -> Tree:
    """A tree of ``budget`` nodes over draft distributions with a Zipf-like head."""
    if budget == 0:
        return empty_tree()
    logits = -2.2 * torch.log1p(torch.arange(400.0)).expand(depth, 400)
    return build_tree(logits + 0.1 * torch.randn(depth, 400, generator=torch.Generator().manual_seed(0)), budget)


def transformers_step_ms(model: Any, prompt: Tensor, repetitions: int) -> float:
    """One autoregressive step of transformers' own forward pass and cache, as it comes."""
    held = model(prompt[None], use_cache=True, logits_to_keep=1)
    cache = getattr(held, "past_key_values", None) or held.cache
    name = "past_key_values" if hasattr(held, "past_key_values") else "cache"
    token = prompt[None, :1]
    return eager_ms(lambda: model(token, use_cache=True, **{name: cache}), min(repetitions, 10))


def relative_error(target: HybridTarget, model: Any, prompt: Tensor) -> dict[str, float]:
    """Logits of a tree's deepest path against transformers over the same tokens, both in the model's dtype."""
    tree = make_tree(64)
    tokens = torch.cat([tree.tokens.new_tensor([7]), tree.tokens]).to(target.device)
    step = target.verify(tokens, tree.depths, tree.parents)
    row = int(tree.depths.argmax()) + 1
    path = ancestor_mask(tree.parents)[row].nonzero().flatten().to(target.device)
    plain = model(torch.cat([prompt, tokens[path]])[None], logits_to_keep=len(path)).logits[0].float()
    ours = step.logits[path].float()
    return {
        "of_the_path": float((ours - plain).norm() / plain.norm()),
        "same_choice": float((ours.argmax(-1) == plain.argmax(-1)).float().mean()),
    }


def try_configs(target: HybridTarget, budget: int, count: int) -> dict[str, Any]:
    """Milliseconds a layer and error against float64 of the delta rule, by configuration of its kernel."""
    tree, shape = make_tree(budget), target.shape
    step = target.new_pass(padded_rows(budget + 1))
    assert isinstance(step, HybridPass)
    step.tree.set_nodes(tree.tokens, tree.depths, tree.parents)
    rows, used = step.delta, budget + 1
    unit = torch.nn.functional.normalize
    rows.q.copy_(unit(torch.randn_like(rows.q), dim=-1) * shape.key**-0.5)
    rows.k[0].copy_(unit(torch.randn_like(rows.q), dim=-1))
    rows.v.normal_()
    rows.g.copy_(-torch.rand_like(rows.g))
    rows.beta.uniform_()
    state = torch.randn_like(target.states[0])
    repeats = shape.heads // shape.key_heads
    wide = [x[:used].double() for x in (rows.q.repeat_interleave(repeats, 1), rows.k[0].repeat_interleave(repeats, 1))]
    wide += [x[:used].double() for x in (rows.v, rows.g, rows.beta)]
    exact = solve_on_paths(*wide, state.double(), ancestor_mask(tree.parents).to(target.device))[1]  # type: ignore[arg-type]
    found: dict[str, Any] = {}

    def timed_alone(config: Any = None) -> dict[str, Any]:
        def work() -> None:
            tree_delta(rows, 0, state, step.tree.mask, DEPTH, shape, config)

        rows.updates.fill_(float("nan"))
        work()
        error = float((rows.updates[0, :used] - exact).norm() / exact.norm())
        return {"ms": graph_ms(work), "error": error}

    small = [(16, 32, 4, "tf32x3"), (16, 64, 4, "tf32x3"), (16, 32, 2, "tf32x3")]
    for config in (small if padded_rows(used) <= 16 else CONFIGS)[:count]:
        found[json.dumps(config)] = attempt(lambda config=config: timed_alone(config))  # type: ignore[misc]
    with patched("torch"):
        found["torch"] = attempt(timed_alone)
    return found


def best_config(tried: dict[str, Any]) -> Any:
    """The fastest configuration that is accurate; None where none was tried, "torch" where all failed."""
    good = {key: value["ms"] for key, value in tried.items() if isinstance(value, dict) and value["error"] < 1e-4}
    if not good:
        return "torch" if tried else None
    best = min(good, key=good.__getitem__)
    return "torch" if best == "torch" else tuple(json.loads(best))


class patched:
    """Context in which the delta rule runs by a configuration instead of by its default one."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __enter__(self) -> None:
        from decode import delta_ops

        if self.config is not None:
            delta_ops.delta_config = lambda _rows, _shape: None if self.config == "torch" else self.config

    def __exit__(self, *exc_info: object) -> None:
        from decode import delta_ops

        delta_ops.delta_config = delta_config


def floor_ms(model: Any, target: HybridTarget, rows: int, context: int, rates: dict[str, float]) -> dict[str, float]:
    """Bytes over bandwidth and operations over the matrix rate of one pass; rows are not padded."""
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - target.embedding.numel()
    attention = len(target.caches) * target.heads.dim
    moved = 2 * matrices + 4 * attention * target.heads.num_kv * context + 4 * target.states.numel()
    shape = target.shape
    solved = shape.heads * rows * (4 * shape.key * shape.value + 2 * rows * (2 * shape.key + 2 * shape.value))
    operations = 2 * rows * matrices + 4 * rows * attention * target.heads.num_queries * (context + rows)
    operations += len(target.states) * solved
    return {
        "bytes": round(moved / rates["copy_tb_s"] / 1e9, 3),
        "operations": round(operations / rates["matrix_tflop_s"] / 1e9, 3),
    }


def memory_table(budgets: list[int]) -> dict[str, Any]:
    """MiB for verifying a tree, all linear layers: a state per node (float32, bfloat16) against what we keep a row."""
    table: dict[str, Any] = {}
    for name, (layers, shape) in MEMORY_SHAPES.items():
        state = shape.heads * shape.key * shape.value
        # Convolution inputs and gates in bfloat16; keys, updates and summed decays in float32.
        row = 2 * shape.width + 4 * (shape.key_heads * shape.key + shape.heads * shape.value + shape.heads)
        table[name] = {"one_state_float32": mib(layers * state * 4)} | {
            str(budget): {
                "state_per_node_float32": mib(layers * (budget + 1) * state * 4),
                "state_per_node_bfloat16": mib(layers * (budget + 1) * state * 2),
                "ours": mib(layers * (budget + 1) * row),
            }
            for budget in budgets
        }
    return table


def attempt(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or the error's first line: a failure must not stop the measurement."""
    try:
        return work()
    except (RuntimeError, KitError, ValueError, TypeError, AttributeError, ImportError) as error:
        with contextlib.suppress(RuntimeError):
            now_s()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    except Exception as error:  # Triton's compiler raises errors of its own kinds
        return f"{type(error).__name__}: {str(error)[:300]}"


def attempt_all(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = attempt(work)
    return found if isinstance(found, dict) else {"state_per_node_ms": found}


def eager_ms(work: Callable[[], Any], repetitions: int) -> float:
    """Median of the wall-clock time of a run, after two to warm up."""
    times = []
    for i in range(repetitions + 2):
        begin_s = now_s()
        work()
        if i >= 2:
            times.append(1e3 * (now_s() - begin_s))
    return round(statistics.median(times), 4)


def graph_ms(work: Callable[[], Any]) -> float | None:
    """Median device time of the work as a CUDA graph; None without a GPU."""
    if not ON_GPU:
        return None
    graph = capture(work)  # type: ignore[arg-type]
    return round(time_ms(graph.replay), 4)


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


def mib(number: float) -> float:
    return round(number / 2**20, 1)


def has_fla() -> bool:
    import importlib.util

    return importlib.util.find_spec("fla") is not None


def now_s() -> float:
    """Seconds, once the device is idle."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
