"""The parts charts are made of, in user units of an SVG, and their axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH = 520.0
LEFT, RIGHT, TOP = 62.0, WIDTH - 14.0, 22.0
PLOT_HEIGHT = 170.0
BOTTOM = TOP + PLOT_HEIGHT
_TICKS_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A bar or a point (width 0) with its title; ``low`` and ``high`` are its interval's ends.

    Attributes:
        css: Class that styles it.
        label: Drawn beside it.
        cut: The interval goes on above the plot; an arrowhead says so.
    """

    x: float
    y: float
    width: float
    height: float
    css: str
    title: str
    label: str = ""
    low: float | None = None
    high: float | None = None
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything that is drawn.

    Attributes:
        description: The chart in one sentence.
        flags: Vertical lines: a mark without width, ``css`` names the line.
        headers, rows: The same numbers as a table.
    """

    title: str
    description: str
    height: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    x_title: str = ""
    line: str = ""
    flags: tuple[Mark, ...] = ()
    width: float = WIDTH
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM


def linear_ticks(highest: float, *, whole: bool = False) -> list[float]:
    """Zero and up to five round steps that reach ``highest``; the last is the plot's top."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    step = max(step, 1.0) if whole else step
    # A hair under a whole number of steps is that number, not one more.
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def spread(ticks: tuple[Tick, ...]) -> tuple[Tick, ...]:
    """Few enough of them that labels do not touch, evenly taken."""
    stride = max(1, math.ceil(len(ticks) / _TICKS_SHOWN))
    return ticks[::stride]


def to_y(value: float, top: float) -> float:
    """Height of a value on a linear axis from 0 to ``top``; SVG's y grows downwards."""
    return rounded(BOTTOM - max(0.0, value) / top * PLOT_HEIGHT)


def rounded(value: float) -> float:
    """A coordinate to a tenth of a unit: finer than a pixel, short in the page."""
    return round(value, 1)
