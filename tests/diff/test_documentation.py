from __future__ import annotations

import re
from pathlib import Path

from trace_audit.diff.catalog import CATALOG

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    first_cells = [line.split(" | ")[0] for line in rows]
    named = {name for cell in first_cells for name in re.findall(r"`([a-z0-9_.]+)`", cell)}
    assert named == set(CATALOG)
