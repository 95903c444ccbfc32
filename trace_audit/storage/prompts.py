"""The prompts file: JSON lines, checked before a model is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_audit.config import Distribution, ScoringConfig, distribution_of
from trace_audit.errors import InputError
from trace_audit.storage.files import reason_of
from trace_audit.storage.prompt_fields import (
    PROMPT_FORMS,
    FieldError,
    check_keys,
    identifier,
    logprobs,
    messages,
    score_mask,
    scoring,
    text,
    token_ids,
)

_NAMED_LINES = 8  # in a message, of those that are wrong


@dataclass(frozen=True, kw_only=True)
class PromptEntry:
    """One line of a prompts file; exactly one of the three prompt forms is set.

    Attributes:
        index: 0-based place among the entries.
        line_number: 1-based line of the file.
        sequence_id: Its `id`, by default the index.
        group_id: Its `group_id`, by default the sequence id.
        prompt: Text, possibly empty.
        messages: For the model's chat template.
        prompt_token_ids: P >= 1 ids.
        output_token_ids: T >= 1 imported ids; None if they are to be generated.
        logprobs: T logprobs of the imported ids, nats; NaN beside a token that is context only.
        score_mask: T flags, false where an imported token is context only.
        scoring: How the logprobs were made; None where the line does not say.
    """

    index: int
    line_number: int
    sequence_id: str
    group_id: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    score_mask: list[bool] | None = None
    scoring: ScoringConfig | None = None


def read_prompts(path: Path) -> list[PromptEntry]:
    """Reads a prompts file. Blank lines and a byte order mark are skipped.

    Raises:
        InputError: The file or one of its lines is wrong; the message names the line and the key.
    """
    entries: list[PromptEntry] = []
    wrong: list[tuple[int, FieldError]] = []
    line_of: dict[str, int] = {}
    for line_number, line in _lines(Path(path)):
        try:
            entry = _entry(_json_object(line), len(entries) + len(wrong), line_number)
            _check_id(entry.sequence_id, line_of)
        except FieldError as error:
            wrong.append((line_number, error))
            continue
        line_of[entry.sequence_id] = line_number
        entries.append(entry)
    if wrong:
        line_number, first = wrong[0]
        others = _others([number for number, _ in wrong[1:]])
        message = f"{path}, line {line_number}: {first}.{others}"
        raise InputError(message, hint=first.hint) from first
    if not entries:
        raise InputError(
            f"The prompts file {path} is empty.", hint='Give one object a line: {"prompt": "..."}'
        )
    _check_one_scoring(path, entries)
    return entries


def _check_id(sequence_id: str, line_of: dict[str, int]) -> None:
    if sequence_id in line_of:
        raise FieldError(
            f"the id {sequence_id!r} is that of line {line_of[sequence_id]} too",
            hint="Give each line its own id; without one it is the line's 0-based index.",
        )


def _others(line_numbers: Sequence[int]) -> str:
    """A sentence about further wrong lines; empty where there are none."""
    if not line_numbers:
        return ""
    named = ", ".join(map(str, line_numbers[:_NAMED_LINES]))
    if len(line_numbers) == 1:
        return f" Line {named} is wrong too."
    more = len(line_numbers) - _NAMED_LINES
    return f" Lines {named}{f' and {more} more' if more > 0 else ''} are wrong too."


def import_warnings(entries: Sequence[PromptEntry]) -> list[str]:
    """What looks wrong with imported logprobs, as full sentences."""
    given = [
        (entry, [value for value in entry.logprobs if not math.isnan(value)])
        for entry in entries
        if entry.logprobs is not None
    ]
    warnings = []
    positive = [(e, value) for e, values in given for value in values if value > 0]
    if positive:
        entry, worst = max(positive, key=lambda item: item[1])
        warnings.append(
            f"{len(positive)} imported logprobs are positive, the largest {worst:g} on line "
            f"{entry.line_number}: they were computed in low precision, or are not logprobs."
        )
    values = {value for _, found in given for value in found}
    if len(values) == 1 and sum(len(found) for _, found in given) > 1:
        warnings.append(
            f"Every imported logprob is {values.pop():g}: the engine that gave them did not "
            "compute them."
        )
    if given and len(given) < len(entries):
        warnings.append(
            f"{len(entries) - len(given)} of {len(entries)} lines give no logprobs, so the run "
            "named imported is a subset."
        )
    return warnings


def _check_one_scoring(path: Path, entries: Sequence[PromptEntry]) -> None:
    """Imported logprobs become one run, so they must all have been made alike."""
    given = [entry for entry in entries if entry.logprobs is not None]
    for entry in given:
        if _distribution(entry) != _distribution(given[0]):
            raise InputError(
                f"{path}, line {entry.line_number}: scoring is not that of line "
                f"{given[0].line_number}.",
                hint="Say the same on every line with logprobs, or record them apart.",
            )


def _distribution(entry: PromptEntry) -> Distribution | None:
    return None if entry.scoring is None else distribution_of(entry.scoring)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"There is no prompts file {path}.", hint="Give the path of a JSONL file to --prompts."
        ) from error
    except IsADirectoryError as error:
        raise InputError(
            f"{path} is a directory, not a prompts file.", hint="Give a JSONL file to --prompts."
        ) from error
    except OSError as error:
        raise InputError(f"The prompts file {path} cannot be read: {reason_of(error)}.") from error
    # Only a newline ends a line: text may hold the other separators of Unicode.
    for line_number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {line_number}: byte {error.start + 1} is not UTF-8.",
                hint="Save the file as UTF-8.",
            ) from error
        if line:
            yield line_number, line


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        hint = "Write one JSON object a line." if error.pos else 'Lines look like {"prompt": "x"}.'
        raise FieldError(
            f"this is not JSON: {error.msg[:1].lower()}{error.msg[1:]}, at column {error.colno}",
            hint=hint,
        ) from error
    except RecursionError as error:
        raise FieldError("the JSON is nested too deeply") from error
    except ValueError as error:
        # A number of thousands of digits.
        raise FieldError("this is not JSON that can be read: a number is too long") from error
    if not isinstance(value, dict):
        raise FieldError(
            f"this is a JSON {_kind(value)}, not an object", hint='Lines look like {"prompt": "x"}.'
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FieldError(f"the key {twice!r} is there twice")
    return result


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds[type(value)]


def _entry(value: dict[str, Any], index: int, line_number: int) -> PromptEntry:
    check_keys(value)
    forms = [key for key in PROMPT_FORMS if key in value]
    if len(forms) != 1:
        given = " and ".join(forms) if forms else "none of them"
        raise FieldError(f"give exactly one of {', '.join(PROMPT_FORMS)}; this has {given}")
    sequence_id = identifier(value, "id", str(index))
    output = token_ids(value, "output_token_ids") if "output_token_ids" in value else None
    mask = score_mask(value, output)
    return PromptEntry(
        index=index,
        line_number=line_number,
        sequence_id=sequence_id,
        group_id=identifier(value, "group_id", sequence_id),
        prompt=text(value["prompt"], "prompt") if "prompt" in value else None,
        messages=messages(value["messages"]) if "messages" in value else None,
        prompt_token_ids=(
            token_ids(value, "prompt_token_ids") if "prompt_token_ids" in value else None
        ),
        output_token_ids=output,
        logprobs=logprobs(value, output, mask),
        score_mask=mask,
        scoring=scoring(value),
    )
