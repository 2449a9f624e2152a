"""Several prompts at a time on an NVIDIA GPU: one CUDA graph a round for all of them.

Every prompt has a *lane*: its part of the caches, its length, its tree. Rounds of all lanes are launched one ahead of what the host
has read, as `fused_engine` does it, until a response ends. Then the rounds in flight are read, its lane is given to the next prompt
that waits, and on it goes. When none waits and half of the lanes are empty, the rest moves together and a graph of half the width takes over.

Seconds run only between the first launch and the last read of such a stretch: prompts are read, graphs are captured and results are taken
away between two of them. A round's seconds are shared by the responses in it, see `batch_response`.

Shape legend: N lanes.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dflash_kit.acceptance import CHAIN
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError

from .batch_response import BatchResponse, Request
from .cuda_graphs import shared_pool
from .engine import Generation, Method, require_context, require_finite
from .float32_pass import PlainLogits, plain_logits
from .fused_drafter import FusedDrafter
from .fused_engine import cut_accepted, tokens_that_fit
from .fused_round import FusedRound, Lanes, Telling
from .fused_target import FusedTarget, padded_rows
from .row_sampler import seed_device
from .sampling import GREEDY, Sampling, choose_tokens

STAGES = ("round",)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A round that was launched: what it will tell, and whose lane was which."""

    told: Telling
    holders: tuple[BatchResponse | None, ...]


