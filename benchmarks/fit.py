"""Straight lines through measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Line:
    """y = intercept + slope * x by least squares.

    Attributes:
        slope, intercept: of the line.
        r_squared: share of the points' variance that it explains; 1 for points on a line.
    """

    slope: float
    intercept: float
    r_squared: float


def fitted(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """The line through points; None where they have fewer than two places on the x axis."""
    if len(set(x)) < 2:
        return None
    slope, intercept = np.polyfit(np.array(x, dtype=float), np.array(y, dtype=float), 1)
    rest = np.array(y) - (intercept + slope * np.array(x))
    spread = float(((np.array(y) - np.mean(y)) ** 2).sum())
    explained = 1.0 - float((rest**2).sum()) / spread if spread else 1.0
    return Line(slope=float(slope), intercept=float(intercept), r_squared=explained)
