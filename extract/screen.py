"""What an extraction tells the person who started it, in lines on stdout; the last one is JSON."""

import json
from typing import Any

from dflash_kit.errors import free_bytes
from dflash_kit.shards import ShardsHeader

from .estimate import Rates
from .places import Place
from .plan import Plan
from .progress import PROGRESS, Tally


class Screen:
    """Tells people; ``worker.Events`` tells the process that started this one.

    Args:
        progress: how the work is shown while it lasts, one of ``PROGRESS``.
    """

    def __init__(self, progress: str = "text") -> None:
        self._shown = PROGRESS[progress]

    def plan(self, plan: Plan, header: ShardsHeader, place: Place) -> None:
        """A few lines before the work."""
        layers = ", ".join(map(str, header.target_layer_ids))
        print(f"target   {header.target_name}, taps of layers {layers}, {header.engine} {header.engine_version}")
        if place.description:
            print(place.description)
        print(f"samples  {len(plan.samples)} to do, {plan.num_done} done, dropped: {dict(plan.drops) or 'none'}")
        print(f"tokens   {plan.max_tokens:,} at most, {header.bytes_per_token:,} bytes each")
        print(
            f"disk     {plan.max_bytes(header) / 2**20:,.0f} MiB at most, {free_bytes(place.folder) / 2**20:,.0f} MiB free",
            flush=True,
        )

    def time(self, least_s: float, num_weights: int, rates: Rates) -> None:
        """A line about the time that a plan takes at least."""
        duration = f"{least_s:.2g} s" if least_s < 100 else f"{least_s / 60:,.0f} min"
        print(
            f"time     {duration} or more for so many tokens: each passes {num_weights / 1e6:,.1f} M weights, products reach "
            f"{rates.flops_per_s / 1e9:,.0f} GFLOP/s here; the engine's start, attention and disk come on top",
            flush=True,
        )

    def progress(self, plan: Plan, num_gpus: int) -> Tally:
        """What shows the work while it lasts."""
        return self._shown(len(plan.samples), sum(plan.drops.values()), num_gpus=num_gpus)

    def say(self, line: str) -> None:
        """A line of its own."""
        print(line, flush=True)

    def done(self, result: dict[str, Any]) -> None:
        """One line about the whole, then ``result`` as JSON."""
        folder, num_rows = result["out"], result["rows"]
        if result["rows_added"] == 0:
            print(f"nothing to add: {folder} holds all {num_rows} rows")
        else:
            gpu = f", GPU {result['gpu_percent']:.0f} % on average" if "gpu_percent" in result else ""
            print(
                f"{num_rows} rows in {folder}, {result['rows_added']} of them new: {result['tokens_added']:,} tokens in "
                f"{result['elapsed_s']:.0f} s ({result['tokens_per_s']:.0f} tokens/s, "
                f"{result['rows_per_s']} rows/s once the engine was up), {result['bytes'] / 2**20:,.1f} MiB in shards, dropped: "
                f"{result['dropped'] or 'none'}{gpu}"
            )
        print(json.dumps(result), flush=True)
