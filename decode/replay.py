"""The evaluation command's ``--replay``: acceptance from shards, without running the target."""

from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_kit.acceptance import AR
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.replay import replay_rows
from dflash_kit.shards import Row, Shards, open_shards
from dflash_kit.target import TargetSpec
from dflash_kit.target_ends import TargetEnds

from .results import PromptResult, Response, ResultStore
from .settings import EvalConfig


def open_matching_shards(config: EvalConfig, spec: TargetSpec, drafter_config: DrafterConfig) -> Shards:
    """The shards to replay.

    Raises:
        KitError: they are of another target, have other taps than the drafter reads, or hold no row that the
            target itself answered.
    """
    assert config.replay is not None
    shards = open_shards(config.replay)
    header = shards.header
    header.require_compatible(spec, f"shards {config.replay}")
    if header.target_layer_ids != drafter_config.target_layer_ids:
        raise KitError(
            f"shards {config.replay} have taps of layers {list(header.target_layer_ids)}, but checkpoint {config.ckpt} "
            f"reads layers {list(drafter_config.target_layer_ids)}; extract again with these layers"
        )
    if not shards:
        raise KitError(
            f"shards {config.replay} hold no row (those that the trainer of a spool has used are gone); replay others, as "
            "those in held-out of the trainer's state folder"
        )
    if not any(row.is_generated for row in shards):
        raise KitError(
            f"shards {config.replay} hold no response of the target's own; replay needs rows that extraction generated"
        )
    return shards


def replay_shards(
    config: EvalConfig,
    drafter: Drafter,
    ends: TargetEnds,
    shards: Shards,
    spec: TargetSpec,
    store: ResultStore,
    on_row: Callable[[PromptResult], None],
) -> int:
    """Replay the rows that the store does not hold yet, by every method but the baseline.

    Only rows whose response the target said itself count: elsewhere the recorded text is not what it would say.

    Returns:
        Number of rows that were left out for that reason.
    """
    benchmark = benchmark_name(config)
    methods = [m for m in config.decoding_methods(drafter.config.num_draft_tokens) if m[0] != AR]
    budgets = [budget for name, budget in methods if name == "ddtree"]
    num_left_out = 0

    def rows_to_do() -> Iterator[Row]:
        nonlocal num_left_out
        num_asked = 0
        for row in shards:
            if num_asked == config.limit:
                return
            if not row.is_generated:
                num_left_out += 1
                continue
            num_asked += 1
            if not store.has(benchmark, row.id):
                yield row

    for row, found in replay_rows(
        drafter, ends, rows_to_do(), budgets, eos_token_ids=spec.eos_token_ids, max_new_tokens=config.max_new_tokens
    ):
        responses = tuple(
            Response(turn=turn, method=method, log=log) for method in methods for turn, log in enumerate(found[method])
        )
        result = PromptResult(benchmark=benchmark, prompt_id=row.id, responses=responses, differing_tokens={})
        store.add(result)
        on_row(result)
    return num_left_out


def benchmark_name(config: EvalConfig) -> str:
    """What stands in the report's benchmark column."""
    assert config.replay is not None
    return f"replay of {Path(config.replay).resolve().name}"
