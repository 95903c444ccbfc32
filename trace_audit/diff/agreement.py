"""How the KL estimate fares where the exact KL is known. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The fixed-support estimate against the exact KL, at the very same positions.

    The estimate's error is that of its tail draws, which are independent from position to position
    whatever the texts are; so the standard error counts positions, not sequences.

    Attributes:
        positions: Where both are finite.
        exact, estimate, lower_bound: Means there, nats.
        difference: Estimate minus exact, nats.
        standard_error: Of the difference; None at fewer than two positions.
    """

    positions: int
    exact: float
    estimate: float
    lower_bound: float
    difference: float
    standard_error: float | None

    @property
    def standard_errors(self) -> float | None:
        """The difference in standard errors; None where there is none to count in."""
        if not self.standard_error:
            return None
        return abs(self.difference) / self.standard_error


@dataclass(frozen=True, kw_only=True)
class ExactCheck:
    """Of KL(baseline || candidate) and of KL(candidate || baseline); None without an estimate."""

    forward: Agreement | None
    reverse: Agreement | None
