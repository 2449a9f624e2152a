"""From a configuration to everything that a run needs, refusing what does not fit; reads no hidden states."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.row_split import hold_out, ids_digest, in_hash_order
from dflash_kit.shards import Shards, ShardsHeader, open_shards
from dflash_kit.target import TargetSpec, choose_mask_token_id, load_tokenizer

from .batches import RowPacker, packed_length
from .flops import FlopCounter
from .losses import Objective
from .origin import Origin, find_origin, require_fit, require_settings
from .packing import PackingPlan
from .settings import NEW_DRAFTER, TrainConfig
from .spool_place import SpoolPlace, find_spool
from .state import RunFolder

FREE_TO_CHANGE = {"out", "shards", "eval_shards", "target", "dry_run"}
"""Settings that may differ between a run and its resumption: places, and how often something is printed or saved."""
FREE_TO_CHANGE |= {"log_every_steps", "save_every_steps", "keep_last", "cpu_threads", "report_to"}
FREE_TO_CHANGE |= {"spool", "spool_timeout_s"}  # whether there is a spool, the fingerprint says itself
FREE_TO_CHANGE |= {"drafter", "init"}  # the fingerprint holds what they come to


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training run, ready to begin."""

    config: TrainConfig
    spec: TargetSpec
    drafter: DrafterConfig
    origin: Origin | None
    """The drafter to start from; None starts from random weights."""
    shards: Shards
    train_rows: tuple[int, ...]
    """Indices of the shards' rows to train on."""
    eval_shards: Shards
    eval_rows: tuple[int, ...]
    """Indices of the rows of ``eval_shards`` to replay."""
    plan: PackingPlan
    max_steps: int
    last_row: int | None
    """Packed rows of the whole run; None where max_steps ends it."""
    num_long_rows: int
    """Rows longer than a packed row, which will be cut."""
    spool: SpoolPlace | None = None
    """The spool to train on; its rows are not known yet, so ``shards``, ``train_rows`` and ``plan`` are empty and
    ``max_steps`` is 0. None: shards that stay."""

    @property
    def objective(self) -> Objective:
        """The loss."""
        loss = self.config.loss
        return Objective(kind=loss.kind, alpha=loss.dpace_alpha, distill_weight=loss.distill_weight)

    @property
    def gamma(self) -> float:
        """Decay of the slot weights."""
        return self.config.loss.gamma_of(self.drafter.block_size)

    @property
    def packer(self) -> RowPacker:
        """Builds the packed rows."""
        data = self.config.data
        return RowPacker(
            shards=self.shards,
            row_indices=self.train_rows,
            seq_len=data.seq_len,
            num_anchors=data.anchors,
            block_size=self.drafter.block_size,
            gamma=self.gamma,
            seed=self.config.seed,
            feature_noise=data.feature_noise,
            sample_slots=self.config.loss.sample_slots,
            with_last_hidden=self.objective.needs_target,
            skip_unreadable=data.skip_unreadable,
            count_flops=self.flop_counter,
        )

    @property
    def flop_counter(self) -> FlopCounter:
        """Counts the operations of packed rows."""
        return FlopCounter(drafter=self.drafter, vocab_size=self.spec.vocab_size, distils=self.objective.needs_target)

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share with the one that began."""
        settings = {k: v for k, v in asdict(self.config).items() if k not in FREE_TO_CHANGE}
        settings["data"].pop("skip_unreadable")  # a run that a damaged shard has stopped may go on without it
        header = self.shards.header.to_dict()
        header.pop("target_name")
        if self.spool is not None:
            rows: dict[str, Any] = {"spool": True}
            if self.config.eval_shards is not None:
                rows["eval_rows_digest"] = ids_digest([self.eval_shards.ids[i] for i in self.eval_rows])
        else:
            rows = {
                "train_rows": len(self.train_rows),
                "train_rows_digest": ids_digest([self.shards.ids[i] for i in self.train_rows]),
                "eval_rows": len(self.eval_rows),
                "eval_rows_digest": ids_digest([self.eval_shards.ids[i] for i in self.eval_rows]),
                "max_steps": self.max_steps,
            }
        return {
            "drafter_config": self.drafter.to_dict(),
            "init": None if self.origin is None else self.origin.identity(),
            "shards_header": header,
            **rows,
            "settings": settings,
        }


def prepare(config: TrainConfig) -> Job:
    """Open the shards, read the target's configuration, choose the drafter's shape and plan the steps.

    Raises:
        KitError: shards that cannot be read, are empty or of another target, or settings that do not fit.
    """
    spool = find_spool(config)
    shards = open_shards(config.shards) if spool is None else Shards.of(spool.folder, spool.header, [])
    header = shards.header
    _require_last_hidden(config, header)
    spec = _target_of(config, header)
    header.require_compatible(spec, f"shards {config.shards}")
    origin = find_origin(config, RunFolder(config.out), spec)
    drafter = _drafter_config(config, spec, header, origin)
    train_rows, eval_shards, eval_rows = _split(config, shards, spool)
    data = config.data
    lengths = [packed_length(shards.lengths[i]) for i in train_rows]
    plan = PackingPlan(lengths, seq_len=data.seq_len, rows_per_step=data.rows_per_step, seed=config.seed)
    endless = config.optim.max_steps is not None
    if spool is not None:
        spool.require_room(data.rows_per_step * data.seq_len)
    return Job(
        config=config,
        spec=spec,
        drafter=drafter,
        origin=origin,
        shards=shards,
        train_rows=tuple(train_rows),
        eval_shards=eval_shards,
        eval_rows=tuple(eval_rows),
        plan=plan,
        max_steps=0 if spool is not None else config.optim.max_steps or plan.num_steps(config.optim.epochs),
        last_row=None if endless else plan.num_rows(config.optim.epochs),
        num_long_rows=sum(length > data.seq_len for length in lengths),
        spool=spool,
    )


def _require_last_hidden(config: TrainConfig, header: ShardsHeader) -> None:
    if config.loss.kind not in ("decay", "dpace") and not header.has_last_hidden:
        raise KitError(
            f"loss.kind is {config.loss.kind}, which needs the target's last hidden states, but shards {config.shards} "
            "hold none; extract them again with --last_hidden, or use loss.kind decay or dpace"
        )


def _target_of(config: TrainConfig, header: ShardsHeader) -> TargetSpec:
    if config.target is not None:
        return TargetSpec.from_pretrained(config.target)
    try:
        return TargetSpec.from_pretrained(header.target_name, header.target_revision)
    except KitError as error:
        raise KitError(f"{error}; the shards name it, give --target if it has moved") from error


def _drafter_config(
    config: TrainConfig, spec: TargetSpec, header: ShardsHeader, origin: Origin | None
) -> DrafterConfig:
    if origin is not None:
        require_settings(origin, config.drafter)
        require_fit(origin, header, spec)
        return origin.config
    wanted = NEW_DRAFTER | config.drafter.given()
    if "mask_token_id" not in wanted:
        wanted["mask_token_id"] = choose_mask_token_id(spec, load_tokenizer(spec.name, spec.revision))
    return DrafterConfig.from_target(spec, target_layer_ids=header.target_layer_ids, **wanted)


def _split(config: TrainConfig, shards: Shards, spool: SpoolPlace | None) -> tuple[list[int], Shards, list[int]]:
    if spool is not None and config.eval_shards is None:
        return [], shards, []  # held out when the first shards are there
    if len(shards) == 0 and spool is None:
        raise KitError(f"shards {config.shards} hold no rows; extract some first")
    max_rows = config.replay.max_rows
    if config.eval_shards is not None:
        if os.path.realpath(config.eval_shards) == os.path.realpath(config.shards):
            raise KitError(
                f"eval_shards is the training shards {config.shards}; name other shards or leave it out, "
                "then data.holdout_fraction holds rows out"
            )
        eval_shards = open_shards(config.eval_shards)
        _require_same_kind(config, shards.header, eval_shards.header)
        both = set(shards.ids) & set(eval_shards.ids)
        if both:
            raise KitError(
                f"{len(both)} rows of eval_shards {config.eval_shards} are also in {config.shards} "
                f"(for instance {min(both)}); replay needs rows that are not trained on"
            )
        return list(range(len(shards))), eval_shards, in_hash_order(eval_shards.ids)[:max_rows]
    fraction = config.data.holdout_fraction if max_rows else 0.0
    train_rows, held = hold_out(shards.ids, fraction)
    return train_rows, shards, held[:max_rows]


def _require_same_kind(config: TrainConfig, header: ShardsHeader, other: ShardsHeader) -> None:
    """Replay rows may be sampled by another engine or otherwise, but their taps must mean the same."""
    for name in ("config_hash", "tokenizer_hash", "target_layer_ids", "hidden_size", "vocab_size"):
        mine, theirs = getattr(header, name), getattr(other, name)
        if mine != theirs:
            raise KitError(
                f"eval_shards {config.eval_shards} have {name} {theirs!r} but {config.shards} have {mine!r}; "
                "extract them with the same target and taps"
            )
