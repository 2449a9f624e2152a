"""Tree verification on a hybrid target: milliseconds a pass by budget, beside one autoregressive step and the floor.

    python benchmarks/decode_hybrid.py --shape 27b

Random weights of a hybrid's shape, made on the GPU; one prompt, batch 1. First the portable engine (`portable`: a
verification and an autoregressive step on transformers' modules), then the fused one (`fused`). A fused pass is timed as
a CUDA graph and without one (``graph``, ``eager``); ``commit`` brings the states to a leaf. An autoregressive step is the
same pass over one row with its commit, and transformers' own step beside it. ``state_per_node`` is the fused pass with the
delta rule done the other way: one kernel that walks the nodes in order and writes a recurrent state for each of them, in
all layers. Last, other configurations of the delta rule's kernel. The floor is the larger of bytes over copy bandwidth and
operations over the matrix rate, both measured in the same run.

``memory_mib`` is counted over the tensors of a pass without making them; ``pass_peak_mib`` is what the allocator saw while a
pass was timed, logits and all. Of a mixture of experts (``--shape 35b-a3b``) the floor takes the experts that rows are
expected to choose, see ``floor_ms``.

With ``--rounds`` none of that, but whole rounds with a random drafter of the recipe's shape: autoregressive, chain and
trees, by stage (draft, build, verify, commit), and how much longer than an autoregressive and a chain's round each takes.

What fails is reported in place of its number. A shape that does not fit gives way to 9b. After ``--limit_s`` seconds the
report is printed as far as it has come (exit status 3). Without a GPU the torch references run, ``--shape tiny`` in
seconds. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from decode_round import ceilings  # noqa: E402
from hybrid_configs import best_config, try_configs, using  # noqa: E402
from hybrid_rounds import measure_rounds  # noqa: E402
from hybrid_shapes import SHAPES, floor_ms, linear_shape, make_model, make_tree, memory_table  # noqa: E402
from hybrid_state_per_node import time_state_per_node  # noqa: E402
from measuring import (  # noqa: E402
    ON_GPU,
    Report,
    allocated,
    attempt,
    eager_ms,
    graph_ms,
    mib,
    most_allocated,
    now_s,
    numbers,
)
from prompt_kernels import reads_prompts, use_choices  # noqa: E402
from torch import Tensor  # noqa: E402

from decode import hybrid_target  # noqa: E402, F401
from decode.fused_target import padded_rows  # noqa: E402
from decode.hybrid_target import HybridPass, HybridTarget  # noqa: E402
from decode.target_runner import TargetRunner  # noqa: E402
from dflash_kit.provenance import git_commit, package_versions  # noqa: E402
from dflash_kit.target import decoder_layers, tap_layer_ids  # noqa: E402
from dflash_kit.tree import ancestor_mask  # noqa: E402

NUM_TAPS = 5
FALL_BACK = "9b"
SEARCH_S = 45.0
"""Time that a search over configurations must leave to what comes behind it."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--context", type=int, default=512, help="committed tokens before the pass")
    parser.add_argument("--budgets", type=numbers, default="16,64,256")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--rounds", action="store_true", help="whole rounds with a drafter, and nothing else")
    parser.add_argument(
        "--search", action=argparse.BooleanOptionalAction, default=True, help="try kernel configurations"
    )
    parser.add_argument(
        "--tune_prompts",
        action="store_true",
        help="let flash-linear-attention try 59 configurations at the first prompt",
    )
    parser.add_argument("--limit_s", type=float, default=540.0, help="seconds for the whole; 0: no limit")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    budgets = options.budgets
    if not options.tune_prompts:
        use_choices(Path(tempfile.gettempdir()) / "dflash-prompt-kernels")
    report = Report(
        options.limit_s, options.out, benchmark="decode_hybrid", date=time.strftime("%Y-%m-%d"), context=options.context,
        batch=1, weights="random", device=torch.cuda.get_device_name() if ON_GPU else "cpu", versions=package_versions(),
        flash_linear_attention=ON_GPU and reads_prompts(), tuned_prompts=options.tune_prompts, commit=git_commit(), memory_mib=memory_table(budgets),
    )  # fmt: skip
    rates = attempt(ceilings) if ON_GPU else None
    if ON_GPU:
        torch.cuda.empty_cache()
    begin_s = now_s()
    model = make(options.shape, report)
    dtype, num_bytes = model.dtype, sum(p.numel() * p.element_size() for p in model.parameters())
    report.add(
        ceilings=rates, dtype=str(dtype).removeprefix("torch."), weights_gb=round(num_bytes / 1e9, 2),
        made_s=round(now_s() - begin_s, 1),
    )  # fmt: skip
    if isinstance(rates, dict):
        linear = linear_shape(model)
        report.add(floor_ms={str(b): floor_ms(model, linear, b + 1, options.context, rates) for b in (0, *budgets)})
    prompt = torch.randint(1, 400, (options.context,), device=model.device)
    if options.rounds:
        known = rates if isinstance(rates, dict) else None
        found = attempt(lambda: measure_rounds(model, prompt, budgets, known, report))
        return report.finish(**found if isinstance(found, dict) else {"rounds_error": found})
    report.at("transformers")
    report.add(transformers_step_ms=attempt(lambda: transformers_step_ms(model, prompt, options.repetitions)))
    report.at("portable")
    report.add(portable=attempt(lambda: measure_portable(model, prompt, budgets, options.repetitions)))
    report.at("fused")
    found = attempt(lambda: measure_fused(model, prompt, budgets, options, report))
    return report.finish(**found if isinstance(found, dict) else {"fused_error": found})


