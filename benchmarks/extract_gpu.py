"""Extraction against plain prefill and against vLLM's own connector, by the same vLLM, on one GPU.

    python benchmarks/extract_gpu.py --shapes 8b,smollm2 --memory_folder /dev/shm --disk_folder scratch/

For each shape three engines with random weights stay loaded side by side and take turns over the same random prompts (given
conversations: prefill only): ``plain`` (no states, by the runner that vLLM chooses), ours, and ``stock`` (vLLM's
ExampleHiddenStatesConnector, one safetensors file a request, in memory). On request ``plain_as_ours``: no states, by the runner
that vLLM 0.26 takes for ``extract_hidden_states``; what it loses against ``plain`` is no extractor's. Ours takes a turn with each sink: ``null`` (rows come to the host and are let go),
``memory`` and ``disk`` (shards). A turn ends when the last token is computed, the last shard is finished, or the last file
is complete. Reported are tokens a second of each (median, lowest, highest turn), ratios turn by turn, where the seconds of a
turn go, the share of time in which the GPU idles, and what link and files can do. What fails is reported in place of its
figures; after ``--limit_s`` seconds the report is printed as far as it has come. The last line of the output is one JSON
object. On a CPU ``--shapes tiny --engines shards`` shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from extract_cpu import spread  # noqa: E402
from extract_rates import WRITTEN_BYTES, BusyMeter, copy_gb_per_s, file_system, writer_gb_per_s  # noqa: E402
from extract_turns import (  # noqa: E402
    DEFAULT_ENGINES,
    ENGINES,
    plain_turn,
    shards_turn,
    start_other,
    start_shards,
    start_stock,
    stock_turn,
)

from dflash_kit.vllm_environment import EXTRACTION, environment  # noqa: E402

SINKS = ("null", "memory", "disk")
WARM_UP_PROMPTS = 64
"""Prompts of the first turn, which does not count: enough to fill the writer's queue."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Start the engines, run the turns, print the figures."""
    options = parse(argv)
    import torch
    from measuring import Report, attempt

    from dflash_kit.provenance import git_commit, package_versions
    from dflash_kit.shard_sink import num_writer_lanes
    from extract import vllm_capture

    vllm_capture.prepare_environment()
    folders = {"memory": Path(options.memory_folder), "disk": Path(options.disk_folder)}
    report = Report(
        options.limit_s, options.out, benchmark="extract_gpu",
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        cores=len(os.sched_getaffinity(0)), writer_lanes=num_writer_lanes(), commit=git_commit(),
        versions=package_versions() | {"vllm": vllm_capture.engine_version()}, prompts=options.num_prompts,
        prompt_tokens=options.num_tokens, batched_tokens=options.batched_tokens, taps=options.taps,
        file_systems={name: file_system(folder) for name, folder in folders.items()},
        pinned_copy_gb_per_s=attempt(copy_gb_per_s),
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory(dir=folders["memory"]) as memory,
        tempfile.TemporaryDirectory(dir=folders["disk"]) as disk,
    ):
        places = {"memory": Path(memory), "disk": Path(disk)}
        for shape in options.shapes.split(","):
            failed = attempt(lambda shape=shape: measure(shape, options, places, report))  # type: ignore[misc]
            if failed is not None:
                report.add(**{f"{shape}_error": failed})
        return report.finish()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    import torch
    from train_step import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,smollm2", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--num_prompts", type=int, default=128, help="prompts in a turn")
    parser.add_argument("--num_tokens", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--batched_tokens", type=int, default=16384, help="tokens of one engine step")
    parser.add_argument("--turns", type=int, default=4, help="turns of each engine and sink, after one to warm up")
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--gpu_share", type=float, default=0.3, help="share of the GPU's memory for each engine")
    parser.add_argument(
        "--kv_gb",
        type=float,
        default=0.0,
        help="GB of each engine's cache; 0: what vLLM finds free, which other programs disturb",
    )
    parser.add_argument("--engines", default=",".join(DEFAULT_ENGINES), help=f"which of {', '.join(ENGINES)}")
    parser.add_argument("--sink", default=",".join(SINKS), help=f"which of {', '.join(SINKS)} ours writes to")
    parser.add_argument("--memory_folder", default="/dev/shm", help="folder on a file system in memory")
    parser.add_argument("--disk_folder", default=tempfile.gettempdir(), help="folder on the disk")
    parser.add_argument("--limit_s", type=float, default=560.0, help="seconds for the whole; 0: no limit")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args(argv)
    for name, known in (("shapes", SHAPES), ("engines", ENGINES), ("sink", SINKS)):
        unknown = set(getattr(options, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name} names {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    for name in ("memory_folder", "disk_folder"):
        if not Path(getattr(options, name)).is_dir():
            parser.error(f"--{name} is {getattr(options, name)!r}; name a folder that is there")
    if not torch.cuda.is_available() and options.shapes != "tiny":
        parser.error("no GPU is visible here; benchmarks/extract_cpu.py measures on a CPU (--shapes tiny runs)")
    return options


def measure(shape: str, options: argparse.Namespace, places: dict[str, Path], report: Any) -> None:
    """All turns of one shape; figures go to the report after each round of them."""
    from measuring import attempt

    from dflash_kit.shard_sink import num_writer_lanes

    samples, job = make_job(shape, options, places["memory"])
    header, num_tokens = job.header, options.num_tokens
    rates = {
        f"{name}, {lanes} threads": attempt(
            lambda folder=folder, lanes=lanes: (
                writer_gb_per_s(header, num_tokens, folder, lanes, WRITTEN_BYTES)  # type: ignore[misc]
                if options.num_prompts > 8
                else writer_gb_per_s(header, num_tokens, folder, lanes, 0)
            )
        )
        for name, folder in places.items()
        for lanes in sorted({1, num_writer_lanes()})
    }
    report.add(**{f"{shape}_bytes_per_token": header.bytes_per_token, f"{shape}_writer_gb_per_s": rates})
    engines: dict[str, Any] = {}
    try:
        for name in options.engines.split(","):
            report.at(f"{shape}: {name} starts")
            engines[name] = start(name, job, samples, places)
        figures, turns = (
            Figures(len(samples) * num_tokens, header.bytes_per_token),
            all_turns(options, engines, job, samples, places),
        )
        for turn in range(options.turns + 1):
            for name in list(turns) if turn % 2 else list(turns)[::-1]:
                report.at(f"{shape}: turn {turn} of {name}")
                with BusyMeter() as meter:
                    phases = turns[name](turn)
                if turn > 0:
                    print(f"turn {turn} {name}: {figures.num_tokens / phases['seconds']:.0f} tokens/s", file=sys.stderr)
                    figures.take(name, phases, meter.busy_share)
            if turn > 0:
                report.add(**{shape: figures.summary()})
    finally:
        for engine in engines.values():
            engine.engine_core.shutdown(timeout=1.0)


def start(name: str, job: Any, samples: list[Any], places: dict[str, Path]) -> Any:
    """One of the engines."""
    if name == "plain":
        return start_other(job)
    if name == "plain_as_ours":
        with environment(EXTRACTION):
            return start_other(job)
    return start_shards(job, samples) if name == "shards" else start_stock(job, places["memory"] / "stock")


def all_turns(
    options: argparse.Namespace, engines: dict[str, Any], job: Any, samples: list[Any], places: dict[str, Path]
) -> dict[str, Callable[[int], dict[str, float]]]:
    """What runs a turn, by name: of each engine, of ours with each sink."""
    turns: dict[str, Callable[[int], dict[str, float]]] = {}

    def part(turn: int) -> list[Any]:
        return samples if turn else samples[:WARM_UP_PROMPTS]

    for name in ("plain", "plain_as_ours"):
        if name in engines:
            turns[name] = lambda turn, name=name: plain_turn(engines[name], part(turn), turn)  # type: ignore[misc]
    for index, sink in enumerate(options.sink.split(",") if "shards" in engines else ()):
        turns[sink] = lambda turn, sink=sink, index=index: shards_turn(  # type: ignore[misc]
            engines["shards"], job, part(turn), 10 * turn + index, places.get(sink)
        )
    if "stock" in engines:
        turns["stock"] = lambda turn: stock_turn(engines["stock"], part(turn), turn, places["memory"] / "stock")
    return turns


class Figures:
    """Gathers the turns of one shape.

    Args:
        num_tokens: of a turn.
        bytes_per_token: of a shard.
    """

    def __init__(self, num_tokens: int, bytes_per_token: int) -> None:
        self.num_tokens, self._bytes_per_token = num_tokens, bytes_per_token
        self._phases: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._busy: dict[str, list[float]] = defaultdict(list)

    def take(self, name: str, phases: dict[str, float], busy_share: float | None) -> None:
        """Count a turn."""
        for phase, seconds in phases.items():
            self._phases[name][phase].append(seconds)
        if busy_share is not None:
            self._busy[name].append(busy_share)

    def summary(self) -> dict[str, Any]:
        """Rates and ratios (median, lowest, highest turn); phases and shares (medians)."""
        rates = {name: [self.num_tokens / s for s in found["seconds"]] for name, found in self._phases.items()}
        plain = rates.get("plain", [])
        return {
            "tokens": self.num_tokens,
            "tokens_per_s": {name: spread(values) for name, values in rates.items()},
            "ratio_to_plain": {
                name: spread([a / b for a, b in zip(values, plain, strict=True)])
                for name, values in rates.items()
                if name != "plain" and plain
            },
            "phases_s": {
                name: {phase: round(statistics.median(values), 4) for phase, values in found.items()}
                for name, found in self._phases.items()
            },
            "gpu_idle_share": {name: round(1 - statistics.median(v), 3) for name, v in self._busy.items()},
            "gb_per_s": {
                name: round(1e-9 * self._bytes_per_token * statistics.median(values), 2)
                for name, values in rates.items()
                if not name.startswith("plain")
            },
        }


def make_job(shape: str, options: argparse.Namespace, folder: Path) -> tuple[list[Any], Any]:
    """A target that has only a configuration (its weights are random), and prompts of random tokens."""
    import torch
    from train_step import SHAPES, write_target

    from dflash_kit.shards import ShardsHeader
    from dflash_kit.target import tap_layer_ids
    from extract import vllm_capture
    from extract.capture import Job
    from extract.prompts import Sample

    # vLLM's attention on CPUs takes no narrower heads.
    spec = write_target(folder / f"target-{shape}", SHAPES[shape] | ({"head_dim": 32} if shape == "tiny" else {}))
    random = torch.Generator().manual_seed(0)
    samples = []
    for i in range(options.num_prompts):
        ids = torch.randint(1, spec.vocab_size - 1, (options.num_tokens,), generator=random).tolist()
        span = (len(ids) // 4, len(ids))
        samples.append(Sample(id=str(i), source="", token_ids=ids, loss_spans=[span], max_new_tokens=0))
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=tap_layer_ids(spec.num_layers, options.taps),
        compute_dtype="bfloat16" if torch.cuda.is_available() else "float32",
        engine="vllm",
        engine_version=vllm_capture.engine_version(),
        sampling={"temperature": 0.0},
    )
    job = Job(
        spec=spec,
        header=header,
        folder=folder / f"unused-{shape}",
        max_shard_bytes=256 << 20,
        max_num_seqs=options.num_prompts,
        longest_tokens=options.num_tokens,
        gpu_memory_utilization=options.gpu_share,
        max_num_batched_tokens=options.batched_tokens,
        engine_args={"load_format": "dummy"}
        | ({"kv_cache_memory_bytes": int(1e9 * options.kv_gb)} if getattr(options, "kv_gb", 0) else {}),
    )
    return samples, job


if __name__ == "__main__":
    main()
