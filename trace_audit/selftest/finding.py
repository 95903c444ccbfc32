"""What came of a control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["ok", "FAILED", "reported"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One control: what was planted and what the tool made of it.

    Attributes:
        control: its name.
        planted: what was done to the run.
        expected: what a sound tool says of it.
        said: what the tool said.
        holds: whether that is what was expected; None where nothing is.
    """

    control: str
    planted: str
    expected: str
    said: str
    holds: bool | None

    @property
    def outcome(self) -> Outcome:
        """In a word."""
        if self.holds is None:
            return "reported"
        return "ok" if self.holds else "FAILED"
