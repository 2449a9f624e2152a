"""Which settings go together: one checkpoint, several side by side, or those of a running training."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_kit.acceptance import DDTREE
from dflash_kit.benchmark_prompts import benchmark_label
from dflash_kit.errors import require_folder_name

if TYPE_CHECKING:
    from .settings import EvalConfig

STATE_SUFFIX, CHECKPOINTS_NAME = ".state", "checkpoints"
DEFAULT_POLL_S, DEFAULT_TIMEOUT_S = 5.0, 3600.0


def check_modes(config: "EvalConfig") -> None:
    """Refuse what has no effect in the mode that is asked for.

    Raises:
        ValueError: naming setting and value.
    """
    if config.replay is not None and config.temperature != 0:
        raise ValueError(
            f"temperature is {config.temperature} with replay, which reads responses that were sampled already; leave it out"
        )
    if config.watch is None:
        if not config.ckpt:
            raise ValueError("--ckpt is needed: a checkpoint folder or hub id, several with commas, or --watch FOLDER")
        for name in ("watch_poll_s", "watch_timeout_s"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} is {getattr(config, name)} without watch; leave it out, or name a run")
        return
    if not config.watch.strip() or not watched_out(config.watch).name:
        raise ValueError(f"watch is {config.watch!r}; name the folder of a training run")
    if config.doctor:
        raise ValueError("doctor with watch: examine one checkpoint with --ckpt")
    if config.ckpt and Path(config.ckpt).absolute() != watched_out(config.watch).absolute():  # a recipe names its own
        raise ValueError(
            f"ckpt is {config.ckpt!r} with watch = {config.watch!r}, which takes the checkpoints of that run; leave one out"
        )
    require_folder_name("watch", config.watch)
    if config.push_to_hub is not None:
        raise ValueError("push_to_hub with watch: publish the finished drafter with --ckpt when training has ended")
    for name in ("watch_poll_s", "watch_timeout_s"):
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}; seconds above 0 are needed")


def check_one_at_a_time(config: "EvalConfig") -> None:
    """Refuse to do for several prompts what is done for one at a time.

    Raises:
        ValueError: naming setting and value.
    """
    chooses = config.auto_cap is not None and DDTREE in config.method_names
    if config.batch_size > 1 and chooses:
        raise ValueError(
            f"batch_size is {config.batch_size}, but budgets has auto, which chooses for one prompt at a time; leave one out"
        )


def check_benchmarks(names: list[str]) -> None:
    """Refuse two benchmarks that reports would call by one name.

    Raises:
        ValueError: with that name.
    """
    labels = [benchmark_label(name) for name in names]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"benchmarks names {twice} twice, whose results would be one; leave one out")


def default_folder(config: "EvalConfig") -> Path:
    """Where the report goes unless told: beside the checkpoint, or here for a hub id."""
    from .settings import split_list

    beside = "-doctor" if config.doctor else "-report" if config.replay is None else "-replay"
    if config.watch is not None:
        run = watched_out(config.watch).absolute()
        return run.with_name(run.name + "-watch" + beside)
    if Path(config.ckpt).is_dir():
        return Path(str(named(config.ckpt)) + beside)
    names = split_list(config.ckpt)
    first = named(names[0]) if names else Path(config.ckpt)
    place = first if first.is_dir() or len(first.parts) != 2 else Path(first.name)
    return Path(str(place) + ("-compared" if len(names) > 1 else "") + beside)


def named(place: str | Path) -> Path:
    """The same folder by a path that ends in its name: ``.`` and ``..`` say none that something could stand beside."""
    path = Path(place)
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def watched_out(place: str | Path) -> Path:
    """OUT of a training run that is named by OUT itself, by OUT.state or by OUT.state/checkpoints."""
    given = named(place)
    if given.name == CHECKPOINTS_NAME and given.parent.name.endswith(STATE_SUFFIX):
        given = given.parent
    return given.with_name(given.name.removesuffix(STATE_SUFFIX)) if given.name.endswith(STATE_SUFFIX) else given
