"""Command of the first stage: prompts in, shards out. Builds the plan, runs an engine, and says what was done."""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from dflash_kit.config import parse_config
from dflash_kit.errors import KitError, free_bytes
from dflash_kit.interrupts import sigterm_interrupts
from dflash_kit.shards import ShardsHeader, open_shards
from dflash_kit.target import TargetSpec, load_tokenizer, tap_layer_ids

from . import hf_capture, spool, vllm_capture
from .capture import Capture, Job
from .failures import DROP_REASON
from .jobs import estimate, make_job, require_parallelism
from .launcher import launch
from .parity import settle_parity
from .places import Place, place_of
from .plan import Limits, Plan, make_plan
from .prompts import LineErrors, read_prompts
from .screen import Screen
from .server import Server
from .server_capture import server_capture
from .server_command import serve_command
from .settings import ExtractConfig
from .show import show_samples
from .spool import over_epochs
from .verify import print_report, verify_shards

__all__ = ["ExtractConfig", "main"]

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
        if config.print_serve_command:
            print_serve_command(config)
        elif config.num_processes > 1 and not config.dry_run and config.show is None:
            extract_by_workers(config, arguments)
        else:
            extract(config, screen or Screen(config.progress))
    return 0


def extract(config: ExtractConfig, screen: Screen) -> None:
    """Extract in this process."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    server = Server.connect(config.server) if config.server is not None and config.show is None else None
    header = make_header(config, spec, server)
    if config.show is not None:
        show(config, spec, header)
        return
    share = config.shares[0]
    place = place_of(config, share)
    if server is not None:
        server.require(header, share)
    else:
        require_parallelism(config, spec)
    found = place.inspect(header)
    spool.require_same_use(config, found)
    done_ids = {row_id for entry in found.shards for row_id in entry.ids}
    plan = build_plan(config, spec, header, done_ids)
    if config.dry_run:
        screen.plan(plan, header, place)
        least_s = estimate(config, spec, header, plan, screen)
        amounts = {"to_do": len(plan.samples), "max_tokens": plan.max_tokens, "max_bytes": plan.max_bytes(header)}
        print(json.dumps({**plan.summary(), **amounts, "free_bytes": free_bytes(place.folder), "least_s": least_s}))
        return
    spool.room_of(config, plan, header)  # refused before anything is written
    with place:
        # Opening it mends what a killed run left, and takes its rows over.
        if server is not None:
            server, notes = server.open(place.folder)
            done_ids = {row_id for entry in place.inspect(header).shards for row_id in entry.ids}
        else:
            done_ids, notes = place.open(header)
        plan.take_done(done_ids)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        if share.rank == 0:
            place.keep_config(config)
        screen.plan(plan, header, place)
        with spool.at_work(config, place.folder):
            spool.begin(config, plan, place.folder, share)
            totals = run(config, make_job(config, spec, header, plan, place), plan, screen, place, server)
            place.settle()
            if config.parity and share.rank == 0 and (totals["rows_added"] or not found.has_parity):
                compare(config, spec, plan, screen, place)
            if config.spool_bytes:
                spool.end(place.folder, share)
        if config.verify:
            print_report(verify_shards(place.name, None if config.is_whole else share))
    screen.done({"out": place.name, **plan.summary(), **totals})


def compare(config: ExtractConfig, spec: TargetSpec, plan: Plan, screen: Screen, place: Place) -> None:
    """Compare some rows with transformers and say how they did.

    A run that was ended before its check, and is started again with nothing left to add, is checked now.
    """
    kept = place.folder / spool.kept_name(place.share) if config.spool_bytes else None
    if kept is None:
        held = open_shards(place.name).ids
        added = {sample.id for sample in plan.samples}.intersection(held)
        ids = ([sample.id for sample in plan.samples if sample.id in added] or held)[: config.parity]
    else:
        ids = spool.kept_ids(kept, config.parity) if kept.exists() else []
    if ids:
        screen.say(str(settle_parity(place.name, place.record_parity, ids, revision=spec.revision, kept=kept)))
    if kept is not None:
        kept.unlink(missing_ok=True)


def extract_by_workers(config: ExtractConfig, arguments: list[str]) -> None:
    """Extract in several processes on this host."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    require_parallelism(config, spec)
    header, place = make_header(config, spec), place_of(config, config.shares[0])
    place.inspect(header)  # one error instead of one from each process
    if place.description:
        print(place.description, flush=True)
    gpus_each = config.tensor_parallel_size if config.engine == "vllm" else 1
    result = launch(
        config.shares,
        arguments,
        place,
        gpus_each=gpus_each,
        workers_per_gpu=config.workers_per_gpu,
        progress=config.progress,
    )
    if "errors" in result:
        print(json.dumps(result), flush=True)
        raise KitError("; ".join(f"rank {ranks}: {error}" for ranks, error in result["errors"].items()))
    if result["rows"] == 0 and config.is_whole:
        raise KitError(
            f"nothing to extract: {result['dropped']} of {result['asked']} lines of {config.prompts} dropped"
        )
    if config.shares[0].rank == 0:
        place.keep_config(config)
    if config.verify:
        for share in [None] if config.is_whole else config.shares:
            print_report(verify_shards(place.name, share))
    Screen().done(result)


