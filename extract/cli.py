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

from . import hf_capture, vllm_capture
from .capture import Capture, Job
from .launcher import launch
from .parity import settle_parity
from .plan import Limits, Plan, make_plan
from .prompts import LineErrors, read_prompts
from .screen import Screen
from .server import Server
from .server_capture import server_capture
from .server_command import serve_command
from .settings import ExtractConfig
from .show import show_samples
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
        if config.print_serve_command:
            print_serve_command(config)
        elif config.num_workers > 1 and not config.dry_run and config.show is None:
            extract_by_workers(config, arguments)
        else:
            extract(config, screen or Screen())
    return 0


def extract(config: ExtractConfig, screen: Screen) -> None:
    """Extract in this process."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    server = Server.connect(config.server) if config.server is not None and config.show is None else None
    header = make_header(config, spec, server)
    if config.show is not None:
        show(config, spec, header)
        return
    folder, share = Path(config.out), config.shares[0]
    if server is not None:
        server.require(header, share)
    else:
        require_parallelism(config, spec)
    found = inspect_folder(folder, header, share)
    done_ids = {row_id for entry in found.shards for row_id in entry.ids}
    plan = build_plan(config, spec, header, done_ids)
    if config.dry_run:
        screen.plan(plan, header, folder)
        print(json.dumps({**plan.summary(), "to_do": len(plan.samples), "max_bytes": plan.max_bytes(header)}))
        return
    # Opening the writer mends what a killed run left, and takes its rows over.
    if server is not None:
        server, notes = server.open(folder)
        plan.take_done({row_id for entry in inspect_folder(folder, header, share).shards for row_id in entry.ids})
    else:
        with ShardWriter(folder, header, **asdict(share)) as writer:
            plan.take_done(writer.done_ids)
        notes = writer.notes
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if share.rank == 0:
        save_config(config, folder / CONFIG_NAME)
    screen.plan(plan, header, folder)
    totals = run(config, make_job(config, spec, header, plan), plan, screen, server)
    if config.parity and share.rank == 0 and (totals["rows_added"] or not found.has_parity):
        # A run that was ended before its check, and is started again with nothing left to add, is checked now.
        ids = [sample.id for sample in plan.samples] or open_shards(folder).ids
        if ids:
            screen.say(str(settle_parity(folder, share.manifest_name, ids[: config.parity], revision=spec.revision)))
    if config.verify:
        print_report(verify_shards(folder, None if config.is_whole else share))
    screen.done({"out": str(folder), **plan.summary(), **totals})


def extract_by_workers(config: ExtractConfig, arguments: list[str]) -> None:
    """Extract in several processes on this host."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    require_parallelism(config, spec)
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


def print_serve_command(config: ExtractConfig) -> None:
    """Print what starts a server that writes the shards of this command."""
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    require_parallelism(config, spec)
    header = make_header(config, spec)
    inspect_folder(Path(config.out), header, config.shares[0])
    print(serve_command(make_job(config, spec, header, None)))


def require_parallelism(config: ExtractConfig, spec: TargetSpec) -> None:
    """Refuse a ``tensor_parallel_size`` that the target's heads or this host's GPUs do not allow.

    Raises:
        KitError: with the sizes that fit.
    """
    size = config.tensor_parallel_size if config.engine == "vllm" else 1
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in sizes:
        raise KitError(
            f"tensor_parallel_size {size} does not divide the target's {heads} attention heads ({kv_heads} of keys and "
            f"values); allowed: {', '.join(map(str, sizes))}"
        )
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        raise KitError(f"tensor_parallel_size {size} needs as many GPUs; {torch.cuda.device_count()} are visible here")


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
        done_ids,
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
    if not plan.samples and not plan.num_done and config.is_whole:
        raise KitError(f"nothing to extract: {dict(plan.drops)} of {plan.num_asked} lines of {config.prompts} dropped")
    return plan


def show(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader) -> None:
    """Print the first samples for people, then what became of the lines read so far."""
    plan = build_plan(config, spec, header, set())
    show_samples(plan.samples, load_tokenizer(config.model, config.revision))
    print(json.dumps({"shown": len(plan.samples), **plan.summary()}))


def make_job(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader, plan: Plan | None) -> Job:
    """What an engine is given; without a plan for samples as long as the target's context."""
    default_seqs = 256 if torch.cuda.is_available() else (64 if config.engine == "vllm" else 16)
    return Job(
        spec=spec,
        header=header,
        folder=Path(config.out),
        share=config.shares[0],
        max_shard_bytes=config.max_shard_bytes,
        max_num_seqs=config.max_num_seqs or default_seqs,
        longest_tokens=spec.max_position_embeddings if plan is None else plan.longest_tokens,
        prefix_caching=config.prefix_caching,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=config.max_num_batched_tokens,
        engine_args=config.engine_args,
    )


def run(config: ExtractConfig, job: Job, plan: Plan, screen: Screen, server: Server | None) -> dict[str, Any]:
    """Capture every sample of the plan; returns totals for the last line."""
    if not plan.samples:
        if server is not None:
            server.finish(None)
        return {"rows": plan.num_done, "rows_added": 0}
    require_free_bytes(job.folder, plan.max_bytes(job.header), "the extraction")
    dtype = job.header.compute_dtype
    if server is None and not torch.cuda.is_available() and dtype != "float32":
        print(f"note: {dtype} is very slow on most CPUs; --dtype float32 is faster", file=sys.stderr)
    engine = CAPTURES[config.engine] if server is None else server_capture(server)
    capture = engine(job, plan.samples, plan.summary())
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
