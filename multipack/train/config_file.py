"""From a YAML file and a command line to a frozen configuration record.

The file's values come first, `--key value` pairs go over them. A key that the record does not have is an
error that names the nearest one it has: a misspelt key must never train with a default.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import jsonargparse
import yaml

Config = TypeVar("Config")

_OPTIONS = ("config", "help", "print_config")


def read_config(
    config_type: type[Config],
    argv: Sequence[str] | None = None,
    *,
    translate: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
    elsewhere: Callable[[str], str | None] = lambda key: None,
    instead: Mapping[str, str] | None = None,
) -> Config:
    """Make a `config_type` from `--config FILE.yml` and `--key value` pairs.

    Keys may be written with hyphens; `--flag` alone means `--flag true`; an empty key in the file means its
    default.

    Args:
        config_type: frozen dataclass whose fields are the keys.
        argv: command line without the program's name; None takes this process's.
        translate: gets the file's values and its name, and returns those of `config_type`.
        elsewhere: says of a key that only other trainers have what holds here or what to do instead.
        instead: keys that, on the command line, take the place of another key of the file.

    Raises:
        ValueError: unknown key, value of a wrong type, or a value that `config_type` refuses.
    """
    arguments = _spelt_out(sys.argv[1:] if argv is None else argv, config_type)
    path, overrides = _without_config(arguments)
    values = _read_yaml(path) if path is not None else {}
    if translate is not None and path is not None:
        values = translate(values, str(path))
    names = {key: "--" + key for key in _option_keys(overrides)} | {key: f"{key} in {path}" for key in values}
    off = {key for key, value in values.items() if value is None}
    for key, shown in names.items():
        if key not in (*_OPTIONS, *_keys_of(config_type)) and (remedy := elsewhere(key)) is not None:
            raise ValueError(f"{shown} is a key of axolotl that this trainer does not have: {remedy}.")
        if key not in _OPTIONS:
            _check_key(key, shown, config_type)
    _check_nested_keys(values, config_type)
    replaced = {argument[2:].partition("=")[0] for argument in overrides}  # lists are replaced, not joined
    replaced |= {other for key, other in (instead or {}).items() if key in _option_keys(overrides)}
    kept = {key: value for key, value in values.items() if key not in off | replaced}
    return _parse(config_type, ["--config", json.dumps(kept), *overrides])


def _spelt_out(argv: Sequence[str], config_type: type[Any]) -> list[str]:
    """The arguments with underscores in keys and a value after every switch."""
    hints = get_type_hints(config_type)
    switches = {key for key, hint in hints.items() if hint is bool or bool in get_args(hint)}
    arguments: list[str] = []
    for position, argument in enumerate(argv):
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            key = key.replace("-", "_")
            followed = position + 1 < len(argv) and not argv[position + 1].startswith("--")
            if key in switches and not equals and not followed:
                equals, value = "=", "true"
            argument = "--" + key + equals + value
        arguments.append(argument)
    return arguments


def _without_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Take `--config FILE` out of the arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    try:
        found, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. Write --config FILE.yml.") from None
    if len(found.config) > 1:
        raise ValueError(
            f"{len(found.config)} --config files were given; one can be read. Join them, or pass keys as "
            "--key value."
        )
    return (found.config[0] if found.config else None), rest


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--config {path} cannot be read: {error.strerror}. Give the path of a YAML file."
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(
            f"--config {path} holds a {type(values).__name__}; it must be lines of `key: value`."
        )
    return values


def _option_keys(arguments: Iterable[str]) -> list[str]:
    """Keys named on the command line: `--datasets.path=x` names datasets."""
    return [a[2:].partition("=")[0].partition(".")[0].rstrip("+") for a in arguments if a.startswith("--")]


def _check_key(key: str, shown: str, config_type: type[Any]) -> None:
    known = _keys_of(config_type)
    if key in known:
        return
    nearest = difflib.get_close_matches(key, known, n=1)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "--help lists the keys."
    raise ValueError(f"{shown} is not a key of {config_type.__name__}. {remedy}")


def _keys_of(config_type: type[Any]) -> list[str]:
    return [field.name for field in fields(config_type)]


def _check_nested_keys(values: Mapping[str, Any], config_type: type[Any]) -> None:
    """Check the entries of lists of records, such as `datasets`."""
    for name, hint in get_type_hints(config_type).items():
        for entry_type in get_args(hint):
            if (
                is_dataclass(entry_type)
                and isinstance(entry_type, type)
                and isinstance(values.get(name), list)
            ):
                for position, entry in enumerate(values[name]):
                    for key in entry if isinstance(entry, dict) else ():
                        _check_key(str(key), f"{name}[{position}].{key}", entry_type)


def _parse(config_type: type[Config], arguments: list[str]) -> Config:
    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=True
    )  # the sentence under each field is its --help
    parser = jsonargparse.ArgumentParser(prog="multipack.train", exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of these keys.")
    parser.add_class_arguments(config_type)
    try:
        namespace = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    values = parser.instantiate(namespace)
    return config_type(**{key: values[key] for key in get_type_hints(config_type)})
