"""Live evaluation of several prompts at a time. What is decoded is the same as one by one; see ``batch_response`` for time.

Speeds of two methods compare only if their rounds hold one method each. So prompts go in waves: a wave is decoded by one
method after another, each time with conversations taking free slots as others end, second turns first. A prompt's
results are complete, and written, when the wave's last method has ended it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_kit.acceptance import AR, CHAIN, DDTREE
from dflash_kit.benchmark_prompts import BenchmarkPrompt
from dflash_kit.errors import KitError

from .batch_engine import BatchEngine
from .batch_memory import WHAT_HELPS, is_out_of_memory
from .batch_response import Request
from .conversation import Conversation
from .engine import Method
from .fused_batch import FusedBatchEngine
from .live import WARM_UP_TOKENS, LiveEvaluation, open_conversation, response_seed
from .results import PromptResult, Response, ResultStore
from .settings import EvalConfig

WAVE_BATCHES = 4
"""Batches whose prompts make a wave. Longer ones keep slots full better; a killed run loses at most one."""


@dataclass(slots=True)
class _Asked:
    """One prompt of a wave: what was asked and answered so far."""

    prompt: BenchmarkPrompt
    responses: list[Response] = field(default_factory=list)
    prompts: dict[tuple[int, tuple[str, int]], list[int]] = field(default_factory=dict)
    """Token ids by turn and method."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a request belongs to."""

    asked: _Asked
    conversation: Conversation
    turn: int


class BatchEvaluation(LiveEvaluation):
    """``LiveEvaluation`` over an engine for several prompts; the other arguments are the same."""

    def __init__(self, engine: BatchEngine | FusedBatchEngine, *args: Any, **named: Any) -> None:
        super().__init__(engine.single, *args, **named)
        self.batch_engine = engine

    def run(self, benchmarks: dict[str, list[BenchmarkPrompt]], store: ResultStore) -> None:
        """Decode what the store does not hold yet.

        Raises:
            KitError: the batch does not fit into memory; also what ``LiveEvaluation`` raises.
        """
        try:
            self._warm_up_batch(benchmarks)
            for benchmark, prompts in benchmarks.items():
                missing = [prompt for prompt in prompts if not store.has(benchmark, prompt.id)]
                size = WAVE_BATCHES * self.batch_engine.batch_size
                for start in range(0, len(missing), size):
                    for result in self.decode_wave(benchmark, missing[start : start + size]):
                        store.add(result)
                        self._on_prompt(result)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise KitError(
                f"memory of {self.engine.target.device.type} is exhausted with batch_size {self.batch_engine.batch_size}: "
                f"{WHAT_HELPS}, and name a new folder with --out"
            ) from error

    def decode_wave(self, benchmark: str, prompts: Sequence[BenchmarkPrompt]) -> Iterator[PromptResult]:
        """All turns of some prompts by all methods; results in the order in which the last method ends them."""
        wave = [_Asked(prompt) for prompt in prompts]
        for method in self.methods:
            for asked in self._decode_method(benchmark, wave, method):
                if method == self.methods[-1]:
                    asked.responses.sort(key=lambda response: (response.turn, self.methods.index(response.method)))
                    yield self._result(benchmark, asked.prompt, asked.responses, asked.prompts)

    def _decode_method(self, benchmark: str, wave: Sequence[_Asked], method: tuple[str, int]) -> Iterator[_Asked]:
        """Decode all conversations by one method; yields each as its last turn ends."""
        waiting = deque(
            self._ask(
                benchmark,
                method,
                _Turn(asked, open_conversation(self.tokenizer, self.config, benchmark, asked.prompt), 0),
            )
            for asked in wave
        )
        for request, generation in self.batch_engine.decode(waiting, Method(*method), self.config.sampling):
            at: _Turn = request.tag
            at.conversation.answer(generation.token_ids)
            at.asked.responses.append(
                Response(turn=at.turn, method=method, log=generation.log, token_ids=tuple(generation.token_ids))
            )
            self._on_response(method, generation)
            if at.turn + 1 < len(at.asked.prompt.turns):
                waiting.appendleft(self._ask(benchmark, method, _Turn(at.asked, at.conversation, at.turn + 1)))
            else:
                yield at.asked

    def _ask(self, benchmark: str, method: tuple[str, int], at: _Turn) -> Request:
        """The request of one turn, with a random stream of its own."""
        prompt_id = at.asked.prompt.id
        prompt_ids = at.asked.prompts[at.turn, method] = at.conversation.ask(at.turn)
        seed = response_seed(self.config.seed, benchmark, prompt_id, at.turn, method)
        generator = None
        if not self.config.sampling.is_greedy:
            generator = torch.Generator(device=self.engine.target.device).manual_seed(seed)
        return Request(
            prompt_ids=prompt_ids,
            max_new_tokens=self.config.max_new_tokens,
            generator=generator,
            prompt_id=prompt_id,
            name=at.conversation.name,
            tag=at,
        )

    def _warm_up_batch(self, benchmarks: dict[str, list[BenchmarkPrompt]]) -> None:
        """The first passes of a process are several times slower; keep them out of every measurement."""
        first = [(name, prompt) for name, prompts in benchmarks.items() for prompt in prompts][
            : self.batch_engine.batch_size
        ]
        asked = [open_conversation(self.tokenizer, self.config, name, prompt).ask(0) for name, prompt in first]
        for method in self.methods:
            waiting = deque(Request(prompt_ids=ids, max_new_tokens=WARM_UP_TOKENS) for ids in asked)
            for _ in self.batch_engine.decode(waiting, Method(*method)):
                pass


def batch_sizes(
    config: EvalConfig,
    benchmarks: dict[str, list[BenchmarkPrompt]],
    tokenizer: Any,
    methods: Sequence[tuple[str, int]],
    num_prompts: int,
) -> dict[str, int]:
    """What decides the memory of a batch: the sizes that ``batch_memory`` asks for.

    Args:
        config: what to decode.
        benchmarks: all prompts.
        tokenizer: the target's.
        methods: name and budget.
        num_prompts: that are still to be decoded.

    Raises:
        KitError: a method that decodes one prompt at a time, since it chooses by what a round of its own costs.
    """
    for name, _ in methods:
        if name not in (AR, CHAIN, DDTREE):
            raise KitError(
                f"method {name} decodes one prompt at a time; with batch_size above 1 use {AR}, {CHAIN} and {DDTREE}"
            )
    lengths = (
        len(open_conversation(tokenizer, config, benchmark, prompt).ask(0))
        for benchmark, prompts in benchmarks.items()
        for prompt in prompts
    )
    return {
        "batch_size": min(config.batch_size, num_prompts),
        "longest_prompt": max(lengths),
        "max_new_tokens": config.max_new_tokens,
        "max_budget": max(budget for _, budget in methods),
    }
