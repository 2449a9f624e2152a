"""The way to the hub: what is missing is said within seconds, where the libraries try for half a minute file by file."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

PATIENCE_S = 5.0
"""How long the hub has for its first answer."""
PATIENCE_VARIABLE = "HF_HUB_ETAG_TIMEOUT"
"""huggingface_hub's own variable for how long such a question may take: set, it counts here, too."""
MAX_NAMES = 5


def why_missing(name: str | Path, revision: str | None = None) -> str | None:
    """Why a name stands for nothing that can be had, without the libraries' half a minute of attempts.

    A copy in the hub's cache counts; where the hub cannot be reached, this process then asks it for nothing more.

    Returns:
        None for what is there, and for a hub id that the hub can be asked for (which may still not know it).
    """
    text = str(name)
    if text and Path(text).exists():
        return None
    if is_path(text):
        return missing_folder(text)
    from huggingface_hub import constants

    is_cached = _is_cached(text, revision)
    if constants.HF_HUB_OFFLINE:
        return (
            None
            if is_cached
            else f"{missing_folder(text)}; HF_HUB_OFFLINE is set, and the hub's cache does not have it"
        )
    if _hub_answers(text, revision, "model"):
        return None
    if is_cached:
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"  # the latter for processes of its own
        print(f"note: the hub cannot be reached; {text} is taken from its cache on this machine", file=sys.stderr)
        return None
    return f"{missing_folder(text)}; and {_no_answer()}"


def is_path(name: str) -> bool:
    """Whether a name can only be a path: hub ids are ``name`` or ``organisation/name``."""
    return not name or name[0] in "./~" or name.count("/") > 1 or name.endswith("/")


def missing_folder(name: str) -> str:
    """That there is no such folder, and what a user may have missed: what its parent holds, or a ~ that no shell has read."""
    if name.startswith("~"):
        return "no such folder (shells read ~ at the beginning of a word only: write the whole path)"
    parent = Path(name).parent
    if str(parent) in (".", "/") or not parent.is_dir():
        return "no such folder"
    try:
        inside = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    except OSError:
        return "no such folder"
    more = f" and {len(inside) - MAX_NAMES} more" if len(inside) > MAX_NAMES else ""
    return f"no such folder ({parent} holds {', '.join(inside[:MAX_NAMES]) + more if inside else 'no folder'})"


def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
    """``datasets.load_dataset``; where the hub does not answer, from the library's cache or not at all, and at once.

    The hub's line for every attempt is left out.

    Raises:
        ConnectionError: the hub does not answer and the cache does not have it.
        Exception: of many kinds, by library and hub.
    """
    import datasets
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    is_at_hand = _is_at_hand(path, options)
    try:
        with _offline(not is_at_hand):
            return datasets.load_dataset(path, *arguments, **options)
    except Exception as error:
        if is_at_hand:
            raise
        raise ConnectionError(_no_answer()) from error
    finally:
        logging.set_verbosity(before)


def _is_at_hand(path: str, options: dict[str, Any]) -> bool:
    """Whether a data set is here or the hub answers."""
    from huggingface_hub import constants

    files = options.get("data_files")
    first = files[0] if isinstance(files, list) and files else files
    if isinstance(first, str):
        if not first.startswith("hf://datasets/"):
            return True
        path = "/".join(first.removeprefix("hf://datasets/").split("/")[:2])
    return os.path.exists(path) or constants.HF_HUB_OFFLINE or _hub_answers(path, None, "dataset")


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """The libraries ask the hub for nothing."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if wanted:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _no_answer() -> str:
    from huggingface_hub import constants

    return f"the hub {constants.ENDPOINT} cannot be reached within {_patience_s():g} s ({PATIENCE_VARIABLE} in the environment gives it longer)"


def _is_cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return False


def _patience_s() -> float:
    from huggingface_hub import constants

    return float(constants.HF_HUB_ETAG_TIMEOUT) if os.environ.get(PATIENCE_VARIABLE) else PATIENCE_S


@lru_cache(maxsize=64)
def _hub_answers(name: str, revision: str | None, kind: str) -> bool:
    """Whether the hub says anything of a repository, be it that it does not exist.

    Asked in a thread: neither a name server that is silent nor the addresses of a host, tried in turn, keep to a timeout.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    answered = threading.Event()

    def ask() -> None:
        try:
            HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=_patience_s())
        except (HfHubHTTPError, HFValidationError):
            pass  # an answer; what it means the libraries say
        except Exception:  # the HTTP library's errors, which differ by version
            failed.set()
        answered.set()

    failed = threading.Event()
    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_patience_s()) and not failed.is_set()
