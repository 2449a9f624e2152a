"""Tree verification on a hybrid target: milliseconds a pass by budget, beside one autoregressive step.

Random weights of a hybrid's shape, one prompt, the portable engine's target runner. Each pass is timed twice: as the
engine runs it (``eager``: launches and host work included), and as a CUDA graph of the same work at that length
(``graph``: what the kernels take; GPUs only). ``state_per_node`` is the linear layers' delta rule the other way: a
recurrent state for every node, filled level by level, as released engines do it. Prints one JSON line.

    python benchmarks/decode_hybrid.py --shape 27b
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from decode.gated_delta import delta_rule_on_paths, on_path  # noqa: E402
from decode.target_runner import TargetRunner  # noqa: E402
from dflash_kit.provenance import git_commit, package_versions  # noqa: E402
from dflash_kit.tree import Tree, ancestor_mask, build_tree, empty_tree, positions  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "27b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
    "9b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 500,
    },
}
BANDWIDTH_TB_S = 4.2
"""Copy rate of an H200; the floor of a pass is its weights over this."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--budgets", default="16,64,256")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    model = make_model(SHAPES[options.shape], on_gpu)
    runner = TargetRunner(model, [1])
    runner.reserve(options.context + 300)
    prompt = torch.randint(1, 400, (options.context,), device=runner.device)
    t0 = now_s()
    runner.prefill(prompt)
    prefill_s = now_s() - t0
    passes = {}
    for budget in [0, *map(int, options.budgets.split(","))]:
        tree = make_tree(budget)
        passes[str(budget)] = {
            "rows": len(tree.tokens) + 1,
            "eager_ms": spread(lambda tree=tree: runner.verify(7, tree), options.repetitions),
            "graph_ms": graph_ms(device_pass(runner, tree), options.repetitions) if on_gpu else None,
            **delta_rules(runner, tree, options.repetitions),
        }
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    base = passes["0"]
    print(
        json.dumps(
            {
                "benchmark": "decode_hybrid",
                "shape": options.shape,
                "context": options.context,
                "layers": model.config.num_hidden_layers,
                "linear_layers": len(runner._delta.layers),
                "weights_gb": round(weights / 1e9, 2),
                "floor_ms": round(weights / BANDWIDTH_TB_S / 1e9, 2),
                "prefill_s": round(prefill_s, 3),
                "passes": passes,
                "over_one_step": {
                    budget: {
                        kind: round(entry[kind]["median"] / base[kind]["median"], 3)
                        for kind in ("eager_ms", "graph_ms")
                        if entry[kind]
                    }
                    for budget, entry in passes.items()
                },
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "versions": package_versions(),
                "commit": git_commit(),
            }
        )
    )


def make_model(shape: dict[str, Any], on_gpu: bool) -> Any:
    """A Qwen3.5 text model with random weights, three linear layers in four."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    layer_types = (kinds * shape["num_hidden_layers"])[: shape["num_hidden_layers"]]
    config = AutoConfig.for_model("qwen3_5_text", **shape, layer_types=layer_types, tie_word_embeddings=False)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def make_tree(budget: int, depth: int = 15) -> Tree:
    """A tree of ``budget`` nodes over draft distributions with a Zipf-like head."""
    if budget == 0:
        return empty_tree()
    logits = -1.5 * torch.log1p(torch.arange(400.0)).expand(depth, 400)
    return build_tree(logits + 0.1 * torch.randn(depth, 400, generator=torch.Generator().manual_seed(0)), budget)


def device_pass(runner: TargetRunner, tree: Tree) -> Callable[[], Any]:
    """``TargetRunner.verify`` with its inputs on the device already, so that a graph can hold it."""
    runner.verify(7, tree)  # the linear layers now expect this tree
    rows = torch.cat([tree.tokens.new_tensor([7]), tree.tokens]).to(runner.device)
    row_positions = positions(tree, runner.num_committed).to(runner.device)
    visible = ancestor_mask(tree.parents).to(runner.device)

    @torch.no_grad()
    def work() -> Any:
        return runner._forward(rows, row_positions, visible, last_only=False)

    return work


def delta_rules(runner: TargetRunner, tree: Tree, repetitions: int) -> dict[str, Any]:
    """The delta rule of one layer, both ways, and the memory that each way holds for all layers."""
    layer = runner._delta.layers[0]
    heads, key, value = layer.state_HKV.shape
    rows = len(tree.tokens) + 1
    generator = torch.Generator(device=runner.device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=runner.device, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(rows, heads, key), dim=-1) for _ in range(2))
    v, g, beta = draw(rows, heads, value), -draw(rows, heads).abs(), draw(rows, heads).sigmoid()
    parents = torch.cat([tree.parents.new_tensor([-1]), tree.parents]).to(runner.device)
    paths = on_path(parents)
    levels = level_rows(parents)
    inputs = (q, k, v, g, beta, layer.state_HKV)
    error = (one_pass(inputs, paths) - state_per_node(inputs, parents, levels)).norm() / v.norm()
    assert error < 1e-4, f"the two ways differ by {float(error)}"
    num_layers = len(runner._delta.layers)
    return {
        "one_pass_ms_per_layer": spread(lambda: one_pass(inputs, paths), repetitions),
        "state_per_node_ms_per_layer": spread(lambda: state_per_node(inputs, parents, levels), repetitions),
        "one_pass_mb": round(num_layers * rows * heads * (key + value + rows) * 4 / 1e6, 1),
        "state_per_node_mb": round(num_layers * rows * heads * key * value * 4 / 1e6, 1),
    }


def one_pass(inputs: tuple[Tensor, ...], paths: Tensor) -> Tensor:
    """Ours: outputs of all nodes by one triangular solve."""
    return delta_rule_on_paths(*inputs, paths)[0]  # type: ignore[misc, arg-type]


def state_per_node(inputs: tuple[Tensor, ...], parents: Tensor, levels: list[Tensor]) -> Tensor:
    """The other way: every node's own state, from its parent's, level by level."""
    q, k, v, g, beta, state = inputs
    states = state.new_empty(len(parents) + 1, *state.shape)
    states[0] = state
    outputs = torch.empty_like(v)
    for rows in levels:
        held = states[parents[rows] + 1] * g[rows].exp()[..., None, None]
        update = beta[rows][..., None] * (v[rows] - torch.einsum("nhkv,nhk->nhv", held, k[rows]))
        held = held + k[rows][..., None] * update[..., None, :]
        states[rows + 1] = held
        outputs[rows] = torch.einsum("nhkv,nhk->nhv", held, q[rows])
    return outputs


def level_rows(parents: Tensor) -> list[Tensor]:
    """Rows by depth, the root's first."""
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    found = torch.tensor(depths, device=parents.device)
    return [(found == depth).nonzero().flatten() for depth in range(max(depths) + 1)]


def now_s() -> float:
    """Seconds, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def spread(work: Callable[[], Any], repetitions: int) -> dict[str, float]:
    """Milliseconds: median, lowest and highest, after three runs to warm up."""
    times = []
    for i in range(repetitions + 3):
        t0 = now_s()
        work()
        if i >= 3:
            times.append(1e3 * (now_s() - t0))
    return {name: round(f(times), 3) for name, f in (("median", statistics.median), ("low", min), ("high", max))}


def graph_ms(work: Callable[[], Any], repetitions: int) -> dict[str, float] | None:
    """The same work as a CUDA graph; None where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        print(f"not captured: {error}", file=sys.stderr)
        return None
    return spread(graph.replay, repetitions)


if __name__ == "__main__":
    main()
