"""Batched decoding gives each response the tokens and rounds that it gets alone, whoever its neighbours are."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import assert_equal, decode_alone, decode_batch, make_batch_engine, requests
from drafting import make_engine, record_row, tiny_drafter, train_briefly
from test_hybrid import LINEAR

from decode.batch_cache import BatchCache
from decode.batch_delta import BatchDeltaLayer
from decode.batch_engine import BatchEngine
from decode.batch_response import Request
from decode.engine import Generation, Method
from decode.sampling import Sampling
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.target import load_target
from helpers import make_tiny_target

METHODS = [Method("ar", 0), Method("chain", 7), Method("ddtree", 1), Method("ddtree", 16), Method("ddtree", 64)]
WARM = Sampling(1.0, top_p=0.95)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "sliding": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
    "hybrid": {"model_type": "qwen3_5_text", **LINEAR},
}
LENGTHS = (8, 1, 14, 40, 3, 22, 5, 11, 90)  # the last one outgrows the storage of the others
LIMITS = [16, 9, 14, 8, 1, 16, 12, 16, 5]


@dataclass
class Trained:
    """A random target and a drafter fitted to some of its answers."""

    model: Any
    plain: Any
    """The same once more, for engines that decode alone: a runner takes over a hybrid model's layers."""
    drafter: Drafter
    prompts: list[list[int]]
    eos: tuple[int, ...]
    """A token inside some of the answers."""

    def batch(self, batch_size: int) -> BatchEngine:
        return make_batch_engine(self.model, self.drafter, batch_size, eos=self.eos)

    def alone(self, method: Method, *sampling: Sampling) -> list[Generation]:
        engine = make_engine(self.plain, self.drafter, eos=self.eos)
        return decode_alone(engine, self.prompts, LIMITS, method, *sampling)


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = make_tiny_target(tmp_path_factory.mktemp("batch") / "target", **KINDS[request.param])
    model, (drafter, ends) = load_target(folder), tiny_drafter(folder, sharpness=1.0)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 250, (length,), generator=draw).tolist() for length in LENGTHS]
    said = decode_alone(make_engine(model, None), prompts, [16] * len(prompts), METHODS[0])
    rows = [record_row(load_target(folder), drafter, p, g.token_ids) for p, g in zip(prompts[:4], said, strict=False)]
    train_briefly(drafter, ends, rows, steps=30)
    found = decode_alone(make_engine(model, drafter), prompts[:4], LIMITS[:4], METHODS[4])
    return Trained(load_target(folder), model, drafter, prompts, (late_accepted(found),))


def late_accepted(found: list[Generation]) -> int:
    """The token that some response says for the first time as late as any, of those that were drafted."""
    candidates = []
    for generation in found:
        at = 1
        for count in generation.log.num_accepted:
            candidates += [(i, generation.token_ids[i]) for i in range(at, at + count)]
            at += count + 1
        said = generation.token_ids
        candidates = [(i, token) for i, token in candidates if token not in said or said.index(token) == i]
    return max(candidates)[1]


def test_greedy_tokens_and_rounds_are_those_of_one_prompt_at_a_time(trained: Trained) -> None:
    engine, cuts, accepted = trained.batch(3), set(), []
    for method in METHODS:
        alone = trained.alone(method)
        batch, order = decode_batch(engine, trained.prompts, LIMITS, method)
        assert_equal(batch, alone)
        assert order != sorted(order), "no response overtook another, so slots were hardly refilled"
        cuts |= {found.log.cut for found in batch}
        accepted += [count for found in batch for count in found.log.num_accepted if method.budget > 7]
    assert cuts == {None, "eos", "length"}
    assert sum(accepted) > 0.4 * len(accepted), "next to nothing was accepted"


def test_samples_do_not_depend_on_neighbours(trained: Trained) -> None:
    for method in (METHODS[0], METHODS[3]):
        alone = trained.alone(method, WARM)
        assert_equal(decode_batch(trained.batch(3), trained.prompts, LIMITS, method, WARM)[0], alone)
        waiting = deque(reversed(requests(trained.prompts, LIMITS)))
        found = {int(r.prompt_id): g for r, g in trained.batch(20).decode(waiting, method, WARM)}  # all at once
        assert_equal([found[i] for i in range(len(alone))], alone)


