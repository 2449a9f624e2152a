"""Milliseconds of a training step's main thread, and what the threads that read packed rows take from it; no GPU needed.

Everything of the real step but the drafter's layers, which a GPU computes: rows as long as on a GPU (16,384 tokens in 40
documents, 2,048 anchors), states, head and vocabulary so narrow that their tensors cost little. Prints one JSON line.

    python benchmarks/train_host.py --readers 0 1 3 8

With ``--hidden 576 --rows 2`` reading is that of SmolLM2's width. Parts are processor time of the main thread, medians over the steps. ``wall_ms_per_step`` by ``readers`` (0: rows that were
read before) shows what reading threads take away, where the machine has cores for them. ``python_calls_per_row`` counts what
one packed row makes the reading threads do with the interpreter lock in hand, ``reader_ms_per_row`` their processor time.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from train_step import SHAPES, random_header, write_target  # noqa: E402

from dflash_kit.config import parse_config  # noqa: E402
from dflash_kit.provenance import git_commit  # noqa: E402
from dflash_kit.shards import Row, ShardWriter, open_shards  # noqa: E402
from dflash_kit.target import TargetSpec  # noqa: E402
from train import step as step_module  # noqa: E402
from train.assemble import assemble  # noqa: E402
from train.batches import PackedRow  # noqa: E402
from train.feed import Feed  # noqa: E402
from train.flops import FlopCounter  # noqa: E402
from train.job import prepare  # noqa: E402
from train.parallel import Parallel  # noqa: E402
from train.settings import TrainConfig  # noqa: E402
from train.state import RunFolder  # noqa: E402
from train.sums import PendingStep, StepSums  # noqa: E402
from train.trainer import Trainer  # noqa: E402


class Clock:
    """Processor time of the main thread by part; what is called inside a timed part counts for the outer one."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._inside = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, t0 = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.ms[name] += 1e3 * (time.thread_time() - t0)
                self._inside = False

        return run

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Time an attribute's calls from now on."""
        setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))


class NoLayers(nn.Module):
    """The drafter without its layers: one product, and every weight in the graph, so that the optimizer has all its work."""

    def __init__(self, drafter: nn.Module) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, noise_embeds: Tensor, features: Tensor, positions: Tensor, masks: None) -> Tensor:
        weights = sum(parameter.flatten()[0] for parameter in self.drafter.parameters())
        return noise_embeds * weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"seq_len": 16384, "anchors": 2048, "documents": 40, "layers": 5, "hidden": 16, "rows": 6, "steps": 12}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage", nargs="+", default=["bfloat16", "fp8"])
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 3, 8])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {storage: measure(args, storage, Path(folder) / storage) for storage in args.storage}
    line = {"benchmark": "train_host", **vars(args), "by_storage": found, "load_average": round(os.getloadavg()[0], 1)}
    print(json.dumps({**line, "cores": os.cpu_count(), "commit": git_commit()}))


def measure(args: argparse.Namespace, storage: str, folder: Path) -> dict[str, Any]:
    """The figures of one form of storage."""
    shape = SHAPES["tiny"] | {"hidden_size": args.hidden, "intermediate_size": 16, "head_dim": 8, "vocab_size": 64}
    spec = write_target(folder / "target", shape)
    write_shards(args, folder / "shards", spec, storage)
    trainer, feed = make_trainer(args, folder)
    clock = Clock()
    watch_parts(trainer, clock)
    packed = [
        future.result() for future in feed(1).steps(0, args.rows)
    ]  # checks each row, so only the first time is slower
    for rows in packed:
        step_module.train_step(trainer, rows, lr=1e-4)
    wall: dict[str, float] = {}
    parts: dict[str, float] = {}
    for readers in args.readers:
        steps = feed(max(readers, 1)).steps(0, args.steps)
        every: list[dict[str, float]] = []
        spans: list[float] = []
        for step in range(args.steps):
            clock.ms.clear()
            rows = packed[step % len(packed)] if readers == 0 else next(steps).result()
            t0, cpu_t0 = time.perf_counter(), time.thread_time()
            step_module.train_step(trainer, rows, lr=1e-4)
            every.append({**clock.ms, "all": 1e3 * (time.thread_time() - cpu_t0)})
            spans.append(1e3 * (time.perf_counter() - t0))
        wall[str(readers)] = round(statistics.median(spans), 2)
        if readers == 0:
            parts = {name: round(statistics.median(ms[name] for ms in every), 2) for name in every[0]}
    return {"main_ms": parts, "wall_ms_per_step": wall, **reading(trainer, args)}


