"""What a machine's links, files and GPU do, for `extract_gpu.py`."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

WRITTEN_BYTES = 4e9


class BusyMeter:
    """Share of time in which the GPU ran a kernel, as the driver samples it; None without a GPU or nvidia-ml-py."""

    busy_share: float | None = None

    def __enter__(self) -> BusyMeter:
        self._samples: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        if self._samples:
            self.busy_share = statistics.mean(self._samples)

    def _sample(self) -> None:
        if not torch.cuda.is_available():
            return
        while not self._end.wait(0.1):
            try:
                self._samples.append(torch.cuda.utilization() / 100)
            except Exception:  # no nvidia-ml-py, no driver library, no permission
                return


def copy_gb_per_s() -> float | None:
    """GB/s from the GPU into pinned memory; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    source = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return round(8 * source.nbytes / (time.perf_counter() - t0) / 1e9, 1)


def writer_gb_per_s(header: Any, num_tokens: int, folder: Path, num_lanes: int, num_bytes: float) -> float:
    """GB/s of the shard writer alone: rows from memory to finished shards in a folder, by so many threads."""
    from dflash_kit.shard_sink import PendingRow, ShardSink
    from dflash_kit.shards import Row, ShardWriter

    states = torch.randn(num_tokens, header.row_width).bfloat16()
    row = Row(
        id="",
        input_ids=torch.arange(1, num_tokens + 1, dtype=torch.int32) % header.vocab_size,
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        hidden_states=states,
    )
    num_rows = max(2 * num_lanes, int(num_bytes / states.nbytes))
    t0 = time.perf_counter()
    sink = ShardSink(ShardWriter(folder / "alone", header), num_lanes=num_lanes)
    for i in range(num_rows):
        sink.submit(PendingRow(replace(row, id=f"row-{i}"), states.nbytes, None, lambda: True))
    error = sink.finish({})["error"]
    seconds = time.perf_counter() - t0
    shutil.rmtree(folder / "alone")
    if error:
        raise RuntimeError(error)
    return float(f"{num_rows * states.nbytes / seconds / 1e9:.3g}")


def file_system(folder: Path) -> str:
    """Type of the file system that a folder lies on: tmpfs is memory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = os.path.realpath(folder)
    holding = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(holding, key=lambda mount: len(mount[0]))[1]
