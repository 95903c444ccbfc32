"""Which of two runs is nearer to a third one.

A difference between two low-precision runs does not say which of them is wrong; a run that is
trusted more, say the float32 record, does.
"""

from __future__ import annotations

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.estimators import Estimator
from trace_audit.diff.kl_metrics import MAX_HEAVY_SHARE
from trace_audit.diff.verdict import Nearness, Referee
from trace_audit.errors import UsageError


def check_referee(referee: str | None, baseline: str, candidates: tuple[str, ...]) -> None:
    """Refuses a referee that is one of the two sides.

    Raises:
        UsageError: It is; nothing is nearer to itself.
    """
    if referee is not None and referee in (baseline, *candidates):
        side = "the baseline" if referee == baseline else "a candidate"
        raise UsageError(
            f"The referee {referee!r} is {side} itself.",
            hint="Name two other runs with --baseline and --candidate.",
        )


def judged_by(pair: AlignedPair, referee: str, resampler: Resampler, *, margin: float) -> Referee:
    """D = KL(referee || candidate) - KL(referee || baseline), by group.

    Args:
        pair: The two runs, read together with the referee.
        referee: The run that is trusted.
        resampler: Draws from the pair's groups.
        margin: How much farther counts as not farther, nats.
    """
    reason = _why_none(pair)
    kl = pair.kl.referee
    if reason is not None or kl is None:
        return Referee(run=referee, margin=margin, reason=reason)
    estimate = Estimator(resampler).mean(kl.difference)
    nearness: Nearness = "undecided"
    if estimate.interval is not None:
        if estimate.interval.low > margin:
            nearness = "farther"
        elif estimate.interval.high < 0:
            nearness = "nearer"
        elif estimate.interval.high <= margin:
            nearness = "not farther"
    return Referee(
        run=referee,
        margin=margin,
        baseline_kl=kl.near_used.mean,
        candidate_kl=kl.far_used.mean,
        difference=estimate.value,
        interval=estimate.interval,
        nearness=nearness,
        left_out=len(pair) - kl.difference.size,
    )


def _why_none(pair: AlignedPair) -> str | None:
    """Why there is no KL from the referee to compare; None if there is."""
    if pair.referee_run is None:
        return "the referee lacks some of the compared tokens"
    kl = pair.kl.referee
    if kl is None:
        return "a run has no logprobs at the fixed support"
    if not kl.difference.size:
        return "no position has a finite KL on both sides"
    if kl.newly_infinite:
        return f"KL to the candidate is infinite at {kl.far.infinite:,} tokens"
    share = max(kl.near.heavy_share or 0.0, kl.far.heavy_share or 0.0)
    if share > MAX_HEAVY_SHARE:
        return f"{share:.0%} of a KL comes from tails over 4 times the record run's"
    return None
