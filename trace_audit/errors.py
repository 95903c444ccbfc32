"""Typed errors: each carries the exit code of the command and one hint for the user."""

from __future__ import annotations

from typing import ClassVar


class TraceAuditError(Exception):
    """Base of every error this tool raises on purpose.

    Args:
        message: One sentence that names the thing that is wrong.
        hint: What the user can do about it, one sentence; by default the class's own.
    """

    exit_code: ClassVar[int] = 70
    default_hint: ClassVar[str | None] = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint if hint is not None else self.default_hint

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross a process boundary; the default reduce would drop the hint.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[TraceAuditError], message: str, hint: str | None) -> TraceAuditError:
    return cls(message, hint=hint)


class UsageError(TraceAuditError):
    """The user's command, file or input is wrong (exit code 2)."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is wrong, or this machine cannot honour it."""

    default_hint = "docs/configuration.md lists every key and its values"


class InputError(UsageError):
    """A prompts file or one of its lines is wrong."""

    default_hint = "docs/formats.md says what a line of a prompts file may hold"


class ModelError(UsageError):
    """A model directory cannot be used."""

    default_hint = (
        "give a directory with config.json, *.safetensors and a tokenizer, "
        "of a decoder that transformers knows"
    )


class AuditDirError(UsageError):
    """An audit directory is missing, incomplete, of another format, or in the way."""

    default_hint = (
        "`trace-audit verify DIR` checks every file; record or replay again what is damaged"
    )


class RequestError(UsageError):
    """A request was refused before it reached the device: parameter, value, remedy."""

    default_hint = "docs/configuration.md says what a run accepts"


class InvalidComparisonError(TraceAuditError):
    """Two runs cannot be compared (exit code 4)."""

    exit_code = 4


class RunFailedError(TraceAuditError):
    """A run could not be finished: disk, memory, a dead process, a bug (exit code 70)."""

    exit_code = 70