def make(name: str, report: Report) -> Any:
    """The model, or a smaller one where it does not fit."""
    report.at(f"making {name}")
    model = attempt(lambda: make_model(SHAPES[name]))
    if isinstance(model, str):
        report.add(does_not_fit={name: model})
        name = FALL_BACK
        model = make_model(SHAPES[name])
    report.add(shape=name)
    return model


def transformers_step_ms(model: Any, prompt: Tensor, repetitions: int) -> float:
    """One autoregressive step of transformers' own forward pass and cache, as it comes."""
    held = model(prompt[None], use_cache=True, logits_to_keep=1)
    cache = getattr(held, "past_key_values", None) or held.cache
    name = "past_key_values" if hasattr(held, "past_key_values") else "cache"
    token = prompt[None, :1]
    return eager_ms(lambda: model(token, use_cache=True, **{name: cache}), min(repetitions, 10))


def measure_portable(model: Any, prompt: Tensor, budgets: list[int], repetitions: int) -> dict[str, Any]:
    """Passes of the portable engine's target, and leave the model as it was."""
    try:
        runner = TargetRunner(model, tap_layer_ids(model.config.num_hidden_layers, NUM_TAPS))
        runner.reserve(len(prompt) + max(budgets) + repetitions + 8)
        begin_s = now_s()
        runner.prefill(prompt)
        found: dict[str, Any] = {"prefill_s": round(now_s() - begin_s, 3)}

        def step() -> None:
            runner.verify(7, make_tree(0))
            runner.commit([0])

        found["step_ms"] = attempt(lambda: eager_ms(step, repetitions))
        runner.rewind(len(prompt))
        for budget in budgets:
            tree = make_tree(budget)
            found[str(budget)] = attempt(lambda tree=tree: eager_ms(lambda: runner.verify(7, tree), repetitions))  # type: ignore[misc]
        return found
    finally:
        for layer in decoder_layers(model):
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.__dict__.pop("forward", None)


