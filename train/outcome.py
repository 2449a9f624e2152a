"""What training leaves on disk: replay results, intermediate drafters, trainer states, and the finished drafter."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_kit.checkpoint import read_provenance
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.provenance import collect_provenance

from .progress import Reporter, method_label, replay_line
from .report import PICTURE_NAME, write_report
from .state import RunFolder, save_state
from .validation import whole_drafter

if TYPE_CHECKING:
    from .trainer import Trainer


def record_replay(trainer: "Trainer", reporter: Reporter, argv: list[str] | None) -> None:
    """Replay the held-out rows, print and record acceptance, and keep the drafter if it is the best so far.

    All processes call it.
    """
    if trainer.validation is None:
        if trainer.counters.step == 0:
            reporter.say("no row is held out: acceptance before and after training stays unknown (see replay.max_rows)")
        return
    counters = trainer.counters
    drafter = whole_drafter(trainer.drafter, trainer.parallel, trainer.ends, trainer.average)
    found = trainer.validation.measure(drafter, trainer.parallel)
    lengths = {method_label(*method): value.acceptance_length_pooled for method, value in found.items()}
    length = lengths["chain"]
    best = length is not None and (counters.best_acceptance_length is None or length >= counters.best_acceptance_length)
    if best:
        counters.best_acceptance_length, counters.best_step = length, counters.step
    counters.last_replay = {"step": counters.step, **lengths}
    if counters.step == 0:
        counters.first_replay = counters.last_replay
    reporter.say(replay_line(counters.step, found, best=best))
    unreadable = trainer.validation.unreadable
    if unreadable:
        num_rows = len(trainer.validation.rows)
        reporter.say(
            f"left out of this replay: {len(unreadable)} of {num_rows} held-out rows, which cannot be read ({unreadable[0]}); "
            "its τ is that of the others"
        )
    values = {
        method_label(*method): {
            "acceptance_length_pooled": value.acceptance_length_pooled,
            "acceptance_length_per_prompt": value.acceptance_length_per_prompt,
            "position_rates": list(value.position_rates),
            "rounds": value.rounds,
        }
        for method, value in found.items()
    }
    trainer.parallel.on_main(
        lambda: reporter.record(
            "replay", counters.step, {"best": best, "methods": values, "unreadable_rows": len(unreadable)}
        )
    )
    if best:
        _write_drafter(trainer, drafter, argv)


def save(trainer: "Trainer", argv: list[str] | None) -> None:
    """Write trainer state and drafter, and delete what is too old; all processes call it."""
    counters, folder = trainer.counters, trainer.folder
    drafter = whole_drafter(trainer.drafter, trainer.parallel, trainer.ends, trainer.average)
    _write_drafter(trainer, drafter, argv)
    counters.spool = trainer.feed.state(counters.step)
    save_state(folder, trainer.parallel, trainer.drafter, trainer.optimizer, counters, trainer.average)
    trainer.parallel.on_main(lambda: folder.prune(trainer.job.config.keep_last, counters.best_step))
    trainer.feed.release(counters.step)


def finish(trainer: "Trainer", reporter: Reporter, argv: list[str] | None) -> None:
    """Write the finished drafter: the best by replay, or the last where nothing was replayed."""
    counters, folder = trainer.counters, trainer.folder
    step = counters.best_step if counters.best_step is not None else counters.step

    def write() -> None:
        kept = folder.checkpoint(step)
        metrics = {**read_provenance(kept).get("metrics", {}), "trained_steps": counters.step}
        provenance = {**_provenance(trainer, argv), "metrics": metrics}
        Drafter.from_pretrained(kept).save_pretrained(folder.out, provenance=provenance)

    # The report first: with the drafter in its place the run counts as finished, and is never gone through again.
    report = trainer.parallel.on_main(lambda: _report_words(folder))
    trainer.parallel.on_main(write)
    quality = ""
    if counters.best_acceptance_length is not None:
        quality = f", replayed chain τ {counters.best_acceptance_length:.3f} on held-out rows"
    before = counters.first_replay.get("chain")
    if trainer.job.origin is not None and before is not None:
        quality += f"; {trainer.job.origin.name}, which it started from, had {before:.3f}"
    reporter.say(f"finished: {folder.out} holds the drafter of step {step}{quality}")
    reporter.say(report)


def _report_words(folder: RunFolder) -> str:
    """Write the report; where that fails, the drafter is none the worse, so this only says what was wrong."""
    try:
        return f"report: {write_report(folder)} and {PICTURE_NAME} beside it"
    except KitError as error:
        return f"no report: {error}; `python -m train.report {folder.out}` tries again"


def _write_drafter(trainer: "Trainer", drafter: Drafter, argv: list[str] | None) -> None:
    place = trainer.folder.checkpoint(trainer.counters.step)

    def write() -> None:
        if not place.exists():
            drafter.save_pretrained(place, provenance=_provenance(trainer, argv))

    trainer.parallel.on_main(write)


def _provenance(trainer: "Trainer", argv: list[str] | None) -> dict[str, Any]:
    job, counters = trainer.job, trainer.counters
    return collect_provenance(
        argv,
        target=job.spec.name,
        target_revision=job.spec.revision,
        shards_header=job.shards.header.to_dict(),
        init=None if job.origin is None else job.origin.identity(),
        config=asdict(job.config),
        fingerprint=job.fingerprint(),
        metrics={
            "step": counters.step,
            "max_steps": job.max_steps if job.spool is None else None,
            "replay_acceptance_length": counters.last_replay,
            "init_replay_acceptance_length": counters.first_replay or None,
            "skipped_steps": counters.skipped_steps,
            "unreadable_rows": counters.unreadable_rows,
            "tokens": counters.tokens,
        },
    )
