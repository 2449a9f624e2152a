"""Configuration of every command: one frozen dataclass a stage, filled from defaults < YAML < command line.

jsonargparse turns the dataclass into flags, help (attribute docstrings) and type checks. This module adds
what a recipe for several stages needs: YAML sections, and refusals that name the nearest known key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from dflash_kit.errors import KitError, free_bytes
from dflash_kit.recipe import SECTIONS, nearest, read_section

OWN_FLAGS = ("config", "print_config", "help")

T = TypeVar("T")

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parse_config(stage: str, cls: type[T], argv: list[str] | None, *, description: str) -> T:
    """Build the stage's config from `--config FILE.yaml` (repeatable, the last wins) and the flags in `argv`.

    Args:
        stage: name of the stage's section in a recipe, one of `SECTIONS`.
        cls: the stage's dataclass; nested dataclasses become dotted flags, its FLAG_ALIASES are further names of flags.
        argv: arguments without the program's name; None reads `sys.argv`.
        description: first lines of `--help`.

    Raises:
        KitError: unknown flag or key, a value of the wrong type or range, a missing required value, or
            an unreadable YAML file.
        SystemExit: after `--help` or `--print_config` (status 0).
    """
    hints = _leaf_hints(cls)
    aliases = getattr(cls, "FLAG_ALIASES", {})
    argv = _normalised(list(sys.argv[1:] if argv is None else argv), hints, stage, aliases)
    wants_print = "--print_config" in argv
    argv = [arg for arg in argv if arg != "--print_config"]
    files, argv = _split_config_files(argv)
    yaml_args = [arg for file in files for arg in _yaml_args(read_section(Path(file), stage), hints, stage, file)]
    yaml_args = _without_effectless(yaml_args, argv, cls)
    parser = _build_parser(stage, cls, description)
    if wants_print:
        _drop_requirements(parser)
    try:
        # The YAML's values go in front of the user's own flags: one path of type checks, and the last wins.
        namespace = parser.parse_args(yaml_args + argv)
    except Exception as err:  # jsonargparse raises ArgumentError, TypeError or ValueError, all of them the user's input
        raise KitError(_explain(str(err), stage, hints)) from err
    if wants_print:
        print(yaml.safe_dump({stage: _plain(namespace.as_dict())}, sort_keys=False), end="")
        raise SystemExit(0)
    try:
        return _instantiate(cls, namespace)
    except ValueError as err:
        raise KitError(f"{stage}: {err}") from err


def save_config(config: Any, path: str | Path) -> None:
    """Write the resolved config as flat YAML, which `--config` reads back; the file appears whole.

    Raises:
        KitError: it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".incomplete")
    try:
        partial.write_text(yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise KitError(
            f"cannot write {path}: {error.strerror or error} ({free_bytes(path.parent):,} bytes free); make room and run "
            "the same command again"
        ) from error


def _leaf_hints(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every field that holds a value rather than a nested dataclass."""
    hints = typing.get_type_hints(cls)
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            leaves |= _leaf_hints(typing.cast(type, hint), f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = hint
    return leaves


def _normalised(argv: list[str], hints: dict[str, Any], stage: str, aliases: dict[str, str]) -> list[str]:
    """Check every flag's name; accept aliases, dashes for underscores and a bare `--flag` for `--flag true`."""
    known = [*hints, *OWN_FLAGS]
    result = []
    for position, arg in enumerate(argv):
        if not arg.startswith("--") or arg == "--":
            result.append(arg)
            continue
        written, equals, value = arg[2:].partition("=")
        written = aliases.get(written, written)
        name = written.rstrip("+").replace("-", "_")
        if name not in known and typing.get_origin(hints.get(name.partition(".")[0])) is not dict:
            hint = nearest("--" + name, ["--" + key for key in known])
            raise KitError(f"unknown flag '--{written}' of {stage}; {hint}")
        is_bare = not equals and (position + 1 == len(argv) or argv[position + 1].startswith("--"))
        if is_bare and _parts(hints.get(name)) - {type(None)} == {bool}:
            equals, value = "=", "true"
        result.append("--" + written.replace("-", "_") + equals + value)
    return result


def _split_config_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Take every `--config FILE` out of the arguments."""
    files, rest = [], []
    arguments = iter(argv)
    for arg in arguments:
        if arg == "--config":
            file = next(arguments, None)
            if file is None:
                raise KitError("--config needs a YAML file after it")
            files.append(file)
        elif arg.startswith("--config="):
            files.append(arg.removeprefix("--config="))
        else:
            rest.append(arg)
    return files, rest


def _yaml_args(values: dict[str, Any], hints: dict[str, Any], stage: str, file: str, prefix: str = "") -> list[str]:
    """Turn a mapping into `--key=value` arguments, refusing keys that the dataclass lacks."""
    groups = {
        name[: name.index(".", len(prefix))] for name in hints if name.startswith(prefix) and "." in name[len(prefix) :]
    }
    known = {name.removeprefix(prefix).split(".")[0]: None for name in hints if name.startswith(prefix)}
    args: list[str] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in known:
            where = f"{stage}.{prefix}".rstrip(".")
            raise KitError(f"unknown key '{key}' in {where} of {file}; {nearest(str(key), known)}")
        if name in groups:
            if not isinstance(value, dict):
                raise KitError(f"key '{name}' in {stage} of {file} must map keys to values, not be {value!r}")
            args += _yaml_args(value, hints, stage, file, prefix=name + ".")
        elif value is None and not _parts(hints[name]) & {type(None), Any}:
            raise KitError(f"key '{name}' in {stage} of {file} is empty; expected {_describe(hints[name])}")
        elif isinstance(value, int | float) and _parts(hints[name]) <= {str, type(None)}:
            # Turning it into text would lose what was written: 007, 1e3 (a commit, say), yes.
            raise KitError(f"key '{name}' in {stage} of {file} is text; write it in quotes")
        else:
            args.append(f"--{name}={value if isinstance(value, str) else _as_json(value, name, file)}")
    return args


def _without_effectless(yaml_args: list[str], argv: list[str], cls: type) -> list[str]:
    """Leave out what a recipe says for other modes than the one that the command line chooses, and say so.

    ``cls.effectless(flags)`` tells the names of settings that flags leave without effect; on the command line they are refused.
    """
    effectless = getattr(cls, "effectless", None)
    if effectless is None:
        return yaml_args
    flags = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--") and not arg.lower().endswith("=false")}
    names: set[str] = effectless(flags)
    left = [arg for arg in yaml_args if arg[2:].partition("=")[0].partition(".")[0] not in names]
    dropped = list(dict.fromkeys(arg[2:].partition("=")[0] for arg in yaml_args if arg not in left))
    if dropped:
        print(f"note: {', '.join(dropped)} of the recipe: without effect here", file=sys.stderr)
    return left


def _as_json(value: Any, name: str, file: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # a date, binary data, an alias of itself
        raise KitError(f"key '{name}' of {file} holds what no setting takes ({error}); write it in quotes") from error


def _build_parser(stage: str, cls: type, description: str) -> ArgumentParser:
    parser = ArgumentParser(prog=f"dflash-{stage}", description=description, exit_on_error=False, allow_abbrev=False)
    # Both are handled before jsonargparse runs; they stand here for --help.
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="Recipe; flags override it. Sections: " + ", ".join(SECTIONS)
    )
    parser.add_argument("--print_config", action="store_true", help="Print the resolved config and exit.")
    for prefix, part, default in _dataclass_parts(cls):
        nested = {name for name, hint in typing.get_type_hints(part).items() if dataclasses.is_dataclass(hint)}
        parser.add_class_arguments(part, prefix or None, skip=nested, sub_configs=False)
        if default is not None:
            leaves = {field.name for field in dataclasses.fields(part)} - nested
            parser.set_defaults({f"{prefix}.{name}": getattr(default, name) for name in leaves})
    return parser


def _dataclass_parts(cls: type, prefix: str = "", default: Any = None) -> Iterator[tuple[str, type, Any]]:
    """The dataclass and its nested ones with dotted prefix and default value.

    Nested parts are added one by one because jsonargparse cannot read defaults out of a class with slots.
    """
    yield prefix, cls, default
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        part = hints[field.name]
        if not dataclasses.is_dataclass(part):
            continue
        if default is not None:
            value = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = None if field.default is dataclasses.MISSING else field.default
        yield from _dataclass_parts(typing.cast(type, part), f"{prefix}.{field.name}".lstrip("."), value)


def _drop_requirements(parser: ArgumentParser) -> None:
    """Let `--print_config` show a config whose required values are still to be filled in."""
    for action in parser._actions:
        action.required = False


def _instantiate(cls: type[T], namespace: Namespace) -> T:
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        value = namespace[field.name]
        values[field.name] = _instantiate(hints[field.name], value) if isinstance(value, Namespace) else value
    return cls(**values)


def _explain(message: str, stage: str, hints: dict[str, Any]) -> str:
    """One line for a value that jsonargparse refused."""
    message = " ".join(message.split())
    missing = re.search(r"arguments are required: (.+)", message)
    if missing:
        names = [name.strip() for name in missing[1].split(",")]
        return f"{stage} needs {' and '.join('--' + name for name in names)}: give it as a flag or in the YAML"
    unknown = re.search(r"unrecognized arguments: (.+)", message)
    if unknown:
        return f"unexpected argument '{unknown[1]}' for {stage}; every option is written --name value"
    lone = re.search(r"argument --(\S+?):? expected one argument", message)
    if lone:
        return f"--{lone[1]} of {stage} needs a value: {_describe(hints.get(lone[1], str))}"
    key = re.search(r'key "([^"]+)"', message)
    value = re.search(r".*(?:Got|Given) value: (.*)$", message)  # the last one: of a list, not of an item
    if key and value and key[1] in hints:
        return f"bad value {value[1]!r} for '{key[1]}' of {stage}; expected {_describe(hints[key[1]])}"
    return f"{stage}: {message}"


def _describe(hint: Any) -> str:
    """A type in words, for messages."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(value) for value in arguments)
    if typing.get_origin(hint) is list:
        return f"a list of {_describe(arguments[0])}, as [1, 2]"
    if _is_union(hint):
        return " or ".join("null" if part is type(None) else _describe(part) for part in arguments)
    return str(hint) if arguments else getattr(hint, "__name__", str(hint))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _parts(hint: Any) -> set[Any]:
    """Members of a union, or the type itself."""
    return set(typing.get_args(hint)) if _is_union(hint) else {hint}


def _plain(value: Any) -> Any:
    """The same value in YAML's own types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in OWN_FLAGS}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
