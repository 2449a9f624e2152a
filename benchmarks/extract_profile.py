"""What the GPU does while states are extracted, and while it only prefills: kernels, and when it waits for what.

    python benchmarks/extract_profile.py --shape 8b --num_prompts 96

Engines with random weights as in `extract_gpu.py`, ours with the null sink (rows come to the host and are let go), one after
the other, and plain ones with the runner that vLLM chooses and with the one that it takes for extraction. Each prefills the prompts once to warm up and once under torch's profiler. Reported: seconds, the time from first to last
kernel, the share of it in which kernels ran, pauses of more than ``--pause_us`` (when, how long, between which kernels), the
dearest kernels, and where the engine's main thread was each millisecond (share of samples by function: on the stack, and on its
top). Copies to the host count as kernels in the list and not as work. Profiling costs host time of its own, so compare
the engines, not these figures with those of `extract_gpu.py`. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from extract_gpu import make_job, start  # noqa: E402
from extract_turns import plain_turn, shards_turn  # noqa: E402
from train_step import SHAPES  # noqa: E402

PROFILED = ("plain", "plain_as_ours", "shards")
COPIES = ("Memcpy DtoH",)
"""Not counted as work of the GPU."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Start, profile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of extract_gpu.py")
    parser.add_argument("--num_prompts", type=int, default=96)
    parser.add_argument("--num_tokens", type=int, default=2048)
    parser.add_argument("--batched_tokens", type=int, default=16384)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--engines", default=",".join(PROFILED), help=f"which of {', '.join(PROFILED)}, in this order")
    parser.add_argument("--gpu_share", type=float, default=0.4, help="share of the GPU's memory for each engine")
    parser.add_argument("--pause_us", type=float, default=50.0)
    parser.add_argument("--limit_s", type=float, default=300.0, help="seconds for the whole; 0: no limit")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args(argv)
    if unknown := set(options.engines.split(",")) - set(PROFILED):
        parser.error(f"--engines names {', '.join(sorted(unknown))}; allowed: {', '.join(PROFILED)}")
    # Functions travel to the engine's process, which is ours alone.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from measuring import Report, attempt

    from dflash_kit.provenance import git_commit
    from extract import vllm_capture

    vllm_capture.prepare_environment()
    report = Report(options.limit_s, options.out, benchmark="extract_profile", shape=options.shape, commit=git_commit())
    with tempfile.TemporaryDirectory() as folder:
        samples, job = make_job(options.shape, options, Path(folder))
        for name in options.engines.split(","):
            report.at(name)
            report.add(**{name: attempt(lambda name=name: profile(name, job, samples, options.pause_us))})  # type: ignore[misc]
        return report.finish()


def profile(name: str, job: Any, samples: list[Any], pause_us: float) -> dict[str, Any]:
    """One engine."""
    engine = start(name, job, samples, {})
    try:

        def turn(number: int) -> dict[str, float]:
            if name == "shards":
                return shards_turn(engine, job, samples, number, None)
            return plain_turn(engine, samples, number)

        turn(0)
        engine.collective_rpc(begin)
        phases = turn(1)
        (found,) = engine.collective_rpc(end, args=(pause_us, list(COPIES)))
        return {"phases_s": phases, **found}
    finally:
        engine.engine_core.shutdown(timeout=1.0)


def begin(worker: Any) -> None:
    """Start the profilers in the engine's process."""
    import sys
    import threading
    from collections import Counter

    import torch

    on_stack, on_top, ended = Counter[str](), Counter[str](), threading.Event()
    main = threading.main_thread().ident

    def look() -> None:
        while not ended.wait(0.001):
            frame, names = sys._current_frames().get(main), []  # type: ignore[arg-type, var-annotated]
            while frame is not None:
                names.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}")
                frame = frame.f_back
            on_stack.update(set(names))
            on_top.update(names[:1])

    thread = threading.Thread(target=look, daemon=True)
    worker.host_samples = (thread, ended, on_stack, on_top)
    thread.start()
    kinds = torch.profiler.ProfilerActivity
    worker.profiler = torch.profiler.profile(activities=[kinds.CUDA if torch.cuda.is_available() else kinds.CPU])
    worker.profiler.__enter__()


def end(worker: Any, pause_us: float, copies: list[str]) -> dict[str, Any]:
    """Stop them and sum up; times in milliseconds."""
    import torch

    thread, ended, on_stack, on_top = worker.host_samples
    ended.set()
    thread.join()
    num_samples = max(1, sum(on_top.values()))
    host = {
        name: {where: round(count / num_samples, 3) for where, count in found.most_common(40)}
        for name, found in (("on_stack", on_stack), ("on_top", on_top))
    }
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    worker.profiler.__exit__(None, None, None)
    events = [e for e in worker.profiler.events() if not on_gpu or "CUDA" in str(e.device_type)]
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in events if e.time_range.end > e.time_range.start
    )
    totals: dict[str, list[float]] = {}
    for begun, stop, kernel in spans:
        total = totals.setdefault(kernel[:90], [0.0, 0])
        total[0] += stop - begun
        total[1] += 1
    work = [span for span in spans if not span[2].startswith(tuple(copies))]
    first, last, before = work[0][0], work[0][0], ""
    busy, pauses = 0.0, []
    for begun, stop, kernel in work:
        if begun - last > pause_us:
            pauses.append((round((last - first) / 1e3, 2), round((begun - last) / 1e3, 2), before[:50], kernel[:50]))
        busy += max(0.0, stop - max(begun, last))
        if stop > last:
            last, before = stop, kernel
    dearest = sorted(totals.items(), key=lambda item: -item[1][0])[:20]
    return {
        "host_samples": num_samples, "host_shares": host,
        "first_to_last_ms": round((last - first) / 1e3, 1), "busy_ms": round(busy / 1e3, 1),
        "paused_ms": round(sum(pause[1] for pause in pauses), 1), "pauses": len(pauses),
        "longest_pauses_at_ms_for_ms": sorted(pauses, key=lambda pause: -pause[1])[:25],
        "kernels_ms_and_calls": {kernel: [round(ms / 1e3, 2), int(calls)] for kernel, (ms, calls) in dearest},
    }  # fmt: skip


if __name__ == "__main__":
    main()
