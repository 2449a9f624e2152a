"""What an extraction tells the person who started it, in lines on stdout; the last one is JSON."""

import json
import shutil
from typing import Any

from dflash_kit.shards import ShardsHeader

from .places import Place
from .plan import Plan
from .progress import ExtractionProgress, Tally


class Screen:
    """Tells people; ``worker.Events`` tells the process that started this one."""

    def plan(self, plan: Plan, header: ShardsHeader, place: Place) -> None:
        """A few lines before the work."""
        existing = place.folder.absolute()
        while not existing.exists():
            existing = existing.parent
        free_bytes = shutil.disk_usage(existing).free
        layers = ", ".join(map(str, header.target_layer_ids))
        print(f"target   {header.target_name}, taps of layers {layers}, {header.engine} {header.engine_version}")
        if place.description:
            print(place.description)
        print(f"samples  {len(plan.samples)} to do, {plan.num_done} done, dropped: {dict(plan.drops) or 'none'}")
        print(f"tokens   {plan.max_tokens:,} at most, {header.bytes_per_token:,} bytes each")
        print(
            f"disk     {plan.max_bytes(header) / 2**20:,.0f} MiB at most, {free_bytes / 2**20:,.0f} MiB free",
            flush=True,
        )

    def progress(self, plan: Plan) -> Tally:
        """What shows the work while it lasts."""
        return ExtractionProgress(len(plan.samples), sum(plan.drops.values()))

    def say(self, line: str) -> None:
        """A line of its own."""
        print(line, flush=True)

    def done(self, result: dict[str, Any]) -> None:
        """One line about the whole, then ``result`` as JSON."""
        folder, num_rows = result["out"], result["rows"]
        if result["rows_added"] == 0:
            print(f"nothing to add: {folder} holds all {num_rows} rows")
        else:
            print(
                f"{num_rows} rows in {folder}, {result['rows_added']} of them new: {result['tokens_added']:,} tokens in "
                f"{result['elapsed_s']:.0f} s ({result['tokens_per_s']:.0f} tokens/s once the engine was up)"
            )
        print(json.dumps(result), flush=True)
