"""Copies of requests' hidden states out of vLLM's paged cache, beside the running model.

On a GPU everything is queued on a stream of its own, in pieces of bounded size, and the states are checked there.

Shape legend: N blocks of the cache, S tokens per block, L captured layers (the taps, and the last hidden state where it
is wanted), K taps, D hidden size, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_kit.shard_checks import TapInspection
from dflash_kit.shard_format import ShardsHeader
from dflash_kit.shard_states import split_captured, stored_parts

# Device memory that one copy's gathered states take at a time: vLLM has claimed nearly all there is.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CopiedStates:
    """A request's states on, or on their way to, the host."""

    parts: dict[str, Tensor]
    """On the host, as they are stored, under their names in ``Row``: hidden_states (T, K * D) and so on."""
    is_done: Callable[[], bool] = lambda: True
    """Whether the copy is complete."""
    wait: Callable[[], object] | None = None
    """Waits for it; None: complete."""
    taps_are_sound: Tensor | None = None
    """What the GPU found, on the host once the copy is complete."""

    @property
    def num_bytes(self) -> int:
        """Host memory that they hold."""
        return sum(part.nbytes for part in self.parts.values())


class StateCopier:
    """Copies of whole requests out of one worker's cache, in the form in which shards store them.

    Args:
        cache_NSLD: the cache of hidden states.
        header: of the shards.
    """

    def __init__(self, cache_NSLD: Tensor, header: ShardsHeader) -> None:
        self._cache_NSLD = cache_NSLD
        self._header = header
        # Quantising makes two copies in float32 on the way.
        self._piece_bytes = PIECE_BYTES // 4 if header.dtype == "fp8" else PIECE_BYTES
        self._stream: Any = torch.cuda.Stream() if cache_NSLD.is_cuda else None

    def copy(self, block_ids: list[int], num_tokens: int) -> CopiedStates:
        """Gather the first ``num_tokens`` tokens in these blocks and bring them to the host."""
        block_size = self._cache_NSLD.shape[1]
        index_N = torch.tensor(block_ids[: -(-num_tokens // block_size)])  # the request may hold a spare block
        if self._stream is None:
            return CopiedStates(self._to_parts(self._gather(index_N, num_tokens)))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            index_N = index_N.pin_memory().to(self._cache_NSLD.device, non_blocking=True)
            inspection, host = TapInspection(), dict[str, Tensor]()
            num_blocks = max(1, self._piece_bytes // self._cache_NSLD[0].nbytes)
            for start in range(0, len(index_N), num_blocks):
                first = start * block_size
                states_TLD = self._gather(index_N[start : start + num_blocks], num_tokens - first)
                # Rounded to the coarsest type that is stored bit by bit, a fault cannot be missed in any.
                inspection.add(states_TLD.to(torch.bfloat16))
                for name, part in self._to_parts(states_TLD).items():
                    if name not in host:
                        host[name] = torch.empty(num_tokens, *part.shape[1:], dtype=part.dtype, pin_memory=True)
                    host[name][first : first + len(part)].copy_(part, non_blocking=True)
            sound = torch.empty((), dtype=torch.bool, pin_memory=True)
            sound.copy_(inspection.result(), non_blocking=True)
            # Writers wait for it; a spinning thread each would take cores from the engine.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return CopiedStates(host, event.query, event.synchronize, sound)

    def _gather(self, index_N: Tensor, num_tokens: int) -> Tensor:
        """States (T, L, D) of the tokens in these blocks, at most ``num_tokens`` of them."""
        return self._cache_NSLD.index_select(0, index_N).flatten(0, 1)[:num_tokens]

    def _to_parts(self, states_TLD: Tensor) -> dict[str, Tensor]:
        return stored_parts(*split_captured(states_TLD.flatten(1), self._header), self._header)
