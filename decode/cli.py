"""The evaluation command: ``python decode/eval.py`` or ``dflash-eval``."""

import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from dflash_kit.acceptance import AR, DDTREE_AUTO
from dflash_kit.checkpoint import read_provenance
from dflash_kit.config import parse_config
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError, require_free_bytes
from dflash_kit.provenance import collect_provenance
from dflash_kit.publish import check_publication, plan_publication, push
from dflash_kit.target_ends import TargetEnds

from .announce import announce, open_report
from .auto_report import read_costs
from .checkpoints import find_checkpoints
from .compare import compare
from .decoding import decode_live
from .doctor import run_doctor
from .illustrate import draw_replayed, illustrations
from .inputs import Inputs, read_inputs
from .kept import kept
from .other_engines import OTHER_ENGINES, engine_label, possible_methods
from .progress import EvaluationProgress
from .replay import benchmark_name, open_matching_shards, replay_shards
from .report import REPORT_NAME, build_report, print_report, write_report
from .results import PromptResult, ResultStore
from .settings import EvalConfig, choose_device
from .trained_rows import TrainedRows
from .verdict import judge
from .watch import watch_run

__all__ = ["EvalConfig", "main"]

DESCRIPTION = "Measure a drafter: live decoding of benchmark prompts, or replay from shards."
EXPECTED_BYTES = 64 << 20
"""Room that a report may take, asked for before anything is decoded."""


def main(argv: list[str] | None = None) -> int:
    """Parse, then evaluate one checkpoint, several, or those of a running training."""
    config = parse_config("eval", EvalConfig, argv, description=DESCRIPTION)
    device, dtype = choose_device(config)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)

    def run(one: EvalConfig, shown: str) -> int:
        return evaluate(one, shown, device, dtype, argv)

    if config.watch is not None:
        return watch_run(config, run)
    checkpoints = find_checkpoints(config.ckpt)
    if len(checkpoints) > 1:
        return compare(config, checkpoints, run)
    found = checkpoints[0]
    return run(replace(config, ckpt=str(found.folder), out=str(config.out_folder)), found.given)


def evaluate(config: EvalConfig, shown: str, device: str, dtype: str, argv: list[str] | None) -> int:
    """Check, decode or replay, report; 1 when greedy decoding was not the target's own.

    Args:
        config: what to do; its checkpoint is a folder.
        shown: what the report calls the checkpoint.
        device: name of the device.
        dtype: that is computed in.
        argv: command line, for the report.
    """
    inputs = read_inputs(config, shown)
    if config.push_to_hub is not None:
        check_publication(config.ckpt, config.push_to_hub, config.base_model)
    for text in inputs.warnings:
        print(f"warning: {text}", file=sys.stderr)
    if config.doctor:
        return run_doctor(config, inputs, device, dtype, argv)
    methods = config.decoding_methods(inputs.drafter_config.num_draft_tokens)
    if config.engine in OTHER_ENGINES:
        methods = possible_methods(config, inputs, methods, device)
    if config.replay is not None:
        methods = [method for method in methods if method[0] != "ar"]
        if not methods:
            raise KitError("replay measures drafting: methods needs chain or ddtree")
    with closing(ResultStore(config.out_folder, _settings(config, inputs, device, dtype))) as store:
        require_free_bytes(config.out_folder, EXPECTED_BYTES, "the report")
        run = _replay if config.replay is not None else decode_live
        results = run(config, inputs, store, methods, device, dtype)
        return 0 if results is None else _report(config, inputs, results, methods, device, dtype, argv)


def _report(
    config: EvalConfig,
    inputs: Inputs,
    results: list[PromptResult],
    methods: list[tuple[str, int]],
    device: str,
    dtype: str,
    argv: list[str] | None,
) -> int:
    """Write and print the report, judge it, publish the checkpoint if asked; the exit status."""
    facts = _facts(config, inputs, device, dtype, argv)
    temperature = config.temperature
    if config.replay is not None:
        shards = open_matching_shards(config, inputs.spec, inputs.drafter_config)
        temperature = float(shards.header.sampling.get("temperature", 0.0))
        TrainedRows.of(read_provenance(config.ckpt), shards).add_to(facts, results, config.replay)
    report = build_report(
        results,
        methods=methods,
        num_draft_tokens=inputs.drafter_config.num_draft_tokens,
        temperature=temperature,
        facts=facts,
    )
    if any(name == DDTREE_AUTO for name, _ in methods):
        report["auto_costs"] = read_costs(config.out_folder)
    report |= illustrations(config, inputs, results, report)
    try:
        write_report(config.out_folder, report)
    except OSError as error:
        raise KitError(f"report in {config.out_folder} cannot be written: {error}; mend that and run again") from error
    print_report(report)
    print(f"report: {config.out_folder / REPORT_NAME} and report.html, .csv and .tex beside it")
    is_compared = config.replay is None and config.temperature == 0 and AR in config.method_names
    status = judge(results, dtype) if is_compared else 0
    if status == 0 and config.push_to_hub is not None:
        _publish(config, report)
    return status


