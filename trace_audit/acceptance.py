"""How many of a run's drafts stayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def acceptance(counters: Mapping[str, int]) -> dict[str, Any] | None:
    """Shares of what a run counted; None where nothing was drafted.

    Args:
        counters: of run.json.

    Returns:
        `acceptance_rate`: accepted draft tokens of all draft tokens. `mean_acceptance_length`:
        tokens a verified draft committed, the one after or instead of its last included.
        `acceptance_rate_per_position`: drafts that stayed at least up to each place, of all drafts.
        The names are those of vLLM's metrics.
    """
    drafts, draft_tokens = counters.get("drafts", 0), counters.get("draft_tokens", 0)
    if not drafts or not draft_tokens:
        return None
    accepted = counters["accepted_draft_tokens"]
    per_position: list[float] = []
    while (count := counters.get(f"accepted_at_{len(per_position) + 1}")) is not None:
        per_position.append(count / drafts)
    return {
        "acceptance_rate": accepted / draft_tokens,
        "mean_acceptance_length": 1 + accepted / drafts,
        "acceptance_rate_per_position": per_position,
    }
