"""What the driver of an extraction may ask of vLLM's workers, and what ends them when the driver is gone."""

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group


class WriterAccess:
    """Mixed into vLLM's worker class (``worker_extension_cls``); the driver calls it by ``collective_rpc``."""

    def shard_writer_status(self) -> dict[str, Any] | None:
        """See ``ShardConnector.status``."""
        return get_kv_transfer_group().status()

    def shard_writer_flush(self) -> dict[str, Any] | None:
        """See ``ShardConnector.flush``."""
        return get_kv_transfer_group().flush()

    def shard_writer_finish(self, summary: dict[str, Any] | None) -> dict[str, Any] | None:
        """See ``ShardConnector.finish``."""
        return get_kv_transfer_group().finish(summary)

    def skip_draft_tokens(self) -> None:
        """Verify no draft tokens (for an engine without asynchronous scheduling).

        The extraction method "drafts" each sampled token once more, so that every decoding step runs two tokens a
        request; see ``extract.vllm_capture.start_engine`` for what is wrong with that.
        """
        self.model_runner.take_draft_token_ids = lambda: None  # type: ignore[attr-defined]


def end_with_driver(driver_pid: int, finish: Callable[[], None]) -> None:
    """End this worker when the driver is gone: a killed driver must not leave an engine that holds the folder.

    Args:
        driver_pid: process id of the driver; on another host or an old kernel nothing is watched.
        finish: called first, to save what the writer holds.
    """
    try:
        descriptor = os.pidfd_open(driver_pid)
    except (AttributeError, OSError):
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        finish()
        engine = multiprocessing.parent_process()
        if engine is not None and engine.pid not in (None, driver_pid):
            with suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGTERM)
        os._exit(1)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()
