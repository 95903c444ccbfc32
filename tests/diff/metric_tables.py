"""The tables of `docs/metrics.md`, from the catalogue and the profiles.

`python -m tests.diff.metric_tables` writes the current ones into the page, between
`<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trace_audit.diff.bands import BANDS
from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.profiles import PROFILES
from trace_audit.diff.verdict import Gate

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Name of a table -> its Markdown: one a section of metrics, profiles, bands."""
    sections = dict.fromkeys(info.section for info in CATALOG.values())
    found = {section: _metrics(section) for section in sections}
    return {**found, "profiles": _profiles(), "bands": _bands()}


def refreshed(text: str) -> str:
    """The page with every table replaced by the current one."""
    current = tables()
    return BLOCK.sub(lambda match: f"{match[1]}{current[match[2]]}{match[3]}", text)


def _metrics(section: str) -> str:
    rows = [
        (f"`{name}`", info.formula, info.unit, info.reads, info.valid)
        for name, info in CATALOG.items()
        if info.section == section
    ]
    return _table(("name", "formula", "unit", "reads as", "valid"), rows)


def _profiles() -> str:
    rows = [
        (f"`{profile.name}`" if not i else "", _gate(gate), gate.source, profile.purpose)
        for profile in PROFILES.values()
        for i, gate in enumerate(profile.gates)
    ]
    return _table(("profile", "fails over", "where the number comes from", "for"), rows)


def _bands() -> str:
    rows = [
        (kind.change if not i else "", f"`{name}`", f"{low:g} to {high:g}", source)
        for kind in BANDS
        for i, (name, (low, high, source)) in enumerate(kind.bands.items())
    ]
    return _table(("change", "metric", "normal", "who measured it"), rows)


def _gate(gate: Gate) -> str:
    fp8 = "" if gate.fp8_bound is None else f" ({gate.fp8_bound:g} where a run is in fp8)"
    watched = " (watched)" if gate.watch else ""
    return f"{gate.metric} {gate.bound:g}{fp8}{watched}"


def _table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(headers)]
    lines.append(["---"] * len(lines[0]))
    lines.extend([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
