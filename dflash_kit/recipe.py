"""Recipes: YAML files with one section a stage, or with the keys of one stage only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from dflash_kit.errors import KitError

SECTIONS = ("convert", "extract", "train", "eval")
"""Sections that a recipe may hold; each command reads its own."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The clause that helps after an unknown name: the nearest known one, or all of them if none is near.

    Of a name with sections the last part is enough: `--max_new_tokens` is nearest to `--sampling.max_new_tokens`.
    """
    names = list(known)
    spelled = {full.rpartition(".")[2].lstrip("-"): full for full in names} | {full.lstrip("-"): full for full in names}
    written = name.lstrip("-")
    close = difflib.get_close_matches(written, spelled, n=1, cutoff=0.6)
    close = close or [word for word in spelled if written and written in word]
    return f"did you mean '{spelled[close[0]]}'?" if close else f"known: {', '.join(names)}"


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 6e-4 as a number (PyYAML follows YAML 1.1, where that is a string)."""


_Loader.yaml_implicit_resolvers = {key: list(rules) for key, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def read_section(path: Path, stage: str) -> dict[str, Any]:
    """The stage's mapping in a recipe: its section, or the whole file when that has no sections.

    Raises:
        KitError: unreadable file, malformed YAML, or an unknown section.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as err:
        raise KitError(f"cannot read config {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise KitError(f"config {path} is not UTF-8 text") from err
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise KitError(f"config {path}{where} is not valid YAML: {getattr(err, 'problem', None) or err}") from err
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise KitError(f"config {path} holds a {type(content).__name__}; it must map keys to values")
    if not any(name in SECTIONS for name in content):
        return content
    for name in content:
        if name not in SECTIONS:
            raise KitError(f"unknown section '{name}' in {path}; {nearest(str(name), SECTIONS)}")
    section = content.get(stage)
    if section is not None and not isinstance(section, dict):
        raise KitError(f"section '{stage}' of {path} holds a {type(section).__name__}; it must map keys to values")
    return section or {}