class FusedBatchEngine:
    """Decodes up to ``batch_size`` responses at a time; arguments as for ``FusedEngine``.

    Above temperature 0 all lanes draw from the device's generator, seeded by the first request of a call: what is drawn for a response
    depends on its neighbours, its distribution does not.
    """

    def __init__(
        self,
        model: Any,
        drafter: Drafter,
        *,
        eos_token_ids: Collection[int],
        max_context: int,
        max_budget: int,
        batch_size: int,
    ) -> None:
        self._model = model
        self.batch_size, self.eos_token_ids = batch_size, frozenset(eos_token_ids)
        self.max_context = min(max_context, tokens_that_fit(model, drafter) // batch_size)
        rows = padded_rows(max(max_budget, drafter.config.num_draft_tokens) + 1)
        self.target = FusedTarget(model, drafter.config.target_layer_ids, self.max_context, rows, batch_size)
        self.drafter = FusedDrafter(drafter, self.target)
        device = self.target.device
        self._anchors = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._active = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._pool = shared_pool(device)
        self._rounds: dict[tuple[Method, Sampling, int], FusedRound] = {}
        self._parts: dict[tuple[int, int], tuple[FusedTarget, FusedDrafter]] = {}

    @property
    def single(self) -> "FusedBatchEngine":
        """What answers for one prompt: here, this engine."""
        return self

    def plain_logits(self, token_ids: list[int], num_last: int) -> PlainLogits:
        """What the target says without us, see ``float32_pass``."""
        return plain_logits(self._model, token_ids, num_last)

    def require_room(self, longest_prompt: int, max_new_tokens: int, max_context: int) -> None:
        """Refuse a batch whose lanes are too short.

        Args:
            longest_prompt: tokens.
            max_new_tokens: of a response.
            max_context: of the target; no lane needs more.

        Raises:
            KitError: with what a lane holds and the batch size that fits.
        """
        needed = min(longest_prompt + max_new_tokens, max_context)
        if self.max_context >= needed:
            return
        raise KitError(
            f"batch_size {self.batch_size} leaves {self.max_context} tokens of the GPU's memory to each prompt, and the longest needs "
            f"{needed} (prompt and max_new_tokens {max_new_tokens}): batch_size {self.batch_size * self.max_context // needed or 1} would fit"
        )

    def decode(
        self, waiting: deque[Request], method: Method, sampling: Sampling = GREEDY
    ) -> Iterator[tuple[Request, Generation]]:
        """Decode everything that waits by one method; see ``BatchEngine.decode``."""
        holders: list[BatchResponse | None] = [None] * self.batch_size
        self.target.length.zero_()
        self._active.zero_()
        if waiting and waiting[0].generator is not None and not sampling.is_greedy:
            seed_device(self.target.device, waiting[0].generator.initial_seed())
        while waiting or any(holders):
            ended = self._fill(holders, waiting, sampling)
            if any(holders):
                round_ = self._ready_round(holders, bool(waiting), method, sampling)
                ended += self._rounds_until_one_ends(holders, round_)
            for response in ended:
                yield response.request, response.generation(STAGES)

    @torch.no_grad()
    def _fill(
        self, holders: list[BatchResponse | None], waiting: deque[Request], sampling: Sampling
    ) -> list[BatchResponse]:
        """Read prompts into the lanes that are free; the responses that end with their first token."""
        ended = []
        for lane in range(self.batch_size):
            while waiting and holders[lane] is None:
                response = self._admit(waiting.popleft(), lane, sampling)
                if response.has_ended(self.eos_token_ids):
                    self._retire(lane)
                    ended.append(response)
                else:
                    holders[lane] = response
        return ended

    def _admit(self, request: Request, lane: int, sampling: Sampling) -> BatchResponse:
        count = len(request.prompt_ids)
        require_context(count, self.max_context, request.name)
        target, drafter = self._part(lane, 1)
        ids = torch.tensor(request.prompt_ids, device=target.device)
        logits, choice = target.prefill(ids, lambda taps, _start: drafter.extend(taps))
        require_finite(logits, request.name)
        first = [int(choice)] if sampling.is_greedy else choose_tokens(logits[None], sampling, request.generator)
        self._anchors[lane] = first[0]
        self._active[lane] = 1
        return BatchResponse(request, min(request.max_new_tokens, self.max_context - count), first)

    def _retire(self, lane: int) -> None:
        self._active[lane] = 0
        self.target.length[lane] = 0

    @torch.no_grad()
    def _ready_round(
        self, holders: list[BatchResponse | None], more_wait: bool, method: Method, sampling: Sampling
    ) -> FusedRound:
        """The round for the lanes in use, captured; where nobody waits, lanes move together first."""
        num_active = sum(holder is not None for holder in holders)
        width = self.batch_size
        while not more_wait and width > 1 and num_active <= (width + 1) // 2:
            width = (width + 1) // 2
        for lane in range(width, self.batch_size):
            if holders[lane] is not None:
                self._move(holders, lane, holders.index(None))
        key = method, sampling, width
        if key not in self._rounds:
            target, drafter = self._part(0, width)
            budget = None if method.name == CHAIN else method.budget
            lanes = Lanes(self._anchors[:width], self._active[:width])
            self._rounds[key] = FusedRound(
                target, drafter if method.budget else None, budget, sampling, lanes=lanes, pool=self._pool
            )
        round_ = self._rounds[key]
        round_.held = max(_held(holder) for holder in holders if holder)
        for held in (round_.held, max(_held(holder) + _left(holder) for holder in holders if holder)):
            round_.make_ready(held)
        return round_

    def _move(self, holders: list[BatchResponse | None], source: int, to: int) -> None:
        for part in (self.target, self.drafter):
            caches = part.caches.unflatten(2, (self.batch_size, -1))
            caches[:, :, to].copy_(caches[:, :, source])
        for values in (self.target.length, self._anchors, self._active):
            values[to] = values[source]
        holders[to], holders[source] = holders[source], None
        self._retire(source)

    @torch.no_grad()
    def _rounds_until_one_ends(self, holders: list[BatchResponse | None], round_: FusedRound) -> list[BatchResponse]:
        """Rounds of the lanes in use until a response ends; all that have ended, their lanes free."""
        ended: list[BatchResponse] = []
        in_flight: deque[_Flight] = deque()
        last_s = self._now_s()
        while True:
            while (
                not ended
                and len(in_flight) < 2
                and any(holder and len(in_flight) < _left(holder) for holder in holders)
            ):
                round_.held = max(_held(holder) for holder in holders if holder)
                round_.launch()
                in_flight.append(_Flight(Telling(round_.walked.told), tuple(holders)))
            if not in_flight or not any(holders):
                break  # a round for nothing is not read
            flight = in_flight.popleft()
            said = flight.told.read()
            now_s = time.perf_counter()
            sharing = [
                (lane, holder) for lane, holder in enumerate(flight.holders) if holder and holder is holders[lane]
            ]
            for lane, holder in sharing:
                self._take(holder, said[lane])
                holder.charge(now_s - last_s, {STAGES[0]: now_s - last_s}, len(sharing))
                if holder.has_ended(self.eos_token_ids):
                    holders[lane] = None
                    ended.append(holder)
            last_s = now_s
        for lane in range(self.batch_size):
            if holders[lane] is None:
                self._retire(lane)
        return ended

    def _take(self, response: BatchResponse, said: list[int]) -> None:
        """A lane's accepted and bonus tokens, as `WalkBuffers` tells them."""
        tokens = said[1 : said[0] + 2]
        accepted, cut = cut_accepted(tokens[:-1], self.eos_token_ids, _left(response))
        response.add(accepted if cut else tokens, len(accepted), cut)

    def _part(self, first: int, count: int) -> tuple[FusedTarget, FusedDrafter]:
        """Target and drafter of some lanes."""
        if count == self.batch_size:
            return self.target, self.drafter
        if (first, count) not in self._parts:
            target = self.target.part(first, count)
            self._parts[first, count] = target, self.drafter.part(target, first)
        return self._parts[first, count]

    def _now_s(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _held(response: BatchResponse) -> int:
    """Committed tokens: all but the last one said."""
    return len(response.request.prompt_ids) + len(response.tokens) - 1


def _left(response: BatchResponse) -> int:
    """Tokens that may still be said."""
    return response.max_new_tokens - len(response.tokens)
