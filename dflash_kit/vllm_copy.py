"""Copies of requests' hidden states out of vLLM's paged cache, beside the running model.

On a GPU everything is queued on a stream of its own, in pieces of bounded size, and the states are checked there. Short
requests that finished together share a piece: with small targets the kernels' launches would cost more than the copies.

Shape legend: N blocks of the cache, S tokens per block, L captured layers (the taps, and the last hidden state where it
is wanted), K taps, D hidden size, T tokens, R requests.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dflash_kit.shard_checks import sound_tokens, varying_rows
from dflash_kit.shard_format import ShardsHeader
from dflash_kit.shard_states import split_captured, stored_parts

# Device memory that one copy's gathered states take at a time: vLLM has claimed nearly all there is.
PIECE_BYTES = 64 << 20
# A request shares its piece if it has at least so many blocks: the unused end of its last one is copied along.
LEAST_SHARING_BLOCKS = 4

Place = tuple[list[int], int]
"""Blocks that hold a request, in order, and its tokens; the last block may hold fewer than S."""


@dataclass(frozen=True, slots=True)
class CopiedStates:
    """A request's states on, or on their way to, the host."""

    parts: dict[str, Tensor]
    """On the host, as they are stored, under their names in ``Row``: hidden_states (T, K * D) and so on."""
    is_done: Callable[[], bool] = lambda: True
    """Whether the copy is complete."""
    wait: Callable[[], object] | None = None
    """Waits for it; None: complete."""
    taps_are_sound: Callable[[], bool] = lambda: False
    """Whether the GPU found nothing wrong; to be asked once the copy is complete."""

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
        piece_bytes = PIECE_BYTES // 4 if header.dtype == "fp8" else PIECE_BYTES
        self._piece_blocks = max(1, piece_bytes // cache_NSLD[0].nbytes)
        self._stream: Any = torch.cuda.Stream() if cache_NSLD.is_cuda else None

    def copy(self, requests: Iterable[Place]) -> Iterator[CopiedStates]:
        """Gather each request's tokens and bring them to the host, as the results are taken.

        Args:
            requests: where each lies; there may be a spare block.
        """
        block_size = self._cache_NSLD.shape[1]
        places = [(block_ids[: -(-num_tokens // block_size)], num_tokens) for block_ids, num_tokens in requests]
        if self._stream is None:
            for place in places:
                yield CopiedStates(self._to_parts(self._gather(torch.tensor(place[0]))[: place[1]]))
            return
        for together in self._packs(places):
            yield from self._copy_together(together)

    def _packs(self, places: list[Place]) -> Iterator[list[Place]]:
        """Neighbours that share a piece; long requests, and very short ones, by themselves."""
        pack, num_blocks = list[Place](), 0
        for block_ids, num_tokens in places:
            shares = len(block_ids) >= LEAST_SHARING_BLOCKS
            if pack and (not shares or num_blocks + len(block_ids) > self._piece_blocks):
                yield pack
                pack, num_blocks = [], 0
            pack.append((block_ids, num_tokens))
            num_blocks += len(block_ids)
            if not shares:
                yield pack
                pack, num_blocks = [], 0
        if pack:
            yield pack

    def _copy_together(self, places: list[Place]) -> Iterator[CopiedStates]:
        """The states of all in one buffer, in which each begins with a block."""
        block_size = self._cache_NSLD.shape[1]
        starts = [block_size * n for n in accumulate((len(ids) for ids, _ in places), initial=0)]
        num_slots = starts[len(places) - 1] + places[-1][1]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            index_N, first_R, last_R, offset_R = self._index(places)
            host = dict[str, Tensor]()
            for start in range(0, len(index_N), self._piece_blocks):
                first = start * block_size
                states_TLD = self._gather(index_N[start : start + self._piece_blocks])[: num_slots - first]
                # Rounded to the coarsest type that is stored bit by bit, a fault cannot be missed in any.
                sound_T = sound_tokens(states_TLD.to(torch.bfloat16))
                for name, part in (self._to_parts(states_TLD) | {"sound": sound_T}).items():
                    if name not in host:
                        host[name] = self._on_host((num_slots, *part.shape[1:]), part.dtype)
                    host[name][first : first + len(part)].copy_(part, non_blocking=True)
            first_RLD, last_RLD = self._cache_NSLD[first_R, 0], self._cache_NSLD[last_R, offset_R]
            varies_R = self._on_host((len(places),), torch.bool)
            varies_R.copy_(varying_rows(first_RLD.to(torch.bfloat16), last_RLD.to(torch.bfloat16)), non_blocking=True)
            done = self._mark()
        sound_T = host.pop("sound")
        for start, (_, num_tokens), varies in zip(starts, places, varies_R, strict=False):
            rows = slice(start, start + num_tokens)
            parts = {name: part[rows] for name, part in host.items()}
            yield CopiedStates(parts, *done, lambda s=sound_T[rows], v=varies: bool(s.all() & v))  # type: ignore[misc]

    def _index(self, places: list[Place]) -> tuple[Tensor, ...]:
        """On the device: blocks (N,), and of each request its first block, its last one and the last token in that (R,) each."""
        block_size = self._cache_NSLD.shape[1]
        blocks = [block for block_ids, _ in places for block in block_ids]
        ends = [(ids[0], ids[-1], (num_tokens - 1) % block_size) for ids, num_tokens in places]
        index = torch.tensor([*blocks, *(value for column in zip(*ends, strict=True) for value in column)])
        if self._stream is not None:
            index = index.pin_memory().to(self._cache_NSLD.device, non_blocking=True)
        return index.split([len(blocks), *3 * [len(places)]])

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def _mark(self) -> tuple[Callable[[], bool], Callable[[], object] | None]:
        """Tests and waits for all that is queued."""
        if self._stream is None:
            return lambda: True, None
        # Writers wait for it; a spinning thread each would take cores from the engine.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event.query, event.synchronize

    def _gather(self, index_N: Tensor) -> Tensor:
        """States (N * S, L, D) of the tokens in these blocks."""
        return self._cache_NSLD.index_select(0, index_N).flatten(0, 1)

    def _to_parts(self, states_TLD: Tensor) -> dict[str, Tensor]:
        return stored_parts(*split_captured(states_TLD.flatten(1), self._header), self._header)
