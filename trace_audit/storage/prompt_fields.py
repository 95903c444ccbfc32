"""The keys of a prompts file's line, each checked by itself."""

from __future__ import annotations

import difflib
import math
from typing import Any

from trace_audit.config import ScoringConfig
from trace_audit.config.scoring import read_scoring
from trace_audit.errors import ConfigError

PROMPT_FORMS = ("prompt", "messages", "prompt_token_ids")
_KEYS = (*PROMPT_FORMS, "id", "group_id", "output_token_ids", "logprobs", "score_mask", "scoring")
_MAX_TOKEN_ID = 2**31 - 1
_SHOWN = 40


class FieldError(Exception):
    """What is wrong with a line, as a clause; the caller names file and line.

    Args:
        message: The clause, without a full stop.
        hint: What to do about it, one sentence.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def check_keys(value: dict[str, Any]) -> None:
    """Refuses a key that is not one of the format's, with the nearest that is."""
    for key in value:
        if key in _KEYS:
            continue
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"The keys are {', '.join(_KEYS)}."
        raise FieldError(f"the key {key!r} is unknown", hint=hint)


def identifier(value: dict[str, Any], key: str, default: str) -> str:
    """An id: a string or an integer, as a string."""
    if key not in value:
        return default
    given = value[key]
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if not isinstance(given, str) or not given:
        raise FieldError(f"{key} must be a non-empty string or an integer, not {_shown(given)}")
    return text(given, key)


def text(value: object, where: str) -> str:
    """A string that can be encoded."""
    if not isinstance(value, str):
        raise FieldError(f"{where} must be a string, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FieldError(
            f"{where} has half a surrogate pair at character {error.start + 1}, which is no text"
        ) from error
    return value


def messages(value: object) -> list[dict[str, Any]]:
    """A chat: objects with a role, in the form that chat templates take."""
    if not isinstance(value, list) or not value:
        raise FieldError(f"messages must be a non-empty array, not {_shown(value)}")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message:
            raise FieldError(f"messages[{i}] must be an object with a role")
        _check_text(message, f"messages[{i}]")
        text(message["role"], f"messages[{i}].role")
    return value


def token_ids(value: dict[str, Any], key: str) -> list[int]:
    """A non-empty list of ids that fit int32."""
    ids = value[key]
    if not isinstance(ids, list) or not ids:
        raise FieldError(f"{key} must be a non-empty array of token ids, not {_shown(ids)}")
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise FieldError(f"{key}[{i}] must be an integer, not {_shown(token)}")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise FieldError(f"{key}[{i}] is {_shown(token)}, outside 0 to {_MAX_TOKEN_ID}")
    return ids


def logprobs(
    value: dict[str, Any], output: list[int] | None, mask: list[bool] | None
) -> list[float] | None:
    """A finite number an output token, NaN beside one that is not scored, whatever is given there.

    Positive ones are let through, to be warned about.
    """
    if "logprobs" not in value:
        return None
    found = []
    for i, number in enumerate(_beside(value, "logprobs", output)):
        scored = mask is None or mask[i]
        if number is None and not scored:
            found.append(math.nan)
            continue
        if number is None:
            raise FieldError(
                f"logprobs[{i}] must be a number, not null",
                hint="Only a token that score_mask leaves out may have none.",
            )
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise FieldError(f"logprobs[{i}] must be a number, not {_shown(number)}")
        try:
            finite = math.isfinite(float(number))
        except OverflowError:
            finite = False
        if not finite:
            raise FieldError(f"logprobs[{i}] must be finite, not {_shown(number)}")
        # Engines and frameworks fill in a number where they have none.
        found.append(float(number) if scored else math.nan)
    return found


def score_mask(value: dict[str, Any], output: list[int] | None) -> list[bool] | None:
    """A flag an output token, at least one of them true."""
    if "score_mask" not in value:
        return None
    mask = _beside(value, "score_mask", output)
    for i, flag in enumerate(mask):
        if not isinstance(flag, bool):
            raise FieldError(f"score_mask[{i}] must be true or false, not {_shown(flag)}")
    if not any(mask):
        raise FieldError("score_mask leaves no token to score")
    return mask


def scoring(value: dict[str, Any]) -> ScoringConfig | None:
    """How the line's logprobs were made, in the keys of a configuration's `[scoring]`."""
    if "scoring" not in value:
        return None
    if "logprobs" not in value:
        raise FieldError("scoring needs logprobs beside it")
    given = value["scoring"]
    if not isinstance(given, dict):
        raise FieldError(f"scoring must be an object, not {_shown(given)}")
    try:
        return read_scoring(given)
    except ConfigError as error:
        raise FieldError(error.message, hint=error.hint) from error


def _beside(value: dict[str, Any], key: str, output: list[int] | None) -> list[Any]:
    if output is None:
        raise FieldError(f"{key} needs output_token_ids beside it")
    given = value[key]
    if not isinstance(given, list):
        raise FieldError(f"{key} must be an array, not {_shown(given)}")
    if len(given) != len(output):
        raise FieldError(f"{key} has {len(given)} entries, output_token_ids has {len(output)}")
    return given


def _check_text(value: object, where: str) -> None:
    """Every string inside can be encoded: a template may print any of them."""
    if isinstance(value, str):
        text(value, where)
    elif isinstance(value, list):
        for item in value:
            _check_text(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            text(key, where)
            _check_text(item, f"{where}.{key}")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        shown = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