def measure_fused(
    model: Any, prompt: Tensor, budgets: list[int], options: argparse.Namespace, report: Report
) -> dict[str, Any]:
    """Everything that the fused hybrid target does; figures go to the report as they come."""
    rows = padded_rows(max(budgets) + 1)
    target = HybridTarget(model, tap_layer_ids(model.config.num_hidden_layers, NUM_TAPS), options.context + 600, rows)
    begin_s = now_s()
    target.prefill(prompt)
    first_s = now_s() - begin_s
    begin_s = now_s()
    target.prefill(prompt)
    report.add(
        layers=len(target.mixers), linear_layers=len(target.states), prefill_first_s=round(first_s, 3),
        prefill_s=round(now_s() - begin_s, 3),
    )  # fmt: skip
    report.at("fused: comparison with transformers")
    report.add(relative_error=attempt(lambda: relative_error(target, model, prompt)))
    passes: dict[str, Any] = {}
    for budget in (0, *budgets):
        report.at(f"fused: budget {budget}")
        passes[str(budget)] = attempt(lambda budget=budget: time_pass(target, budget, None, options.repetitions))  # type: ignore[misc]
        report.add(fused=passes)
    if options.search and ON_GPU:
        search(target, budgets, passes, options, report)
    for budget in budgets:
        report.at(f"a state per node: budget {budget}")
        report.add(**{f"state_per_node_{budget}": attempt(lambda budget=budget: per_node(target, budget, options))})  # type: ignore[misc]
        torch.cuda.empty_cache()
    step_ms = best_ms(passes["0"])
    ratios = {name: round(ms / step_ms, 3) for name, entry in passes.items() if step_ms and (ms := best_ms(entry))}
    return {"fused_step_ms": step_ms, "over_one_step": ratios}


def search(
    target: HybridTarget, budgets: list[int], passes: dict[str, Any], options: argparse.Namespace, report: Report
) -> None:
    """Time passes again with the fastest configuration that was found, the budgets around 64 first."""
    for budget in sorted(budgets, key=lambda budget: abs(budget - 64)):
        report.at(f"configurations: budget {budget}")
        if report.left_s < SEARCH_S:
            return
        tried = attempt(
            lambda budget=budget: try_configs(target.shape, budget, target.embedding, lambda: report.left_s > SEARCH_S)
        )  # type: ignore[misc]
        report.add(**{f"configs_{budget}": tried})
        config = best_config(tried)
        if config is not None:
            found = attempt(lambda budget=budget, config=config: time_pass(target, budget, config, options.repetitions))  # type: ignore[misc]
            passes[f"{budget}, best configuration"] = found
            report.add(fused=passes)


def per_node(target: HybridTarget, budget: int, options: argparse.Namespace) -> dict[str, Any]:
    """See ``time_state_per_node``."""
    step, tree = a_pass(target, budget), make_tree(budget)
    return time_state_per_node(target, step, tree, options.repetitions)


def a_pass(target: HybridTarget, budget: int) -> HybridPass:
    """A pass over a tree of ``budget`` nodes, its tokens set."""
    tree = make_tree(budget)
    step = target.new_pass(padded_rows(len(tree) + 1))
    assert isinstance(step, HybridPass)
    step.tree.tokens[0] = 7
    step.tree.set_nodes(tree.tokens, tree.depths, tree.parents)
    return step


def time_pass(target: HybridTarget, budget: int, config: Any, repetitions: int) -> dict[str, Any]:
    """One pass over a tree of ``budget`` nodes with and without a CUDA graph, and the commit of its last node's path.

    An autoregressive step (budget 0) is the pass with its commit. Committing over and over changes the states and not the
    time; they are put back.
    """
    tree, before = make_tree(budget), allocated()
    most_allocated()  # what was before does not count
    step = a_pass(target, budget)
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
    try:
        with using(config):
            return {
                "rows": step.tree.num_rows, "deepest": int(tree.depths.max()) if budget else 0, "config": config,
                "eager_ms": attempt(lambda: eager_ms(work, repetitions)), "graph_ms": attempt(lambda: graph_ms(work)),
                "commit_ms": attempt(lambda: graph_ms(commit)), "pass_mib": mib(allocated() - before),
                "pass_peak_mib": mib(max(0, most_allocated() - before)),
            }  # fmt: skip
    finally:
        for tensor, kept in held:
            tensor.copy_(kept)


def best_ms(entry: Any) -> float | None:
    """Milliseconds of a pass, in a CUDA graph or without one."""
    if not isinstance(entry, dict):
        return None
    return min((entry[kind] for kind in ("graph_ms", "eager_ms") if isinstance(entry[kind], float)), default=None)


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


if __name__ == "__main__":
    main()
