"""Numbers and names as short text, the same in every format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, Decimal

from rich.cells import cell_len

from trace_audit.diff.summary import Interval, Metric, Place, PositionBucket
from trace_audit.text import display_bytes

NOT_AVAILABLE = "n/a"
_SPARKS = "▁▂▃▄▅▆▇█"


def number(value: float, unit: str = "nats") -> str:
    """A value in its unit, without the unit's name except "%" for shares."""
    if not math.isfinite(value):
        return str(value)
    if unit == "share":
        return f"{_digits(100 * value)} %"
    if unit == "ratio":
        # Read by its distance from 1, which needs more digits than its size.
        return f"{value:.6f}" if abs(value) < 1e3 else _digits(value)
    if unit == "ppl":
        return f"{value:.4f}" if abs(value) < 1e3 else _digits(value)
    return _digits(value)


def number_up(value: float, unit: str = "nats") -> str:
    """As :func:`number`, rounded up: a bound of what is printed is not under the value."""
    if not math.isfinite(value) or value == 0:
        return number(value, unit)
    scale = 100 if unit == "share" else 1
    exact = Decimal(value) * scale
    places = 6 if unit == "ratio" else 2 - exact.adjusted()
    rounded = exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING)
    return number(float(rounded / scale), unit)


def signed(value: float) -> str:
    """A delta in nats with its sign; zero has none."""
    return f"+{number(value)}" if value > 0 else number(value)


def interval(bounds: Interval | None, unit: str) -> str:
    """The interval in brackets, or nothing."""
    if bounds is None:
        return ""
    if unit == "share":
        return f"[{_digits(100 * bounds.low)}, {_digits(100 * bounds.high)}] %"
    return f"[{number(bounds.low, unit)}, {number(bounds.high, unit)}]"


def metric_value(metric: Metric | None) -> str:
    """The value, ">=" before a lower bound, or n/a."""
    if metric is None or metric.value is None:
        return NOT_AVAILABLE
    text = number(metric.value, metric.unit)
    if metric.name == "delta.mean":
        text = signed(metric.value)
    return f">= {text}" if metric.at_least else text


def count(value: float | None) -> str:
    """A whole number with thousands separated, or n/a."""
    return NOT_AVAILABLE if value is None else f"{round(value):,}"


def plain(value: object) -> str:
    """Any text or configuration value on one line, with control characters visible."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return display_bytes(str(value).encode("utf-8", "surrogatepass"))


def setting(value: object) -> str:
    """A configuration value; an empty one can be seen."""
    return '""' if value == "" else plain(value)


def fingerprint(value: str | None) -> str:
    """The first digits of a hash, enough to tell two apart by eye."""
    return "-" if value is None else plain(value.removeprefix("sha256:")[:12])


def place(where: Place | None) -> str:
    """Sequence, step and position in words; "nowhere" without one."""
    if where is None:
        return "nowhere"
    return f"position {where.position} (sequence {plain(where.sequence_id)}, step {where.step})"


def sparkline(buckets: tuple[PositionBucket, ...]) -> str:
    """One character a bucket, scaled to the largest mean; a dot where it is exactly zero."""
    return sparks([bucket.mean_abs_delta for bucket in buckets])


def sparks(values: Sequence[float]) -> str:
    """One character a value, none of them negative, as :func:`sparkline` has them."""
    top = max(values, default=0.0)
    return "".join(_spark(value, top) for value in values)


def shorten_left(text: str, width: int) -> str:
    """The end of a text in at most ``width`` terminal cells, an ellipsis where it was cut."""
    if cell_len(text) <= width:
        return text
    return "…" + _fitting(reversed(text), width - 1)[::-1]


def shorten_right(text: str, width: int) -> str:
    """The start of a text in at most ``width`` terminal cells, an ellipsis where it was cut."""
    if cell_len(text) <= width:
        return text
    return _fitting(text, width - 1) + "…"


def _fitting(characters: Iterable[str], width: int) -> str:
    kept: list[str] = []
    for character in characters:
        width -= cell_len(character)
        if width < 0:
            break
        kept.append(character)
    return "".join(kept)


def _digits(value: float) -> str:
    """Three significant digits; powers of ten only where plain digits would not do."""
    if value == 0:
        return "0"
    # Rounded first: 0.00999999 has as many decimals as 0.0100, not as 0.00999.
    size = abs(float(f"{value:.2e}"))
    if size >= 1e5 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def _spark(value: float, top: float) -> str:
    if value == 0 or top == 0:
        return "·"
    return _SPARKS[min(len(_SPARKS) - 1, int(value / top * len(_SPARKS)))]
