"""A vLLM KV connector that hands tapped hidden states straight to a shard writer inside the worker.

vLLM's ``extract_hidden_states`` method stores the taps of every token in a paged cache group. When a
request finishes, its scheduler-side connector notes which blocks hold it; with the next step the
worker-side connector gathers them, copies them to the host beside the running model, and queues the row for
the writer thread. No file per request, no second pass. Loaded by name:
``kv_connector_module_path="dflash_kit.vllm_connector"``, class ``ShardConnector``; the driver talks to the
writer through ``worker_extension_cls="dflash_kit.vllm_worker.WriterAccess"``.

A request becomes a row when its ``kv_transfer_params`` hold ``sample_id``. With ``include_output_tokens``
the row is the prompt and the response (whose last token has no states and becomes ``next_token``), else the
prompt, supervised where ``loss_spans`` say. vLLM counts layers from the embeddings: its id k + 1 is our tap
k. The last hidden state is the output of the last layer, which vLLM hands out before the final norm.

Written for vLLM 0.26 (CUDA) and 0.32 (CPU), which differ in the layout of the cache. Shape legend: see
``vllm_copy``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import version
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend, CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from dflash_kit.driver_watch import end_with_driver
from dflash_kit.errors import KitError
from dflash_kit.shard_format import NO_NEXT_TOKEN, Row, ShardsHeader
from dflash_kit.shard_sink import PendingRow, ShardSink, num_writer_lanes
from dflash_kit.shard_writer import ShardWriter
from dflash_kit.vllm_calls import CLOSE_S
from dflash_kit.vllm_copy import StateCopier

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Ways to finish with a complete response; aborted, ignored and failed requests leave no row.
COMPLETE = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}
# 0.26 keeps a block's tokens in front of its layers (N, S, L, D), 0.32 behind them (N, L, S, D).
TOKENS_BEFORE_TAPS = "get_kv_cache_shape" in vars(CacheOnlyAttentionBackend)


@dataclass(slots=True)
class FinishedRequest:
    """What the scheduler knows of a request whose states are to be captured."""

    request_id: str
    sample_id: str
    token_ids: list[int]
    """Tokens that have states."""
    next_token: int
    """The response's last token, which has none; -1 when the response was given."""
    loss_spans: list[list[int]]
    """Supervised token ranges [start, end)."""
    block_ids: list[int]
    """Blocks of the hidden-states group, in order."""


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """From the scheduler to the workers, with one step."""

    requests: list[FinishedRequest] = field(default_factory=list)


class ShardConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; see the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group_id, self._block_size = _hidden_states_group(kv_cache_config)
        # Scheduler side
        self._finished: list[FinishedRequest] = []
        # Worker side
        self._copier: StateCopier | None = None
        self._sink: ShardSink | None = None
        self._error: str | None = None
        self._copies: dict[str, Callable[[], bool]] = {}

    # Scheduler side

    def get_finished_count(self) -> int:
        """Rank 0 alone reports a finished copy; waiting for every rank would leak the blocks."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """All taps of a token side by side in memory."""
        return "NHD" if TOKENS_BEFORE_TAPS else "LBNHC"

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """The hidden-states cache must not be merged with the target's (asked by 0.26)."""
        return False

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Nothing is ever loaded, so that hashes of blocks are for shared prefixes alone.

        Since there is a connector, vLLM would keep them in any case, which it looks after at every token.
        """
        if not self._vllm_config.cache_config.enable_prefix_caching:
            request._block_hasher = None

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> FinishedRequests:
        """Hand the requests that finished since the last step to the workers."""
        requests, self._finished = self._finished, []
        return FinishedRequests(requests)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the request's blocks until its states are copied, if it is one of ours and complete."""
        blocks = block_ids[self._group_id] if self._group_id < len(block_ids) else []
        return self.request_finished(request, blocks)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same, for the blocks of the hidden-states group."""
        params = request.kv_transfer_params or {}
        if "sample_id" not in params or request.status.name not in COMPLETE or not block_ids:
            return False, None
        self._finished.append(_finished_request(request, params, list(block_ids)))
        return True, None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of hidden states and open the shards, on rank 0 only; every rank ends with the driver."""
        self._extra = self._kv_transfer_config.kv_connector_extra_config
        self._watch_driver()  # a rank that waits for one that is gone would do so for ever
        if TOKENS_BEFORE_TAPS and torch.cuda.is_available():
            from dflash_kit.vllm_state_kernels import use_store_states

            use_store_states()
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise RuntimeError(f"expected one layer that caches hidden states, found {list(layers)}")
        cache = kv_caches[next(iter(layers))]
        cache_NSLD = cache if TOKENS_BEFORE_TAPS else cache.transpose(1, 2)
        self._header = ShardsHeader.from_dict(self._extra["header"])
        expected = (self._block_size, self._extra["num_captured_layers"], self._header.hidden_size)
        if tuple(cache_NSLD.shape[1:]) != expected:
            raise RuntimeError(f"hidden-states cache has blocks {cache_NSLD.shape[1:]}, not {expected}")
        self._copier = StateCopier(cache_NSLD, self._header)
        self._num_lanes = num_writer_lanes() if cache_NSLD.is_cuda else 1
        self._start()

    def _watch_driver(self) -> None:
        end_with_driver(self._extra["driver_pid"], self._end)

    def _end(self) -> None:
        """What is left to do without a driver; ranks that do not write leave that much time to the one that does."""
        if self._copier is None:
            time.sleep(CLOSE_S)
        else:
            self.shutdown()

    def _start(self) -> None:
        """Open the shards, which are written for the driver that has started this engine."""
        self._open_sink()

    def _open_sink(self) -> ShardWriter | None:
        extra = self._extra
        try:
            writer = ShardWriter(extra["folder"], self._header, **extra["writer"])
            lanes = min(self._num_lanes, writer.max_lanes or self._num_lanes)
            self._sink = ShardSink(writer, max_pending_bytes=extra["max_pending_bytes"], num_lanes=lanes)
        except KitError as error:  # reaches the driver with its first status call
            self._error = str(error)
            return None
        return writer

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The states are in the cache already; whole requests are copied in ``get_finished``."""

    def wait_for_save(self) -> None:
        """Copies run beside the next steps; their blocks are held until ``get_finished`` reports them."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the copies of newly finished requests.

        vLLM calls this before it queues the step's kernels, so that the copies wait for earlier steps only and run
        beside this one.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._copier is not None and isinstance(connector_metadata, FinishedRequests):
            self._copies |= self._capture(connector_metadata.requests)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report the requests whose copy is complete: their blocks may be reused."""
        done = {request_id for request_id, is_done in self._copies.items() if is_done()}
        for request_id in done:
            del self._copies[request_id]
        return done or None, None

    def _capture(self, requests: list[FinishedRequest]) -> dict[str, Callable[[], bool]]:
        """Queue the requests' rows; returns a test for "its blocks may be reused" by id of the request."""
        tests: dict[str, Callable[[], bool]] = {request.request_id: lambda: True for request in requests}
        if self._sink is None or self._copier is None:
            return tests
        whole = []
        for request in requests:
            if self._lacks_states(request):
                self._sink.fail(
                    f"sample {request.sample_id}: vLLM {version.__version__} kept no states for part of its {len(request.token_ids)} "
                    "tokens, as versions do that cannot restore shared prefixes; set prefix_caching false"
                )
            else:
                whole.append(request)
        copies = self._copier.copy((request.block_ids, len(request.token_ids)) for request in whole)
        for request, copied in zip(whole, copies, strict=True):
            tests[request.request_id] = copied.is_done
            self._sink.submit(
                PendingRow(_row(request, copied.parts), copied.num_bytes, copied.wait, copied.taps_are_sound)
            )
        return tests

    def _lacks_states(self, request: FinishedRequest) -> bool:
        """Whether part of its tokens has no block of states, or vLLM's placeholder (block 0) for one."""
        needed = -(-len(request.token_ids) // self._block_size)
        return len(request.block_ids) < needed or 0 in request.block_ids[:needed]

    def status(self) -> dict[str, Any] | None:
        """The sink's status; None on ranks that do not write."""
        if self._sink is not None:
            return self._sink.status()
        return {"accepted": [], "error": self._error, "bytes": 0, "pending_bytes": 0} if self._error else None

    def flush(self) -> dict[str, Any] | None:
        """Make the rows captured up to now durable; returns the status."""
        return self.status() if self._sink is None else self._sink.flush()

    def finish(self, summary: dict[str, Any] | None) -> dict[str, Any] | None:
        """Finish the shards; returns the last status."""
        if self._sink is None:
            return self.status()
        sink, self._sink = self._sink, None
        return sink.finish(summary)

    def shutdown(self) -> None:
        """Finish the shards when the engine goes down in order."""
        self.finish(None)


def _hidden_states_group(kv_cache_config: "KVCacheConfig") -> tuple[int, int]:
    """Index and block size of the cache group that holds hidden states.

    Hybrid targets have a group of their own for it; elsewhere one group may hold it beside the target's
    layers.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not found and len(groups) == 1:
        found = [0]
    if len(found) != 1:
        raise ValueError(f"{len(found)} of {len(groups)} cache groups hold hidden states; exactly one must")
    return found[0], groups[found[0]].kv_cache_spec.block_size


def _row(request: FinishedRequest, parts: dict[str, Tensor]) -> Row:
    mask = torch.zeros(len(request.token_ids), dtype=torch.bool)
    for start, end in request.loss_spans:
        mask[start:end] = True
    return Row(
        id=request.sample_id,
        input_ids=torch.tensor(request.token_ids, dtype=torch.int32),
        loss_mask=mask,
        next_token=request.next_token,
        **parts,
    )


def _finished_request(request: "Request", params: dict[str, Any], block_ids: list[int]) -> FinishedRequest:
    prompt = list(request.prompt_token_ids)
    if params.get("include_output_tokens"):
        *token_ids, next_token = request.all_token_ids
        spans = [[len(prompt), len(token_ids)]]
    else:
        token_ids, next_token, spans = prompt, NO_NEXT_TOKEN, params["loss_spans"]
    return FinishedRequest(
        request_id=request.request_id,
        sample_id=params["sample_id"],
        token_ids=list(token_ids),
        next_token=int(next_token),
        loss_spans=spans,
        block_ids=block_ids,
    )
