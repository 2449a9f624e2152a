"""Command of the first stage: prompts in, shards out. Builds the plan, runs an engine, and says what was done."""

import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_kit.config import parse_config, save_config
from dflash_kit.errors import KitError, require_free_bytes
from dflash_kit.interrupts import sigterm_interrupts
from dflash_kit.shard_folder import inspect_folder
from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardsHeader, ShardWriter
from dflash_kit.target import TargetSpec, load_tokenizer, tap_layer_ids

from . import hf_capture, vllm_capture
from .capture import Capture, Job
from .launcher import launch
from .plan import Limits, Plan, make_plan
from .prompts import LineErrors, read_prompts
from .screen import Screen
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
    """Samples at most, from the top of the first input, over all processes; unset: all."""
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
    verify: bool = False
    """Re-read and check every shard at the end."""
    num_workers: int = 1
    """Processes on this host, each with the next tensor_parallel_size GPUs of those that are visible (without GPUs:
    with a slice of the cores). When one fails, or at Ctrl-C, all finish their shards and end."""
    world_size: int | None = None
    """Processes over all hosts that extract into this folder; each takes its share of the samples, by their ids.
    Unset: num_workers."""
    rank: int = 0
    """Which of them this process is, 0 <= rank < world_size; with num_workers the first of its processes."""
    dry_run: bool = False
    """Print the plan (samples, tokens, bytes, free disk) and stop; nothing is written."""
    show: int | None = None
    """Print so many samples with their supervised parts marked, and stop; no engine starts and nothing is written."""

    def __post_init__(self) -> None:
        lengths = ("min_tokens", "max_tokens", "max_num_batched_tokens", "max_shard_bytes")
        for name in ("limit", "num_samples", "show", "max_num_seqs", "num_taps", "num_workers", *lengths):
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
        world_size = self.num_workers if self.world_size is None else self.world_size
        if 1 <= world_size < self.num_workers:
            raise ValueError(
                f"world_size {world_size} is less than num_workers {self.num_workers}; it counts the processes of all "
                "hosts: leave it out, or raise it"
            )
        if self.num_workers > 1 and not 0 <= self.rank <= world_size - self.num_workers:
            raise ValueError(
                f"rank {self.rank} is outside of 0..{world_size - self.num_workers}: it is the first of num_workers "
                f"{self.num_workers} processes out of world_size {world_size}"
            )
        _ = self.shares  # checks both

    @property
    def shares(self) -> list[Share]:
        """What the processes of this command take."""
        world_size = self.num_workers if self.world_size is None else self.world_size
        return [Share(self.rank + i, world_size) for i in range(self.num_workers)]

    @property
    def is_whole(self) -> bool:
        """Whether this command alone takes every sample."""
        return len(self.shares) == self.shares[0].world_size


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
    done_ids = {row_id for entry in inspect_folder(folder, header, share).shards for row_id in entry.ids}
    plan = build_plan(config, spec, header, done_ids)
    if config.dry_run:
        screen.plan(plan, header, folder)
        print(json.dumps({**plan.summary(), "to_do": len(plan.samples), "max_bytes": plan.max_bytes(header)}))
        return
    # Opening the writer mends what a killed run left, and takes its rows over.
    with ShardWriter(folder, header, **asdict(share)) as writer:
        plan.take_done(writer.done_ids)
    for note in writer.notes:
        print(f"note: {note}", file=sys.stderr)
    if share.rank == 0:
        save_config(config, folder / CONFIG_NAME)
    screen.plan(plan, header, folder)
    totals = run(config, spec, header, plan, screen)
    if config.verify:
        print_report(verify_shards(folder, None if config.is_whole else share))
    screen.done({"out": str(folder), **plan.summary(), **totals})


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
