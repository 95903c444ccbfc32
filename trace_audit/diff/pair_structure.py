"""Where two runs differ, all of it together."""

from __future__ import annotations

from collections.abc import Sequence

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.drift import drift
from trace_audit.diff.metric import Metric
from trace_audit.diff.onset import onset
from trace_audit.diff.pattern import Structure
from trace_audit.diff.periods import SIZES, periods
from trace_audit.diff.slices import (
    confidence_slices,
    launch_slices,
    phase_slices,
    router_slices,
    worst_share,
)
from trace_audit.diff.summary import RunIdentity

# What repeats leave under this in nine of ten tokens is no onset.
ONSET_FLOOR = "abs.p90"
_OWN_SIZES = ("engine.block_size", "engine.max_num_batched_tokens")


def pair_structure(
    pair: AlignedPair,
    resampler: Resampler,
    metrics: Sequence[Metric],
    candidate: RunIdentity,
) -> Structure:
    """Onset, drift, periods and slices of a pair.

    Args:
        pair: The aligned runs.
        resampler: Draws from its groups.
        metrics: The pair's metrics with their floors.
        candidate: Its configuration has block sizes of its own to look for.
    """
    floors = [m.floor.value for m in metrics if m.name == ONSET_FLOOR and m.floor is not None]
    own = [candidate.resolved.get(key) for key in _OWN_SIZES]
    return Structure(
        onset=onset(pair, max(floors, default=0.0)),
        drift=drift(pair, resampler),
        periods=periods(pair, (*SIZES, *(size for size in own if isinstance(size, int)))),
        phases=phase_slices(pair, resampler),
        launches=launch_slices(pair, resampler),
        confidence=confidence_slices(pair, resampler),
        routers=router_slices(pair, resampler),
        worst_kl_share=worst_share(pair.kl.estimate),
    )
