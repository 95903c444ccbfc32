"""Values replaced by `--set`: one by one, and as a cross product."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trace_audit.config.model import SECTIONS, RunConfig
from trace_audit.config.validate import nearest_hint, validate
from trace_audit.errors import ConfigError


def override(config: RunConfig, overrides: Mapping[str, object]) -> RunConfig:
    """A copy of `config` with some values replaced.

    Args:
        overrides: dotted key (`engine.dtype`) -> value.

    Raises:
        ConfigError: a key is unknown or a value is wrong.
    """
    values: dict[str, Any] = config.model_dump()
    for key, value in overrides.items():
        if key not in keys():
            raise _unknown_key(key, keys())
        *sections, last = key.split(".")
        table = values
        for section in sections:
            table = table[section]
        table[last] = value
    return validate(values)


def flat(config: RunConfig) -> dict[str, object]:
    """Dotted key -> value, in the order of the definition."""
    return dict(_flatten(config.model_dump(), ""))


def keys() -> list[str]:
    """Every dotted key, in the order of the definition."""
    return [
        "name",
        *(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields),
    ]


def parse_set(values: Sequence[str]) -> list[dict[str, object]]:
    """The overrides that `--set` options ask for, as a cross product.

    Args:
        values: each `KEY=V1,V2,...`. A key is dotted, or bare where only one key has that name.
            A value is read as a TOML scalar, and as a string where it is none.

    Returns:
        One dict of dotted key -> value a combination, the last key varying fastest; one empty
        dict when nothing is asked for.

    Raises:
        ConfigError: no `=`, an unknown key, a key or value given twice, an empty value.
    """
    choices: dict[str, list[object]] = {}
    for text in values:
        key, equals, right = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {text!r} is not KEY=VALUE", hint="for example --set dtype=bfloat16,float16"
            )
        key = _full_key(key.strip())
        if key in choices:
            raise ConfigError(
                f"--set names {key} twice", hint=f"give several values as --set {key}=V1,V2"
            )
        choices[key] = _set_values(key, right)
    return [
        dict(zip(choices, combination, strict=True))
        for combination in itertools.product(*choices.values())
    ]


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _full_key(key: str) -> str:
    """The dotted key that `key` means."""
    if key in keys():
        return key
    matches = [full for full in keys() if full.rpartition(".")[2] == key]
    if len(matches) > 1:
        raise ConfigError(f"the key {key} is ambiguous", hint=f"write {' or '.join(matches)}")
    if not matches:
        # A bare word is measured against bare names, or the section would outweigh a typo.
        known = keys() if "." in key else [full.rpartition(".")[2] for full in keys()]
        raise _unknown_key(key, known)
    return matches[0]


def _unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"unknown key {key}", hint=nearest_hint(key, known))


def _set_values(key: str, text: str) -> list[object]:
    parsed = [_scalar(part.strip()) for part in text.split(",")]
    if "" in parsed:
        raise ConfigError(f"--set {key}={text} has an empty value", hint=f"write --set {key}=V1,V2")
    repeated = next((v for i, v in enumerate(parsed) if v in parsed[:i]), None)
    if repeated is not None:
        raise ConfigError(f"--set {key} names the value {repeated} twice")
    return parsed


def _scalar(text: str) -> object:
    """A TOML boolean, number or quoted string; any other text is itself."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    is_scalar = len(document) == 1 and isinstance(value, bool | int | float | str)
    return value if is_scalar else text
