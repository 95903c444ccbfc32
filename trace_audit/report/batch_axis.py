"""What to make of two runs that differ in how sequences were batched, and in nothing else.

Other neighbours can move numbers and still move them the same way every time. That is a property
of the configuration, not noise; reruns tell the two apart.
"""

from __future__ import annotations

from trace_audit.diff.config_differences import BATCH_ORDER
from trace_audit.diff.summary import PairSummary
from trace_audit.report.format import number

_BATCH_KEYS = {
    BATCH_ORDER: "batch order",
    "engine.max_num_seqs": "batch size",
    "engine.max_num_batched_tokens": "tokens of a launch",
    "engine.shard_size": "shard size",
}


def batch_axis_line(pair: PairSummary) -> str | None:
    """Whether batching alone moved the numbers, and whether it always would; None elsewhere."""
    keys = [difference.key for difference in pair.config_differences]
    if not keys or not _BATCH_KEYS.keys() >= set(keys) or _differ_elsewhere(pair):
        return None
    what = " and ".join(_BATCH_KEYS[key] for key in keys)
    if pair.bitwise:
        return f"The runs differ in {what} alone, and no bit does."
    return f"The runs differ in {what} alone: {_told_apart(pair)}."


def _differ_elsewhere(pair: PairSummary) -> bool:
    sides = (pair.baseline, pair.candidate)
    return any(
        len({getattr(run, name) for run in sides}) > 1
        for name in ("model_fingerprint", "environment_fingerprint")
    )


def _told_apart(pair: PairSummary) -> str:
    reruns = [floor for floor in pair.floors if floor.kind == "rerun" and floor.pairs]
    if not reruns:
        return "`replay --repeat 2` tells whether reruns differ too"
    if all(floor.bitwise for floor in reruns):
        return "deterministic but different, since reruns are bit-equal; this is not noise"
    shares = [floor.unequal_share for floor in reruns if floor.unequal_share is not None]
    if not shares:
        return "reruns may differ too, and have no logits hash to tell"
    return f"reruns differ too, in up to {number(max(shares), 'share')} of the rows"
