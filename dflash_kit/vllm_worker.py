"""What the driver of an extraction may ask of vLLM's workers."""

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
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if "take_draft_token_ids" in vars(runner):  # the session before has done it
            return
        runner.take_draft_token_ids = lambda: None
        # 0.32 goes the way of drafts without any as well: that costs two copies of the logits, and ends the engine of a
        # CPU where only top_k is set (the largest of no values is asked for).
        sample = runner._sample
        runner._sample = lambda logits, drafts: sample(logits, drafts if drafts and drafts.max_spec_len else None)
        # What the drafter looks up for its next draft, in a Python loop over all requests; without asynchronous scheduling
        # nothing else reads it.
        if getattr(runner, "valid_sampled_token_count_event", None) is None:
            runner.drafter.prepare_next_token_ids_padded = lambda *_: (None, None)
