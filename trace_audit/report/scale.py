"""The colour scale of |delta|: classes of half a decade and more, the same in every report.

An absolute scale lets two reports be compared by eye. A class is a name ("d4"); the style sheet
gives it a colour, of falling lightness in the light theme and of rising lightness in the dark one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from trace_audit.report.format import number

# Upper ends in nats, exclusive. Half decades where low-precision runs differ from each other.
EDGES = (1e-5, 1e-4, 1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1, 10**-0.5, 1.0, 10**0.5)
ZERO, NON_FINITE, MASKED = "d0", "dx", "dm"


@dataclass(frozen=True, kw_only=True)
class LegendItem:
    """One class of the scale and what it stands for."""

    css: str
    label: str


def css_class(size: float) -> str:
    """Class of |delta|, nats: d0 for exactly zero, then d1 to d11; dx if it is not finite."""
    if not math.isfinite(size):
        return NON_FINITE
    return ZERO if size == 0 else f"d{1 + bisect_right(EDGES, size)}"


def legend() -> tuple[LegendItem, ...]:
    """Every class, from zero up; a class is told by its lower end."""
    lows = [LegendItem(css=f"d{i}", label=_power(low)) for i, low in enumerate(EDGES, 2)]
    return (
        LegendItem(css=ZERO, label="0"),
        LegendItem(css="d1", label=">0"),
        *lows,
        LegendItem(css=NON_FINITE, label="not finite"),
    )


def _power(value: float) -> str:
    return (
        f"{value:.0e}".replace("e-0", "e-")
        if value < 1e-3
        else number(value).rstrip("0").rstrip(".")
    )
