"""Opening a shards folder that a thousand processes wrote: seconds, memory, collisions.

Simulates 1,000 writers with 100 shards each as a reader sees them: their manifests are written in full, the shards of a few
writers are real (tiny rows), those of the others are empty files that nobody opens. Then a fresh process opens the folder
several times, reads the real rows, and another one starts a writer in it, as a resumed run does. Prints one JSON line.

    python benchmarks/shard_scale.py --folder runs/shard-scale
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)


def main(argv: list[str] | None = None) -> int:
    """Write the folder, measure in fresh processes, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/shard-scale", help="new folder; deleted in the end")
    parser.add_argument("--writers", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=100, help="shards of each writer")
    parser.add_argument("--rows", type=int, default=8, help="rows of each shard")
    parser.add_argument("--real_writers", type=int, default=4, help="writers whose shards are real files")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", choices=["open", "writer"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        measure = measure_open if options.measure == "open" else measure_writer
        print(json.dumps(measure(options)))
        return 0
    folder = Path(options.folder)
    if folder.exists():
        raise SystemExit(f"error: {folder} exists; name a new folder")
    try:
        t0 = time.perf_counter()
        for rank in range(options.writers):
            write_share(folder, rank, options, is_real=rank < options.real_writers)
        written_s = time.perf_counter() - t0
        opened, writer = in_new_process("open"), in_new_process("writer")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "benchmark": "shard_scale",
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "writers": options.writers,
        "shards": options.writers * options.shards,
        "rows": options.writers * options.shards * options.rows,
        "preparation_s": round(written_s, 1),
        **opened,
        **writer,
    }
    print(json.dumps(report))
    return 0


def in_new_process(what: str) -> dict[str, Any]:
    """Run this script with the same options in a process whose memory is its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", what]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def measure_open(options: argparse.Namespace) -> dict[str, Any]:
    """Open the folder as the trainer does."""
    from dflash_kit.shards import open_shards

    folder = Path(options.folder)
    before_mib = peak_mib()
    seconds, cpu_seconds = [], []
    for _ in range(options.repeats):
        t0, cpu0 = time.perf_counter(), time.process_time()
        shards = open_shards(folder)
        seconds.append(time.perf_counter() - t0)
        cpu_seconds.append(time.process_time() - cpu0)
        if len(seconds) == 1:
            opened_mib = peak_mib()
        if len(seconds) < options.repeats:
            del shards
    names = [name for name, *_ in shards._shards]
    num_real = options.real_writers * options.shards * options.rows
    assert len(shards) == options.writers * options.shards * options.rows
    for index in random.Random(0).sample(range(num_real), min(num_real, 500)):
        assert shards[index].id == shards.ids[index]
    return {
        "manifests_mib": round(sum(path.stat().st_size for path in folder.glob("manifest*.jsonl")) / 2**20, 1),
        "open_s": spread(seconds),
        "open_cpu_s": spread(cpu_seconds),
        "imports_mib": round(before_mib),
        "open_peak_mib": round(opened_mib - before_mib),
        "collisions": len(names) - len(set(names)) + len(shards.ids) - len(set(shards.ids)),
        "rows_read": min(num_real, 500),
    }


def measure_writer(options: argparse.Namespace) -> dict[str, Any]:
    """Start a writer as a resumed run does: it reads what everybody has done."""
    from dflash_kit.shards import ShardWriter

    before_mib = peak_mib()
    seconds, cpu_seconds = [], []
    for rank in range(min(options.repeats, options.real_writers)):
        t0, cpu0 = time.perf_counter(), time.process_time()
        with ShardWriter(Path(options.folder), make_header(), rank=rank, world_size=options.writers) as writer:
            seconds.append(time.perf_counter() - t0)
            cpu_seconds.append(time.process_time() - cpu0)
            assert len(writer.done_ids) == options.writers * options.shards * options.rows
    return {
        "writer_start_s": spread(seconds),
        "writer_start_cpu_s": spread(cpu_seconds),
        "writer_peak_mib": round(peak_mib() - before_mib),
    }


def write_share(folder: Path, rank: int, options: argparse.Namespace, *, is_real: bool) -> None:
    """What one writer leaves behind."""
    import torch

    from dflash_kit.shard_entry import ShardEntry
    from dflash_kit.shard_share import Share
    from dflash_kit.shards import Row, ShardWriter

    header, share, draw = make_header(), Share(rank, options.writers), random.Random(rank)
    if is_real:
        states = torch.randn(3, header.row_width)
        with ShardWriter(folder, header, rank=rank, world_size=options.writers) as writer:
            for _ in range(options.shards):
                for _ in range(options.rows):
                    row_id = make_id(share, draw)
                    writer.add(Row(id=row_id, input_ids=torch.arange(3), loss_mask=torch.ones(3), hidden_states=states))
                writer.flush()
        return
    lines: list[dict[str, Any]] = [{"kind": "header", **header.to_dict()}]
    lines.append({"kind": "split", "world_size": options.writers})
    for index in range(options.shards):
        lengths = [draw.randint(200, 2000) for _ in range(options.rows)]
        entry = ShardEntry(
            file=share.shard_name(index),
            rows=options.rows,
            tokens=sum(lengths),
            lengths=lengths,
            ids=[make_id(share, draw) for _ in range(options.rows)],
            checksum=f"{header.checksum}:{draw.getrandbits(64):016x}",
            bytes=sum(lengths) * header.bytes_per_token,
        )
        lines.append({"kind": "shard", **asdict(entry)})
        (folder / entry.file).touch()
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / share.manifest_name).write_text(text)


def make_header() -> Any:
    """Of an imaginary target."""
    from dflash_kit.shards import ShardsHeader

    return ShardsHeader(
        target_name="imaginary",
        target_revision=None,
        config_hash="0" * 32,
        tokenizer_hash="0" * 32,
        template_hash="0" * 32,
        vocab_size=100,
        hidden_size=8,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_taps=5,
        compute_dtype="bfloat16",
        engine="none",
        engine_version="0",
        sampling={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1024, "seed": 0},
    )


def make_id(share: Any, draw: random.Random) -> str:
    """An id as extraction makes them (32 hexadecimal digits), of a sample in this share."""
    row_id = f"{draw.getrandbits(48) * share.world_size + share.rank:016x}{draw.getrandbits(64):016x}"
    assert share.takes(row_id)
    return row_id


def peak_mib() -> float:
    """Most memory that this process has held, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest of several turns."""
    return {name: round(f(values), 3) for name, f in (("median", statistics.median), ("low", min), ("high", max))}


if __name__ == "__main__":
    from dflash_kit.errors import run_cli

    sys.exit(run_cli(main))
