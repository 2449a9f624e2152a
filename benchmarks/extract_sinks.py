"""What vLLM's worker writes to in `extract_gpu.py`: shards in a folder, or nothing, changed between turns of one engine.

Loaded by vLLM by name, in place of `dflash_kit.vllm_connector`.
"""

from typing import Any

from dflash_kit.shard_format import Row, ShardsHeader
from dflash_kit.shard_sink import ShardSink
from dflash_kit.shard_writer import ShardWriter
from dflash_kit.vllm_connector import ShardConnector


class NullWriter:
    """Takes rows as a ``ShardWriter`` does and lets them go: neither checked nor hashed, copied nor stored."""

    is_waiting = False
    max_lanes = None

    def __init__(self, header: ShardsHeader) -> None:
        self.num_bytes = 0
        self._bytes_per_token = header.bytes_per_token

    def add(self, row: Row, *, lane: int = 0, taps_are_sound: bool = False) -> None:
        """Count a row."""
        self.num_bytes += len(row.input_ids) * self._bytes_per_token

    def flush(self) -> None:
        """Nothing is kept."""

    def flush_lane(self, lane: int) -> None:
        """Nothing is kept."""

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Nothing is kept."""

    def stop_waiting(self) -> None:
        """Nothing ever waits."""

    def close(self) -> None:
        """Nothing is open."""


class SwitchableConnector(ShardConnector):
    """Ours, with a sink that ``finish({"switch_to": folder})`` replaces; an empty name is the null sink."""

    _switched_to: str | None = None

    def _open_sink(self) -> ShardWriter | None:
        if self._switched_to != "":
            self._extra = {**self._extra, "folder": self._switched_to or self._extra["folder"]}
            return super()._open_sink()
        self._sink = ShardSink(
            NullWriter(self._header),  # type: ignore[arg-type]
            max_pending_bytes=self._extra["max_pending_bytes"],
            num_lanes=self._num_lanes,
        )
        return None

    def finish(self, summary: dict[str, Any] | None) -> dict[str, Any] | None:
        """See ``ShardConnector.finish``."""
        if summary is None or "switch_to" not in summary:
            return super().finish(summary)
        status = super().finish(None)
        if self._copier is not None:
            self._switched_to = summary["switch_to"]
            self._open_sink()
        return status
