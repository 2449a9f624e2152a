"""Command of the first stage: prompts in, shards out. Builds the plan, runs an engine, and says what was done."""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash_kit.config import parse_config, save_config
from dflash_kit.errors import KitError, require_free_bytes
from dflash_kit.interrupts import sigterm_interrupts
from dflash_kit.shard_folder import inspect_folder
from dflash_kit.shards import ShardsHeader, ShardWriter, open_shards
from dflash_kit.target import TargetSpec, load_tokenizer, tap_layer_ids

from . import hf_capture, spool, vllm_capture
from .capture import Capture, Job
from .launcher import launch
from .parity import settle_parity
from .plan import Limits, Plan, make_plan
from .prompts import LineErrors, read_prompts
from .screen import Screen
from .settings import ExtractConfig
from .show import show_samples
from .spool import over_epochs
from .verify import print_report, verify_shards

__all__ = ["ExtractConfig", "main"]

CONFIG_NAME = "extract.yaml"
CAPTURES: dict[str, Capture] = {"vllm": vllm_capture.capture, "transformers": hf_capture.capture}
ENGINE_VERSIONS = {"vllm": vllm_capture.engine_version, "transformers": hf_capture.engine_version}


def main(argv: list[str] | None = None, screen: Screen | None = None) -> int:
    """Run the stage; the last line of stdout is one JSON object.

    Args:
        argv: the command line; None reads ``sys.argv``.
        screen: what hears of the work; None: the person at the terminal.
    """
    arguments = sys.argv[1:] if argv is None else argv
    config = parse_config("extract", ExtractConfig, arguments, description="Answer prompts and write hidden states.")
    with sigterm_interrupts():
        if config.num_workers > 1 and not config.dry_run and config.show is None:
            extract_by_workers(config, arguments)
        else:
            extract(config, screen or Screen())
    return 0


def extract(config: ExtractConfig, screen: Screen) -> None:
    """Extract in this process."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    header = make_header(config, spec)
    if config.show is not None:
        show(config, spec, header)
        return
    folder, share = Path(config.out), config.shares[0]
    found = inspect_folder(folder, header, share)
    spool.require_same_use(config, found)
    done_ids = {row_id for entry in found.shards for row_id in entry.ids}
    plan = build_plan(config, spec, header, done_ids)
    if config.dry_run:
        screen.plan(plan, header, folder)
        print(json.dumps({**plan.summary(), "to_do": len(plan.samples), "max_bytes": plan.max_bytes(header)}))
        return
    spool.room_of(config, plan, header)  # refused before anything is written
    # Opening the writer mends what a killed run left, and takes its rows over.
    with ShardWriter(folder, header, **asdict(share)) as writer:
        plan.take_done(writer.done_ids)
    for note in writer.notes:
        print(f"note: {note}", file=sys.stderr)
    if share.rank == 0:
        save_config(config, folder / CONFIG_NAME)
    screen.plan(plan, header, folder)
    with spool.at_work(config, folder):
        spool.begin(config, plan, folder, share)
        totals = run(config, spec, header, plan, screen)
        if config.parity and share.rank == 0 and (totals["rows_added"] or not found.has_parity):
            check_parity(config, spec, plan, screen)
        if config.spool_bytes:
            spool.end(folder, share)
    if config.verify:
        print_report(verify_shards(folder, None if config.is_whole else share))
    screen.done({"out": str(folder), **plan.summary(), **totals})


def check_parity(config: ExtractConfig, spec: TargetSpec, plan: Plan, screen: Screen) -> None:
    """Compare some rows with transformers and say how they did.

    A run that was ended before its check, and is started again with nothing left to add, is checked now.
    """
    folder, share = Path(config.out), config.shares[0]
    kept = folder / spool.kept_name(share) if config.spool_bytes else None
    if kept is None:
        ids = ([sample.id for sample in plan.samples] or open_shards(folder).ids)[: config.parity]
    else:
        ids = spool.kept_ids(kept, config.parity) if kept.exists() else []
    if ids:
        screen.say(str(settle_parity(folder, share.manifest_name, ids, revision=spec.revision, kept=kept)))
    if kept is not None:
        kept.unlink(missing_ok=True)


def extract_by_workers(config: ExtractConfig, arguments: list[str]) -> None:
    """Extract in several processes on this host."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    header, folder = make_header(config, spec), Path(config.out)
    inspect_folder(folder, header, config.shares[0])  # one error instead of one from each process
    gpus_each = config.tensor_parallel_size if config.engine == "vllm" else 1
    result = launch(config.shares, arguments, folder, gpus_each=gpus_each)
    if "errors" in result:
        print(json.dumps(result), flush=True)
        raise KitError("; ".join(f"rank {ranks}: {error}" for ranks, error in result["errors"].items()))
    if result["rows"] == 0 and config.is_whole:
        raise KitError(
            f"nothing to extract: {result['dropped']} of {result['asked']} lines of {config.prompts} dropped"
        )
    if config.shares[0].rank == 0:
        save_config(config, folder / CONFIG_NAME)
    if config.verify:
        for share in [None] if config.is_whole else config.shares:
            print_report(verify_shards(folder, share))
    Screen().done(result)


