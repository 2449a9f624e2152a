"""What the tests of batched decoding share: engines for one prompt and for many over the same target, compared."""

from collections import deque
from typing import Any

import torch

from decode.batch_engine import BatchEngine
from decode.batch_response import Request
from decode.engine import Engine, Generation, Method
from decode.sampling import GREEDY, Sampling
from decode.target_runner import TargetRunner
from dflash_kit.drafter import Drafter
from dflash_kit.target_ends import TargetEnds


def make_batch_engine(
    model: Any, drafter: Drafter | None, batch_size: int, *, eos: tuple[int, ...] = (), max_context: int = 512
) -> BatchEngine:
    """An engine for several prompts over a loaded target."""
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    ends = TargetEnds.from_model(model) if drafter is not None else None
    runner = TargetRunner(model, taps)
    return BatchEngine(runner, drafter, ends, eos_token_ids=eos, max_context=max_context, batch_size=batch_size)


def stream(number: int, device: str = "cpu") -> torch.Generator:
    """A response's own source of samples."""
    return torch.Generator(device).manual_seed(100 + number)


def requests(prompts: list[list[int]], limits: list[int], device: str = "cpu") -> deque[Request]:
    """One request a prompt, which samples on ``device``."""
    return deque(
        Request(prompt_ids=prompt, max_new_tokens=limit, generator=stream(i, device), prompt_id=str(i))
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    )


def decode_batch(
    engine: BatchEngine, prompts: list[list[int]], limits: list[int], method: Method, sampling: Sampling = GREEDY
) -> tuple[list[Generation], list[int]]:
    """Responses in the order of the prompts, and the order in which they ended."""
    found: dict[int, Generation] = {}
    for request, generation in engine.decode(requests(prompts, limits), method, sampling):
        found[int(request.prompt_id)] = generation
    assert len(found) == len(prompts)
    return [found[i] for i in range(len(prompts))], list(found)


def decode_alone(
    engine: Engine, prompts: list[list[int]], limits: list[int], method: Method, sampling: Sampling = GREEDY
) -> list[Generation]:
    """The same responses, one prompt at a time."""
    found = []
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        prefix = engine.prefill(prompt, limit, method.budget)
        found.append(engine.decode(prefix, method, sampling=sampling, generator=stream(i), prompt_id=str(i)))
    return found


def assert_equal(batch: list[Generation], alone: list[Generation]) -> None:
    """The same tokens and the same rounds."""
    for i, (ours, theirs) in enumerate(zip(batch, alone, strict=True)):
        assert ours.token_ids == theirs.token_ids, i
        assert (ours.log.num_accepted, ours.log.cut) == (theirs.log.num_accepted, theirs.log.cut), i
