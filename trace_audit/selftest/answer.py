"""What `diff report` said, read as a program of a user's would: exit code, JSON, message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The report of one candidate.

    Attributes:
        exit_code: of the command.
        report: its JSON; None where it refused the comparison.
        message: why it refused; empty where it did not.
    """

    exit_code: int
    report: Mapping[str, Any] | None
    message: str = ""

    @property
    def pair(self) -> Mapping[str, Any]:
        """The candidate's part of the report; empty where the comparison was refused."""
        if self.report is None:
            return {}
        pair: Mapping[str, Any] = self.report["pairs"][0]
        return pair

    @property
    def verdict(self) -> str:
        """Exit code and verdict in words: `exit 0, PASS BITWISE`."""
        if self.report is None:
            return f"exit {self.exit_code}, INVALID: {self.message}"
        verdict = self.pair["verdict"]
        if verdict is None:
            return f"exit {self.exit_code}, no verdict"
        passed = f" {verdict['passed']}" if verdict["passed"] else ""
        return f"exit {self.exit_code}, {verdict['outcome'].upper()}{passed}"

    @property
    def first_difference(self) -> Mapping[str, Any] | None:
        """Sequence id, step and position of the first row that differs."""
        return self.pair.get("first_difference")

    @property
    def onset(self) -> Mapping[str, Any] | None:
        """Where differences begin to be the rule."""
        structure = self.pair.get("structure") or {}
        onset: Mapping[str, Any] | None = structure.get("onset")
        return onset

    def metric(self, name: str) -> Mapping[str, Any] | None:
        """A row of the table; None where the report has none."""
        return next((m for m in self.pair.get("metrics", ()) if m["name"] == name), None)

    def value(self, name: str) -> float:
        """A metric's value; NaN where it is n/a or not there."""
        metric = self.metric(name)
        # Non-finite numbers are strings in strict JSON, and float() reads them.
        return math.nan if metric is None or metric["value"] is None else float(metric["value"])