def make_header(config: ExtractConfig, spec: TargetSpec) -> ShardsHeader:
    """What the shards of this run will be."""
    layer_ids = config.target_layer_ids or tap_layer_ids(spec.num_layers, config.num_taps)
    if layer_ids[-1] >= spec.num_layers or layer_ids[0] < 0:
        raise KitError(f"target_layer_ids {layer_ids} are outside of the target's layers 0..{spec.num_layers - 1}")
    auto_dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return ShardsHeader.from_target(
        spec,
        target_layer_ids=layer_ids,
        dtype=config.storage,
        compute_dtype=auto_dtype if config.dtype == "auto" else config.dtype,
        engine=config.engine,
        # Samples can be shown where no engine is installed.
        engine_version=ENGINE_VERSIONS[config.engine]() if config.show is None else "",
        sampling={**asdict(config.sampling), "template_args": {"enable_thinking": config.enable_thinking}},
    )


def build_plan(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader, done_ids: set[str]) -> Plan:
    """Read and tokenize the prompts; refuse what cannot be done."""
    errors = LineErrors(skip=config.skip_errors)
    shares = [count for count in (config.limit, config.show) if count is not None]
    plan = make_plan(
        read_prompts(config.prompts, prompt_column=config.prompt_column, errors=errors),
        load_tokenizer(config.model, config.revision),
        spec,
        header,
        set() if config.spool_bytes else done_ids,
        limits=Limits(
            limit=min(shares, default=None),
            skip_long=config.skip_long,
            min_tokens=config.min_tokens,
            max_tokens=config.max_tokens,
            num_samples=config.num_samples if config.show is None else 1,
        ),
        generate=config.generate,
        template_args=header.sampling["template_args"],
        train_on=config.train_on,
        errors=errors,
        is_mine=lambda sample_id: any(share.takes(sample_id) for share in config.shares),
        counts_unread=config.shares[0].rank == 0,
    )
    if errors.num_lines:
        print(f"note: {errors.num_lines} malformed lines were skipped, the first of them named above", file=sys.stderr)
    if config.spool_bytes:
        # Planned as if nothing were done: what is done counts by epoch.
        plan.samples = over_epochs(plan.samples, config.epochs, config.sampling.seed)
        plan.take_done(done_ids)
        plan.spool_bytes = config.spool_bytes // config.shares[0].world_size
    if not plan.samples and not plan.num_done and config.is_whole:
        raise KitError(f"nothing to extract: {dict(plan.drops)} of {plan.num_asked} lines of {config.prompts} dropped")
    return plan


def show(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader) -> None:
    """Print the first samples for people, then what became of the lines read so far."""
    plan = build_plan(config, spec, header, set())
    show_samples(plan.samples, load_tokenizer(config.model, config.revision))
    print(json.dumps({"shown": len(plan.samples), **plan.summary()}))


def run(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader, plan: Plan, screen: Screen) -> dict[str, Any]:
    """Capture every sample of the plan; returns totals for the last line."""
    if not plan.samples:
        return {"rows": plan.num_done, "rows_added": 0}
    folder = Path(config.out)
    require_free_bytes(folder, plan.max_bytes(header), "the extraction")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and header.compute_dtype != "float32":
        print(f"note: {header.compute_dtype} is very slow on most CPUs; --dtype float32 is faster", file=sys.stderr)
    default_seqs = 256 if on_gpu else (64 if config.engine == "vllm" else 16)
    job = Job(
        spec=spec,
        header=header,
        folder=folder,
        share=config.shares[0],
        max_shard_bytes=config.max_shard_bytes,
        max_num_seqs=config.max_num_seqs or default_seqs,
        longest_tokens=plan.longest_tokens,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=config.max_num_batched_tokens,
        engine_args=config.engine_args,
        spool_bytes=spool.room_of(config, plan, header),
        keep_first=spool.kept_name(config.shares[0]) if config.parity and config.shares[0].rank == 0 else None,
    )
    capture = CAPTURES[config.engine](job, plan.samples, plan.summary())
    with screen.progress(plan) as progress, closing(capture) as reports:  # closed at Ctrl-C: it finishes its shards
        for report in reports:
            progress.update(report)
    if progress.num_rows != len(plan.samples):
        raise KitError(f"{progress.num_rows} of {len(plan.samples)} samples were captured; run again to resume")
    return {
        "rows": plan.num_done + progress.num_rows,
        "rows_added": progress.num_rows,
        **progress.totals(),
    }
