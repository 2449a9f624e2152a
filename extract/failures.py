"""Samples at which an engine fails: left out and counted if that was asked for, else the run stops in order."""

import sys
from typing import Any

from dflash_kit.errors import KitError

from .prompts import NUM_NAMED_ERRORS, Sample

DROP_REASON = "engine_failed"
# So many in a row are no fault of the samples: after some CUDA errors, for one, a process can compute nothing any more.
MAX_IN_A_ROW = 8


class Failures:
    """Notes failed samples, and when the engine should be given no more.

    Args:
        skip: leave them out; False: the first one ends the run, once what is in flight is in finished shards.
    """

    def __init__(self, *, skip: bool) -> None:
        self.num_samples = 0
        self._skip = skip
        self._error: KitError | None = None
        self._num_in_a_row = self._num_told = 0

    @property
    def must_stop(self) -> bool:
        """Whether no more samples should be given to the engine."""
        return self._error is not None

    def take(self, sample: Sample, reason: object) -> None:
        """Note a sample at which the engine failed; ``reason`` is what it said."""
        self.num_samples += 1
        self._num_in_a_row += 1
        said = " ".join(str(reason).split()) or type(reason).__name__
        what = f"{sample.source}: the engine failed at this sample ({said})"
        if not self._skip:
            self._error = self._error or KitError(
                f"{what}; what was in flight with it is in finished shards. Leave the line out, or run again with "
                "--skip_errors, which leaves such samples out and counts them in the manifest"
            )
        elif self._num_in_a_row >= MAX_IN_A_ROW:
            self._error = KitError(
                f"{what}, as at the {MAX_IN_A_ROW - 1} before it: that is no fault of the samples. "
                "Finished shards are intact; mend the cause and run the same command again to resume"
            )
        elif self.num_samples <= NUM_NAMED_ERRORS:
            print(f"skipped: {what}", file=sys.stderr, flush=True)

    def end_row(self) -> None:
        """A sample was done: the engine is sound."""
        self._num_in_a_row = 0

    def take_count(self) -> int:
        """Failed samples since the last call."""
        count, self._num_told = self.num_samples - self._num_told, self.num_samples
        return count

    def settle(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The summary for the manifest, with these samples among the dropped; raises the error that ended the run."""
        if self._error is not None:
            raise self._error
        if not self.num_samples:
            return summary
        return {**summary, "dropped": {**summary["dropped"], DROP_REASON: self.num_samples}}