Results = list[PromptResult] | None


def _replay(
    config: EvalConfig, inputs: Inputs, store: ResultStore, methods: list[tuple[str, int]], device: str, dtype: str
) -> Results:
    """Replay from shards; None after a dry run."""
    shards = open_matching_shards(config, inputs.spec, inputs.drafter_config)
    num_rows = len(shards) if config.limit is None else min(config.limit, len(shards))
    done = len(store.results)
    announce(config, inputs, methods, device, dtype)
    print(f"rows         {num_rows} of {config.replay}; {done} done before")
    print("replay reads responses from the shards: benchmarks, sampling, seed and enable_thinking do not apply")
    trained = TrainedRows.of(read_provenance(config.ckpt), shards)
    if described := trained.describe(shards.ids):
        print(f"trained on   {described} rows", flush=True)
    if warning := trained.warning(shards.ids, str(config.replay)):
        print(f"warning: {warning}", file=sys.stderr)
    if config.dry_run:
        return None
    torch_dtype = getattr(torch, dtype)
    drafter = Drafter.from_pretrained(config.ckpt, dtype=torch_dtype, device=device)
    ends = kept(
        TargetEnds.from_pretrained,
        inputs.target,
        dtype=torch_dtype,
        device=device,
        revision=config.target_revision,
    )
    open_report(config, store)
    with EvaluationProgress(num_rows, done) as progress:

        def on_row(result: PromptResult) -> None:
            for response in result.responses:
                progress.add_response(response.method, response.log)
            progress.finish_prompt(f"{benchmark_name(config)} {result.prompt_id[:12]}")

        left_out = replay_shards(config, drafter, ends, shards, inputs.spec, store, on_row)
    draw_replayed(config, inputs, drafter, ends, shards, store.results)
    if left_out:
        print(f"{left_out} rows were left out: their responses were given, not generated by the target")
    return store.results


def _publish(config: EvalConfig, report: dict[str, Any]) -> None:
    """Push the checkpoint with a card of these results, or list what would be pushed."""
    publication = plan_publication(config.ckpt, str(config.push_to_hub), report, base_model=config.base_model)
    for line in publication.lines():
        print(line)
    if config.push_dry_run:
        card = config.out_folder / "model_card.md"
        card.write_text(publication.card, encoding="utf-8")
        print(f"nothing was pushed; the card is {card}")
    else:
        print(f"pushed: {push(publication)}")


def _settings(config: EvalConfig, inputs: Inputs, device: str, dtype: str) -> dict[str, Any]:
    """All that decides the results: a resumed run must share it."""
    values = config.result_settings() | {
        "checkpoint_hash": inputs.checkpoint_hash,
        "target_config_hash": inputs.spec.config_hash,
        "tokenizer_hash": inputs.spec.tokenizer_hash,
        "template_hash": inputs.spec.template_hash,
        "device": device,
        "dtype": dtype,
        "kind": "live",
    }
    if config.replay is not None:
        for name in ("benchmarks", "temperature", "top_p", "top_k", "seed", "enable_thinking"):
            values.pop(name)
        values["kind"] = benchmark_name(config)
    return values


def _facts(config: EvalConfig, inputs: Inputs, device: str, dtype: str, argv: list[str] | None) -> dict[str, Any]:
    """What stands above the results."""
    provenance = collect_provenance(argv)
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "target": inputs.target,
        "checkpoint": inputs.checkpoint,
        "warnings": list(inputs.warnings),
        "run": {
            "mode": "live decoding" if config.replay is None else f"replay of {config.replay}",
            "engine": engine_label(config) if config.replay is None else None,
            "hardware": hardware,
            "dtype": dtype,
            "batch size": config.batch_size,
            "max_new_tokens": config.max_new_tokens if config.replay is None else None,
            "block size": inputs.drafter_config.block_size,
            "commit": provenance["git_commit"],
            "created (UTC)": provenance["created_utc"],
        },
        "settings": config.result_settings(),
        "provenance": provenance,
    }