@pytest.fixture
def dense(tiny_target: Path) -> tuple[Any, Drafter]:
    drafter, _ = tiny_drafter(tiny_target)
    return load_target(tiny_target), drafter


def test_rounds_and_seconds_of_responses_add_up_to_those_of_the_batch(
    dense: tuple[Any, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, engine = iter(range(10_000)), make_batch_engine(*dense, 3)
    monkeypatch.setattr(engine.single, "now_s", lambda: float(next(ticks)))
    num_rounds, honest = 0, engine._round

    def counted(*args: Any) -> None:
        nonlocal num_rounds
        num_rounds += 1
        honest(*args)

    monkeypatch.setattr(engine, "_round", counted)
    prompts, limits = [[1, 2, 3], [4], [5, 6], [7, 8]], [9, 4, 12, 3]
    batch, _ = decode_batch(engine, prompts, limits, Method("ddtree", 8))
    assert sum(found.log.batch_rounds or 0 for found in batch) == pytest.approx(num_rounds)
    # Twelve looks at a clock that a look moves on by 1: five stages of a second each, and eleven from first to last.
    assert sum(found.log.decode_s or 0 for found in batch) == pytest.approx(11 * num_rounds)
    for stage in batch[0].log.stage_s:
        assert sum(found.log.stage_s[stage] for found in batch) == pytest.approx(num_rounds)


def test_requests_may_be_added_meanwhile_and_runs_broken_off(dense: tuple[Any, Drafter]) -> None:
    engine, method = make_batch_engine(*dense, 2), Method("ddtree", 8)
    for request, _ in engine.decode(requests([[1, 2], [3]], [9, 5]), method):
        assert request.prompt_id == "1"
        break  # the other one is left in its slot
    waiting, said = requests([[1, 2, 3]], [6]), []
    for request, generation in engine.decode(waiting, method):
        said.append((request.prompt_ids, generation.token_ids))
        if len(said) < 4:
            waiting.append(Request(prompt_ids=request.prompt_ids + generation.token_ids, max_new_tokens=6))
    alone = make_engine(*dense)
    for prompt, tokens in said:
        assert decode_alone(alone, [prompt], [6], method)[0].token_ids == tokens
    assert len(said) == 4


def test_context_limit(dense: tuple[Any, Drafter]) -> None:
    engine = make_batch_engine(*dense, 2, max_context=20)
    batch, _ = decode_batch(engine, [[1] * 15, [2] * 4], [100, 100], Method("ddtree", 16))
    assert [len(found.token_ids) for found in batch] == [5, 16]
    with pytest.raises(KitError, match="prompt long has 20 tokens; 1 to 19 fit"):
        list(engine.decode(deque([Request(prompt_ids=[1] * 20, max_new_tokens=5, name="long")]), METHODS[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_batches_on_a_gpu(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_target(tmp_path / "target", **KINDS[kind])
    drafter = tiny_drafter(folder)[0].to("cuda")
    prompts, limits = [list(range(5, 5 + length)) for length in LENGTHS], LIMITS
    for method in METHODS:
        alone = decode_alone(make_engine(load_target(folder, device="cuda"), drafter), prompts, limits, method)
        batch, _ = decode_batch(
            make_batch_engine(load_target(folder, device="cuda"), drafter, 3), prompts, limits, method
        )
        assert_equal(batch, alone)


@pytest.mark.parametrize("trained", ["hybrid"], indirect=True)
def test_planted_faults_are_seen(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, honest = trained.alone(METHODS[4]), BatchDeltaLayer.commit

    def keep_first_rows(self: Any, paths: Any, padded: torch.Tensor) -> None:
        self.lengths[:] = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def stay(self: Any, source: int, slot: int) -> None:
        pass

    def keep_old_window(self: Any, on_path: Any, leaves: torch.Tensor, window: torch.Tensor) -> None:
        honest(self, on_path, leaves, window.clamp(max=2))

    faults = (BatchCache, "commit", keep_first_rows), (BatchDeltaLayer, "move", stay)
    for owner, name, fault in (*faults, (BatchDeltaLayer, "commit", keep_old_window)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fault)
            batch, _ = decode_batch(trained.batch(3), trained.prompts, LIMITS, METHODS[4])
        assert [found.token_ids for found in batch] != [found.token_ids for found in alone], fault.__name__