def print_serve_command(config: ExtractConfig) -> None:
    """Print what starts a server that writes the shards of this command."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    require_parallelism(config, spec)
    header = make_header(config, spec)
    place = place_of(config, config.shares[0])
    place.inspect(header)
    print(serve_command(make_job(config, spec, header, None, place)))


def make_header(config: ExtractConfig, spec: TargetSpec, server: Server | None = None) -> ShardsHeader:
    """What the shards of this run will be; a server knows itself what computes, and how where that is left open."""
    layer_ids = config.target_layer_ids or tap_layer_ids(spec.num_layers, config.num_taps)
    if layer_ids[-1] >= spec.num_layers or layer_ids[0] < 0:
        raise KitError(f"target_layer_ids {layer_ids} are outside of the target's layers 0..{spec.num_layers - 1}")
    auto_dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    # Samples can be shown where no engine is installed.
    version = "" if config.show is not None else None
    if server is not None:
        auto_dtype, version = server.header.compute_dtype, server.header.engine_version
    return ShardsHeader.from_target(
        spec,
        target_layer_ids=layer_ids,
        dtype=config.storage,
        compression=config.compression,
        has_last_hidden=config.last_hidden,
        compute_dtype=auto_dtype if config.dtype == "auto" else config.dtype,
        engine=config.engine,
        engine_version=ENGINE_VERSIONS[config.engine]() if version is None else version,
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


def run(
    config: ExtractConfig, job: Job, plan: Plan, screen: Screen, place: Place, server: Server | None
) -> dict[str, Any]:
    """Capture every sample of the plan; returns totals for the last line."""
    if not plan.samples:
        if server is not None:
            server.finish(None)
        elif plan.num_done:
            place.complete(job.header, plan.summary())
        return {"rows": plan.num_done, "rows_added": 0}
    max_bytes = plan.max_bytes(job.header)
    place.require_room(min(max_bytes, config.spool_bytes) if config.spool_bytes else max_bytes)
    dtype = job.header.compute_dtype
    if server is None and not torch.cuda.is_available() and dtype != "float32":
        print(f"note: {dtype} is very slow on most CPUs; --dtype float32 is faster", file=sys.stderr)
    engine = CAPTURES[config.engine] if server is None else server_capture(server)
    capture = engine(job, plan.samples, plan.summary())
    with (
        screen.progress(plan, config.tensor_parallel_size) as progress,
        closing(capture) as reports,
    ):  # closed at Ctrl-C: it finishes its shards
        for report in reports:
            progress.update(report)
            place.keep_pace()
    if progress.num_failed:
        plan.drops[DROP_REASON] = progress.num_failed
    if progress.num_rows + progress.num_failed != len(plan.samples):
        raise KitError(f"{progress.num_rows} of {len(plan.samples)} samples were captured; run again to resume")
    if not plan.num_done + progress.num_rows and config.is_whole:
        raise KitError(f"nothing was extracted: the engine failed at all {progress.num_failed} samples")
    return {
        "rows": plan.num_done + progress.num_rows,
        "rows_added": progress.num_rows,
        **progress.totals(),
        "bytes": place.earlier_bytes + progress.num_bytes,
    }
