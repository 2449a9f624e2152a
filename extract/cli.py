"""Command of the first stage: prompts in, shards out. Builds the plan, runs an engine, and says what was done."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_kit.config import parse_config, save_config
from dflash_kit.errors import KitError, require_free_bytes
from dflash_kit.shard_writer import inspect_folder
from dflash_kit.shards import ShardsHeader, ShardWriter
from dflash_kit.target import TargetSpec, load_tokenizer, tap_layer_ids

from . import hf_capture, vllm_capture
from .capture import Capture, Job, Progress
from .parity import check_parity
from .plan import Limits, Plan, make_plan
from .progress import ExtractionProgress
from .prompts import LineErrors, read_prompts
from .show import show_samples
from .verify import print_report, verify_shards

CONFIG_NAME = "extract.yaml"
CAPTURES: dict[str, Capture] = {"vllm": vllm_capture.capture, "transformers": hf_capture.capture}
ENGINE_VERSIONS = {"vllm": vllm_capture.engine_version, "transformers": hf_capture.engine_version}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the target answers."""

    temperature: float = 0.0
    """0 takes the likeliest token (greedy); replay of acceptance is exact for greedy responses."""
    top_p: float = 1.0
    """Probability mass that is sampled from; 1 for all."""
    top_k: int = 0
    """Likeliest tokens that are sampled from; 0 for all."""
    max_new_tokens: int = 1024
    """Tokens of a response at most."""
    seed: int = 0
    """Seed of sampling; each sample adds its own id to it."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0")
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens is {self.max_new_tokens}; at least 1 is needed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """Options of `extract/dump.py`."""

    model: str
    """Target: a folder with config.json, tokenizer and safetensors, or a hub id."""
    prompts: str
    """Inputs, comma-separated: JSONL, JSON or Parquet files, folders of them, globs, or hf:org/name[:config[:split]] of
    the Hugging Face hub. A line or row has `messages`, `prompt`, `conversations` (ShareGPT), `input_ids` or `text`."""
    out: str
    """Shards folder: new, empty, or of an earlier run of the same command, which is then resumed."""
    revision: str | None = None
    """Revision of a hub id."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What runs the target; both write the same rows, transformers more slowly."""
    generate: bool | None = None
    """true: the target answers every conversation (a given last response is left out); false: responses must
    be given; unset: it answers those that do not end with a response."""
    train_on: Literal["all", "last"] = "all"
    """Where the response is given: all of the assistant's turns are supervised, or only the last one. Where the target
    answers, its answer alone is supervised."""
    prompt_column: str | None = None
    """Column that holds the prompt (text) or the conversation (list of messages), in place of the names above."""
    limit: int | None = None
    """Samples at most, from the top of the first input; unset: all."""
    num_samples: int = 1
    """Answers of the target to each prompt, each a row with a seed of its own; above 1 needs a temperature above 0."""
    min_tokens: int | None = None
    """Leave out samples whose prompt (with a given response: whose conversation) has fewer tokens; counted."""
    max_tokens: int | None = None
    """Leave out samples whose prompt (with a given response: whose conversation) has more tokens; counted."""
    skip_long: bool = False
    """Leave out conversations longer than the target's context (counted in the manifest) instead of stopping."""
    skip_errors: bool = False
    """Leave out malformed lines (counted in the manifest, the first three are named) instead of stopping."""
    enable_thinking: bool = False
    """Passed to the chat template; templates without a thinking mode ignore it."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_taps: int = 5
    """Tapped layers, spread by the published rule; ignored when target_layer_ids are given."""
    target_layer_ids: list[int] | None = None
    """0-based layers whose outputs are tapped, in ascending order."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the target computes; auto: bfloat16 on a GPU, float32 on a CPU."""
    storage: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which hidden states are stored; float32 takes twice the space and is for parity checks."""
    max_shard_bytes: int = 256 << 20
    """Size at which a shard is finished, in bytes."""
    max_num_seqs: int | None = None
    """Conversations that the engine works on at once; unset: 64 on a CPU (transformers 16), 256 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Tokens of one engine step at most; unset: the engine's default (vLLM only)."""
    tensor_parallel_size: int = 1
    """GPUs that share the target (vLLM only)."""
    gpu_memory_utilization: float = 0.9
    """Share of GPU memory that the engine may take (vLLM only)."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine by their own names, as JSON or one by one: --engine_args.quantization fp8."""
    parity: int = 2
    """Rows of this run whose states are compared with a plain forward pass of transformers; 0 for none."""
    verify: bool = False
    """Re-read and check every shard at the end."""
    dry_run: bool = False
    """Print the plan (samples, tokens, bytes, free disk) and stop; nothing is written."""
    show: int | None = None
    """Print so many samples with their supervised parts marked, and stop; no engine starts and nothing is written."""

    def __post_init__(self) -> None:
        if self.parity < 0:
            raise ValueError(f"parity is {self.parity}; 0 or more rows can be compared")
        lengths = ("min_tokens", "max_tokens", "max_num_batched_tokens", "max_shard_bytes")
        for name in ("limit", "num_samples", "show", "max_num_seqs", "num_taps", *lengths):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        if self.target_layer_ids is not None and self.target_layer_ids != sorted(set(self.target_layer_ids)):
            raise ValueError(f"target_layer_ids {self.target_layer_ids} must be ascending, each once")
        if self.num_samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"num_samples is {self.num_samples}, but at temperature 0 all answers are the same; "
                "set sampling.temperature above 0 or leave num_samples at 1"
            )
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; no sample is left")