def reading(trainer: Trainer, args: argparse.Namespace) -> dict[str, float]:
    """What a packed row takes from the thread that reads it for a GPU, but for pinned memory."""
    packer = replace(trainer.job.packer, keeps_codes=True)
    indices = [trainer.job.plan.step(step, 0, 1)[0] for step in range(args.rows)]
    times = []
    for index in indices:
        t0 = time.thread_time()
        packer(index)
        times.append(1e3 * (time.thread_time() - t0))
    profile = cProfile.Profile()
    profile.enable()
    for index in indices:
        packer(index)
    profile.disable()
    calls = pstats.Stats(profile).total_calls / len(indices)  # type: ignore[attr-defined]
    return {"reader_ms_per_row": round(statistics.median(times), 2), "python_calls_per_row": round(calls)}


def make_trainer(args: argparse.Namespace, folder: Path) -> tuple[Trainer, Callable[[int], Feed]]:
    """A trainer without layers, and its feed with any number of threads."""
    options = {
        "drafter.num_hidden_layers": args.layers,
        "drafter.block_size": 16,
        "drafter.mask_token_id": 63,
        "data.seq_len": args.seq_len,
        "data.anchors": args.anchors,
        "data.rows_per_step": 1,
        "data.prefetch": 7,
        "optim.max_steps": 1000,
        "replay.max_rows": 0,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    argv = [f"--shards={folder / 'shards'}", f"--target={folder / 'target'}", f"--out={folder / 'out'}", *words]
    job = prepare(parse_config("train", TrainConfig, argv, description=""))
    trainer = assemble(job, Parallel(rows_per_step=1, clip=1.0, compute_dtype="auto"), RunFolder(folder / "out"))
    trainer.model = NoLayers(trainer.drafter)
    type(trainer.drafter).layer_masks = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment,return-value]

    def feed(num_threads: int) -> Feed:
        return Feed(job.plan, job.packer, rank=0, world_size=1, last_row=None, prefetch=7, fixed_shapes=True,
                    num_threads=num_threads)  # fmt: skip

    return trainer, feed


def watch_parts(trainer: Trainer, clock: Clock) -> None:
    """Put the clock around the parts of a step."""
    FlopCounter.__call__ = clock.timed("counting", FlopCounter.__call__)  # type: ignore[method-assign]
    PackedRow.num_tokens = property(clock.timed("counting", PackedRow.num_tokens.fget))  # type: ignore[assignment,union-attr,attr-defined]
    clock.watch(PackedRow, "to", "row_to_device")
    clock.watch(step_module, "noise_embeddings", "embedding")
    clock.watch(step_module, "slot_losses", "loss")
    clock.watch(StepSums, "add", "sums")
    clock.watch(StepSums, "send", "sums")
    clock.watch(PendingStep, "result", "sums")
    clock.watch(trainer.parallel.accelerator, "backward", "backward")
    clock.watch(step_module, "_apply", "optimizer")


def write_shards(args: argparse.Namespace, folder: Path, spec: TargetSpec, storage: str) -> None:
    """Documents of about the same length, the last two thirds of each supervised."""
    header = random_header(spec, dtype=storage)
    mean, draws = args.seq_len // args.documents, torch.Generator().manual_seed(0)
    with ShardWriter(folder, header) as writer:
        for i in range(args.rows * args.documents):
            tokens = int(torch.randint(mean * 3 // 4, mean * 5 // 4, (), generator=draws))
            writer.add(
                Row(
                    id=f"row-{i}",
                    input_ids=torch.randint(1, 60, (tokens,), generator=draws).int(),
                    loss_mask=torch.arange(tokens) >= tokens // 3,
                    hidden_states=torch.randn(tokens, header.row_width, generator=draws).bfloat16(),
                    next_token=0,
                )
            )
    open_shards(folder)


if __name__ == "__main__":
    main()
