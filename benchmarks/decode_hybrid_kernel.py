"""Where a linear layer's milliseconds go in tree verification: each stage, and the delta rule in one kernel and in two.

    python benchmarks/decode_hybrid_kernel.py --shape 27b

Layers of a hybrid's shape with random weights and states, as many as keep weights and states from staying in the cache
(``--layers``). For every budget, milliseconds a layer of each stage (a CUDA graph of all layers, over their number):
``input_norm``, ``input_product``, ``convolution``, ``delta_products`` and ``delta_solve`` (the two kernels of the delta
rule) with ``delta_two_kernels`` (both), ``delta_one_kernel`` (the form before), ``gated_norm``, ``output_product``, and the
feed-forward part; ``head`` is the product with the vocabulary, once a pass. ``layer_two_kernels`` and ``layer_one_kernel``
are all stages one after another. Budget 0 is the single row of an autoregressive step; ``over_one_row`` is what a
verification takes above it in a whole pass, by stage (attention layers' own parts are not in it). Errors
are the updates' against float64. ``counts`` says what both forms have to do (`hybrid_counts.py`). Other configurations of
the two kernels come last, while there is time (``--limit_s``).

Without a GPU, wall-clock times of the torch references (``--shape tiny``), or with TRITON_INTERPRET=1 of interpreted
kernels, which say nothing of speed: a dry run. What fails is reported in place of its number. The last line of the output
is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from hybrid_configs import try_configs  # noqa: E402
from hybrid_counts import counts  # noqa: E402
from hybrid_shapes import SHAPES, drawn_rows, exact_updates, make_tree  # noqa: E402
from measuring import ON_GPU, Report, attempt, eager_ms, graph_ms, numbers  # noqa: E402
from torch import Tensor  # noqa: E402

from decode.delta_ops import delta_inputs, gated_norm  # noqa: E402
from decode.delta_rule import DeltaShape, delta_config, tree_delta, tree_products, tree_solve  # noqa: E402
from decode.fused_ops import add_norm, linear, preferred_library, swiglu, uses_kernels  # noqa: E402
from decode.fused_target import padded_rows  # noqa: E402
from decode.hybrid_target import convolution_columns  # noqa: E402
from dflash_kit.provenance import git_commit, package_versions  # noqa: E402

Stage = Callable[[int], object]
EPS = 1e-6
KERNEL = 4
SEARCH_S = 15.0
"""Time that another configuration must leave."""


class Layers:
    """Linear layers of a shape with random weights, and the buffers of a pass over a tree of ``budget`` nodes."""

    def __init__(self, sizes: dict[str, Any], num_layers: int) -> None:
        self.hidden, self.num_layers = sizes["hidden_size"], num_layers
        self.shape = DeltaShape(
            sizes["linear_num_key_heads"], sizes["linear_num_value_heads"], sizes["linear_key_head_dim"],
            sizes["linear_value_head_dim"], KERNEL,
        )  # fmt: skip
        device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
        self.like = torch.zeros(1, dtype=dtype, device=device)
        shape, inner = self.shape, sizes["intermediate_size"]
        self.projection, self.out = (
            self.draw(shape.width, self.hidden),
            self.draw(self.hidden, shape.heads * shape.value),
        )
        self.gate_up, self.down = self.draw(2 * inner, self.hidden), self.draw(self.hidden, inner)
        self.conv, self.gain = self.draw(shape.channels, KERNEL), self.draw(self.hidden)
        self.head_gain = self.draw(shape.value)
        self.head = self.like.new_empty(sizes["vocab_size"], self.hidden).normal_(std=self.hidden**-0.5)
        self.a_log, self.dt_bias = (torch.rand(shape.heads, dtype=torch.float32, device=device) for _ in range(2))
        size = (num_layers, shape.heads, shape.key, shape.value)
        self.states = torch.randn(size, dtype=torch.float32, device=device)
        self.window = torch.randn(KERNEL - 1, shape.channels, dtype=dtype, device=device)

    def draw(self, *size: int) -> Tensor:
        """(L, …) weights; their sums over the last dimension stay near 1."""
        return self.like.new_empty(self.num_layers, *size).normal_(std=size[-1] ** -0.5)

    def take(self, budget: int) -> None:
        """Buffers of a pass."""
        self.rows, self.seen, self.mask = drawn_rows(self.shape, self.num_layers, budget, self.like)
        count = self.count = padded_rows(budget + 1)
        parents = torch.full((count,), -1)
        parents[1 : budget + 1] = make_tree(budget).parents
        self.columns = convolution_columns(parents, KERNEL).int().to(self.like.device)
        self.residual, self.normed, self.delta = (self.like.new_empty(count, self.hidden).normal_() for _ in range(3))
        self.wide = self.like.new_empty(count, self.gate_up.shape[1])
        self.activated = self.like.new_empty(count, self.down.shape[2])
        self.logits = self.like.new_empty(count, self.head.shape[0])
        self.rows.mixed.normal_()

    def delta_stages(self) -> dict[str, Stage]:
        """The delta rule in both forms; of the torch reference, where kernels do not run, there is one."""

        def rule(i: int) -> None:
            tree_delta(self.rows, i, self.states[i], self.mask, self.shape)

        config = delta_config(self.count)
        if config is None or not uses_kernels(self.states):
            return {"delta_torch": rule}
        from hybrid_one_kernel import one_kernel_delta

        def products(i: int) -> None:
            tree_products(self.rows, i, self.states[i], self.mask, self.shape, config)

        return {
            "delta_products": products,
            "delta_solve": lambda i: tree_solve(self.rows, i, self.mask, self.shape, config),
            "delta_two_kernels": rule,
            "delta_one_kernel": lambda i: one_kernel_delta(self.rows, i, self.states[i], self.mask, self.shape),
        }

    def choose(self, _layer: int) -> None:
        """The product that gives logits."""
        linear(self.normed, self.head, None, self.logits)

    def around(self) -> tuple[dict[str, Stage], dict[str, Stage]]:
        """What a layer does before the delta rule and behind it."""
        rows, shape = self.rows, self.shape
        gates = rows.mixed[:, :, shape.channels : shape.channels + shape.heads * shape.value]
        return {
            "input_norm": lambda i: add_norm(self.residual, self.delta, self.gain[i], EPS, self.normed),
            "input_product": lambda i: linear(self.normed, self.projection[i], None, rows.mixed[i]),
            "convolution": lambda i: delta_inputs(
                rows, i, self.window, self.columns, self.conv[i], self.a_log, self.dt_bias, shape
            ),
        }, {
            "gated_norm": lambda i: gated_norm(rows.out, gates[i], self.head_gain[i], EPS, rows.out),
            "output_product": lambda i: linear(rows.out, self.out[i], None, self.delta),
            "post_norm": lambda i: add_norm(self.residual, self.delta, self.gain[i], EPS, self.normed),
            "gate_and_up": lambda i: swiglu(self.normed, self.gate_up[i], self.wide, self.activated),
            "down_product": lambda i: linear(self.activated, self.down[i], None, self.delta),
        }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dense = [name for name, sizes in SHAPES.items() if "intermediate_size" in sizes]
    parser.add_argument("--shape", choices=dense, default="27b")
    parser.add_argument("--budgets", type=numbers, default="0,16,64,256")
    parser.add_argument("--layers", type=int, default=24, help="a layer of 27b holds 0.77 GB of weights")
    parser.add_argument("--repetitions", type=int, default=5, help="without a GPU")
    parser.add_argument("--configs", action=argparse.BooleanOptionalAction, default=True, help="try others at the end")
    parser.add_argument("--limit_s", type=float, default=110.0, help="seconds for the whole; 0: no limit")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    budgets = options.budgets
    report = Report(
        options.limit_s, options.out, benchmark="decode_hybrid_kernel", date=time.strftime("%Y-%m-%d"),
        shape=options.shape, layers=options.layers, weights="random", commit=git_commit(), versions=package_versions(),
        device=torch.cuda.get_device_name() if ON_GPU else "cpu",
    )  # fmt: skip
    layers = Layers(SHAPES[options.shape], options.layers)
    found: dict[str, Any] = {}
    for budget in sorted(budgets, key=lambda budget: (budget != 64, budget)):  # what was asked for first
        report.at(f"budget {budget}")
        layers.take(budget)
        found[str(budget)] = attempt(lambda: measure(layers, options.repetitions))
        report.add(budgets=found)
    report.add(over_one_row=attempt(lambda: over_one_row(found, SHAPES[options.shape]["num_hidden_layers"])))
    if options.configs and ON_GPU:
        for budget in sorted(budgets, key=lambda budget: (budget != 64, budget)):
            report.at(f"configurations: budget {budget}")
            tried = attempt(lambda budget=budget: try_configs(  # type: ignore[misc]
                layers.shape, budget, layers.like, lambda: report.left_s > SEARCH_S
            ))  # fmt: skip
            report.add(**{f"configs_{budget}": tried})
    return report.finish()


def measure(layers: Layers, repetitions: int) -> dict[str, Any]:
    """Milliseconds a layer by stage, both whole layers, errors and counts, of the pass that was taken."""
    before, behind = layers.around()
    forms = layers.delta_stages()
    facts: dict[str, Any] = {"rows": layers.count}
    # First, while the inputs of the delta rule are what was drawn: the convolution makes others.
    facts["error"] = {name: attempt(lambda run=run: error(layers, run)) for name, run in whole(forms).items()}  # type: ignore[misc]
    with preferred_library(layers.count):
        facts["ms"] = {
            name: attempt(lambda stage=stage: ms_a_layer(layers, [stage], repetitions))  # type: ignore[misc]
            for name, stage in (before | forms | behind | {"head": layers.choose}).items()
        }
        for name, run in whole(forms).items():
            steps = [*before.values(), run, *behind.values()]
            facts["ms"][name.replace("delta", "layer")] = attempt(lambda s=steps: ms_a_layer(layers, s, repetitions))  # type: ignore[misc]
    if "delta_one_kernel" in forms:
        from hybrid_one_kernel import one_kernel_config

        config = delta_config(layers.count)
        assert config is not None
        facts["config"] = config
        facts["counts"] = counts(layers.shape, layers.seen.cpu(), layers.count, one_kernel_config(layers.count), config)
    return facts


def over_one_row(found: dict[str, Any], num_layers: int) -> dict[str, dict[str, float]]:
    """Milliseconds by stage that a pass of each budget takes above the pass of one row; three layers in four are linear."""
    one = found.get("0", {}).get("ms", {})
    times = dict.fromkeys(("input_norm", "post_norm", "gate_and_up", "down_product"), num_layers) | {"head": 1}
    return {
        budget: {
            name: round((ms - one[name]) * times.get(name, num_layers * 3 // 4), 3)
            for name, ms in entry["ms"].items()
            if isinstance(ms, float) and isinstance(one.get(name), float)
        }
        for budget, entry in found.items()
        if budget != "0" and isinstance(entry, dict)
    }


def whole(forms: dict[str, Stage]) -> dict[str, Stage]:
    """Forms that are the whole delta rule."""
    return {name: stage for name, stage in forms.items() if name not in ("delta_products", "delta_solve")}


def ms_a_layer(layers: Layers, stages: list[Stage], repetitions: int) -> float:
    """Of these stages, one layer after another."""

    def work() -> None:
        for i in range(layers.num_layers):
            for stage in stages:
                stage(i)

    taken = graph_ms(work) if ON_GPU else eager_ms(work, repetitions)
    assert taken is not None
    return round(taken / layers.num_layers, 5)


def error(layers: Layers, rule: Stage) -> float:
    """Of the first layer's updates, relative, against float64."""
    exact = exact_updates(layers.rows, 0, layers.states[0], layers.seen)
    layers.rows.updates.fill_(float("nan"))
    rule(0)
    return float((layers.rows.updates[0, : len(exact)] - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