def main(argv: list[str] | None = None) -> int:
    """Run the stage; the last line of stdout is one JSON object."""
    config = parse_config("extract", ExtractConfig, argv, description="Answer prompts and write hidden states.")
    spec = TargetSpec.from_pretrained(config.model, config.revision)
    header = make_header(config, spec)
    if config.show is not None:
        return show(config, spec, header)
    folder = Path(config.out)
    manifest = inspect_folder(folder, header)
    done_ids = {row_id for entry in manifest.shards for row_id in entry.ids}
    plan = build_plan(config, spec, header, done_ids)
    if not config.dry_run:
        with ShardWriter(folder, header) as writer:  # mends what a killed run left, and takes its rows over
            plan.take_done(writer.done_ids)
        save_config(config, folder / CONFIG_NAME)
    print_plan(plan, header, folder)
    if config.dry_run:
        print(json.dumps({**plan.summary(), "to_do": len(plan.samples), "max_bytes": plan.max_bytes(header)}))
        return 0
    totals = run(config, spec, header, plan)
    if config.parity and totals["rows_added"]:
        print(check_parity(folder, [sample.id for sample in plan.samples[: config.parity]], revision=spec.revision))
    if config.verify:
        print_report(verify_shards(folder))
    print_totals(totals, folder)
    print(json.dumps({"out": str(folder), **plan.summary(), **totals}))
    return 0


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
    )
    if errors.num_lines:
        print(f"note: {errors.num_lines} malformed lines were skipped, the first of them named above", file=sys.stderr)
    if not plan.samples and not plan.num_done:
        raise KitError(f"nothing to extract: {dict(plan.drops)} of {plan.num_asked} lines of {config.prompts} dropped")
    return plan


def show(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader) -> int:
    """Print the first samples for people, then what became of the lines read so far."""
    plan = build_plan(config, spec, header, set())
    show_samples(plan.samples, load_tokenizer(config.model, config.revision))
    print(json.dumps({"shown": len(plan.samples), **plan.summary()}))
    return 0


def run(config: ExtractConfig, spec: TargetSpec, header: ShardsHeader, plan: Plan) -> dict[str, Any]:
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
        max_shard_bytes=config.max_shard_bytes,
        max_num_seqs=config.max_num_seqs or default_seqs,
        longest_tokens=plan.longest_tokens,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=config.max_num_batched_tokens,
        engine_args=config.engine_args,
    )
    with ExtractionProgress(len(plan.samples), sum(plan.drops.values())) as progress:
        reports: Iterator[Progress] = CAPTURES[config.engine](job, plan.samples, plan.summary())
        for report in reports:
            progress.update(report)
    if progress.num_rows != len(plan.samples):
        raise KitError(f"{progress.num_rows} of {len(plan.samples)} samples were captured; run again to resume")
    return {
        "rows": plan.num_done + progress.num_rows,
        "rows_added": progress.num_rows,
        "tokens_added": progress.num_tokens,
        "bytes": progress.num_bytes,
        "elapsed_s": round(progress.elapsed_s, 1),
        "tokens_per_s": round(progress.num_tokens / max(progress.working_s, 1e-9), 1),
    }


def print_totals(totals: dict[str, Any], folder: Path) -> None:
    """One line for people."""
    if totals["rows_added"] == 0:
        print(f"nothing to add: {folder} holds all {totals['rows']} rows")
        return
    print(
        f"{totals['rows']} rows in {folder}, {totals['rows_added']} of them new: {totals['tokens_added']:,} tokens in "
        f"{totals['elapsed_s']:.0f} s ({totals['tokens_per_s']:.0f} tokens/s once the engine was up)"
    )


def print_plan(plan: Plan, header: ShardsHeader, folder: Path) -> None:
    """A few lines for people."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    layers = ", ".join(map(str, header.target_layer_ids))
    print(f"target   {header.target_name}, taps of layers {layers}, {header.engine} {header.engine_version}")
    print(f"samples  {len(plan.samples)} to do, {plan.num_done} done, dropped: {dict(plan.drops) or 'none'}")
    print(f"tokens   {plan.max_tokens:,} at most, {header.bytes_per_token:,} bytes each")
    print(f"disk     {plan.max_bytes(header) / 2**20:,.0f} MiB at most, {free_bytes / 2**20:,.0f} MiB free", flush=True)
