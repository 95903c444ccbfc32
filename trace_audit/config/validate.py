"""Reading a configuration, with messages that name the key, the value and what is valid."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trace_audit.config.model import SECTIONS, RunConfig
from trace_audit.errors import ConfigError

_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "finite_number": "a finite number",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def load_config(path: Path) -> RunConfig:
    """Read a configuration file.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value in it is wrong.
    """
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"the configuration file {path} does not exist",
            hint="copy one from configs/ and change it",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: byte {error.start} is not valid UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return validate(values, source=f"{path}: ")


def validate(values: Mapping[str, Any], *, source: str = "") -> RunConfig:
    """A configuration from plain values.

    Args:
        source: put before every message, such as the file's name and a colon.

    Raises:
        ConfigError: the first thing that is wrong with the values.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise _config_error(details, source) from error


def nearest_hint(wrong: object, valid: Sequence[str]) -> str:
    """A hint that offers the nearest valid word, or all of them."""
    near = difflib.get_close_matches(str(wrong), valid, n=1)
    return f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"


def _config_error(details: list[ErrorDetails], source: str) -> ConfigError:
    # An unknown key first: what else is wrong is often its consequence (`nane` for `name`).
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    key = ".".join(map(str, detail["loc"]))
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key_error(detail["loc"], source)
    if kind == "missing":
        return ConfigError(f"{source}the key {key} is missing", hint=f'add {key} = "..."')
    value = _shown(detail["input"])
    if kind == "literal_error":
        valid = _literal_values(detail)
        hint = nearest_hint(detail["input"], valid)
        return ConfigError(f"{source}{key} = {value} is not one of {', '.join(valid)}", hint=hint)
    return ConfigError(f"{source}{key} = {value} is wrong: it must be {_expected(detail)}")


def _unknown_key_error(location: tuple[int | str, ...], source: str) -> ConfigError:
    section = _section(location[:-1])
    wrong, prefix = str(location[-1]), "".join(f"{part}." for part in location[:-1])
    owners = [name for name, owner in SECTIONS.items() if wrong in owner.model_fields]
    if owners:
        hint = f"{wrong} belongs under [{owners[0]}]"
    else:
        hint = nearest_hint(wrong, list(section.model_fields))
    return ConfigError(f"{source}unknown key {prefix}{wrong}", hint=hint)


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    return SECTIONS[str(location[0])] if location else RunConfig


def _literal_values(detail: ErrorDetails) -> list[str]:
    *sections, key = detail["loc"]
    return [str(v) for v in get_args(_section(tuple(sections)).model_fields[str(key)].annotation)]


def _expected(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "greater_than":
        return f"more than {context['gt']}"
    if kind == "less_than_equal":
        return f"at most {context['le']}"
    if kind == "value_error":
        return str(context["error"])
    return _EXPECTED_TYPES.get(kind, detail["msg"])


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
