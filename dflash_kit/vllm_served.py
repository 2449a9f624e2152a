"""The connector of a running server: one client after another has its rows written into the server's shards folder.

As ``vllm_connector``, but nothing is opened before a client asks, and the folder is released when it has finished.
A client opens a session; while it lasts the requests whose ``kv_transfer_params`` hold a ``sample_id`` become rows, and
all others are served as ever. A new session takes over from an earlier one, whose client may have been killed: rows that
come late for it are kept, and none is written twice. Clients reach this by HTTP through ``vllm_routes``.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from dflash_kit.driver_watch import end_with_driver
from dflash_kit.shard_share import Share
from dflash_kit.vllm_connector import FinishedRequest, ShardConnector
from dflash_kit.vllm_version import installed_vllm
from dflash_kit.vllm_worker import WriterAccess

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request


class ServedShardConnector(ShardConnector):
    """See the module's docstring; the methods for sessions return None on ranks that do not write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num_engines = self._vllm_config.parallel_config.data_parallel_size
        if num_engines > 1:
            raise ValueError(
                f"data_parallel_size is {num_engines}, but one engine alone can write a folder; start servers"
            )
        self._session = 0
        self._captured: set[str] = set()
        self._repeated: list[tuple[str, int]] = []

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As in the base class; anybody may send anything to a server, so what is malformed is no row."""
        if not _is_well_formed(request.kv_transfer_params or {}, request.num_prompt_tokens):
            return False, None
        return super().request_finished(request, block_ids)

    def _watch_driver(self) -> None:
        """Who serves is known when the first client asks."""

    def _start(self) -> None:
        """Nothing is opened yet; the header names the vLLM that serves, wherever the command was printed."""
        self._header = replace(self._header, engine_version=installed_vllm() or "unknown")

    def describe(self) -> dict[str, Any] | None:
        """What the server writes, and where: ``header``, ``folder``, ``rank`` and ``world_size``."""
        if self._copier is None:
            return None
        share = self._share
        return {
            "header": self._header.to_dict(),
            "folder": self._extra["folder"],
            "rank": share.rank,
            "world_size": share.world_size,
        }

    def open_session(self, server_pid: int) -> dict[str, Any] | None:
        """Begin a session: rows of earlier ones become durable, and the folder is opened if it is not.

        Args:
            server_pid: process whose end must end this worker, too.

        Returns:
            ``error`` (None: all is well), and then ``session``, ``notes`` on what was mended, and ``manifest_bytes`` and
            ``manifest_sha256`` of the share's manifest, which only grows: by these a client knows the folder.
        """
        if self._session == 0:
            end_with_driver(server_pid, self._end)
        self._session += 1
        if self._copier is None:
            return None
        self._repeated, notes = [], []
        if self._sink is not None and self._sink.flush()["error"] is not None:
            super().finish(None)  # what has failed may work now, with room on the disk
        if self._sink is None:
            self._error = None
            writer = self._open_sink()
            if writer is None:
                return {"error": self._error}
            self._captured, notes = set(writer.done_ids), writer.notes
        manifest = Path(self._extra["folder"]) / self._share.manifest_name
        lines = manifest.read_bytes()
        found = {"manifest_bytes": len(lines), "manifest_sha256": hashlib.sha256(lines).hexdigest()}
        return {"error": None, "session": self._session, "notes": notes, **found}

    def session_status(self, session: int) -> dict[str, Any] | None:
        """As ``status``, for the client of this session."""
        if self._copier is None:
            return None
        return self._taken_over(session) or self._with_repeated(self.status())

    def finish_session(self, session: int, summary: dict[str, Any] | None) -> dict[str, Any] | None:
        """As ``finish``: the shards are finished and the folder is released."""
        if self._copier is None:
            return None
        return self._taken_over(session) or self._with_repeated(self.finish(summary))

    @property
    def _share(self) -> Share:
        writer = self._extra["writer"]
        return Share(writer["rank"], writer["world_size"])

    def _taken_over(self, session: int) -> dict[str, Any] | None:
        if session == self._session:
            return None
        error = "another client has begun to extract through this server; let one run at a time"
        return {"accepted": [], "error": error, "bytes": 0, "pending_bytes": 0}

    def _with_repeated(self, status: dict[str, Any] | None) -> dict[str, Any]:
        status = status or {"accepted": [], "error": "the session has ended", "bytes": 0, "pending_bytes": 0}
        repeated, self._repeated = self._repeated, []
        return {**status, "accepted": [*status["accepted"], *repeated]}

    def _capture(self, requests: list[FinishedRequest]) -> "dict[str, Callable[[], bool]]":
        new = []
        for request in requests:
            if self._sink is not None and request.sample_id in self._captured:
                # A client that was killed had asked for it, too.
                self._repeated.append((request.sample_id, len(request.token_ids)))
            else:
                self._captured.add(request.sample_id)
                new.append(request)
        return {request.request_id: lambda: True for request in requests} | super()._capture(new)


class SessionAccess(WriterAccess):
    """Mixed into vLLM's worker class (``worker_extension_cls``); ``vllm_routes`` calls it by ``collective_rpc``."""

    def shard_session_describe(self) -> dict[str, Any] | None:
        """See ``ServedShardConnector.describe``."""
        return get_kv_transfer_group().describe()

    def shard_session_open(self, server_pid: int) -> dict[str, Any] | None:
        """See ``ServedShardConnector.open_session``; no draft tokens are verified from then on."""
        self.skip_draft_tokens()
        return get_kv_transfer_group().open_session(server_pid)

    def shard_session_status(self, session: int) -> dict[str, Any] | None:
        """See ``ServedShardConnector.session_status``."""
        return get_kv_transfer_group().session_status(session)

    def shard_session_finish(self, session: int, summary: dict[str, Any] | None) -> dict[str, Any] | None:
        """See ``ServedShardConnector.finish_session``."""
        return get_kv_transfer_group().finish_session(session, summary)


def _is_well_formed(params: dict[str, Any], num_prompt_tokens: int) -> bool:
    """Whether a request's parameters name a sample and, for a given response, ranges inside the prompt."""
    sample_id, spans = params.get("sample_id"), params.get("loss_spans")
    if not isinstance(sample_id, str) or not sample_id:
        return False
    if params.get("include_output_tokens"):
        return True
    return isinstance(spans, list) and all(
        isinstance(span, list)
        and len(span) == 2
        and all(type(end) is int for end in span)
        and 0 <= span[0] < span[1] <= num_prompt_tokens
        for span in spans
    )
