"""Which of two runs is nearer to a third one.

A difference between two low-precision runs does not say which of them is wrong; a run that is
trusted more, say the float32 record, does.
"""

from __future__ import annotations

import numpy as np

from trace_audit.diff.align import AlignedPair, RunRows
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.kl import FixedSupport, KLTerms, fixed_support, fixed_support_kl
from trace_audit.diff.kl_metrics import MAX_HEAVY_SHARE, heavy_tail_share
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


def judged_by(
    pair: AlignedPair, referee: RunRows, resampler: Resampler, *, margin: float
) -> Referee:
    """D = KL(referee || candidate) - KL(referee || baseline), by group.

    Args:
        pair: The two runs.
        referee: The run that is trusted.
        resampler: Draws from the pair's groups.
        margin: How much farther counts as not farther, nats.
    """
    terms = _terms(pair, referee)
    if isinstance(terms, str):
        return Referee(run=referee.name, margin=margin, reason=terms)
    near, far = terms
    used = near.usable & far.usable
    tokens = GroupedTokens(pair.group[used], resampler)
    estimate = tokens.mean(far.estimate[used] - near.estimate[used])
    nearness: Nearness = "undecided"
    if estimate.interval is not None:
        if estimate.interval.low > margin:
            nearness = "farther"
        elif estimate.interval.high < 0:
            nearness = "nearer"
        elif estimate.interval.high <= margin:
            nearness = "not farther"
    return Referee(
        run=referee.name,
        margin=margin,
        baseline_kl=float(near.estimate[used].mean()),
        candidate_kl=float(far.estimate[used].mean()),
        difference=estimate.value,
        interval=estimate.interval,
        nearness=nearness,
        left_out=int((~used).sum()),
    )


def _terms(pair: AlignedPair, referee: RunRows) -> tuple[KLTerms, KLTerms] | str:
    """KL(referee || baseline) and KL(referee || candidate) of each row, or why there is none."""
    rows = referee.row_of[pair.flat]
    if (rows < 0).any():
        return "the referee lacks some of the compared tokens"
    sides = [
        fixed_support(columns)
        for columns in (
            referee.columns.take(rows),
            pair.baseline,
            pair.candidate,
            pair.record,
        )
    ]
    found: list[FixedSupport] = [side for side in sides if side is not None]
    if len(found) < len(sides):
        return "a run has no logprobs at the fixed support"
    judge, baseline, candidate, record = found
    ids = pair.support_token_ids
    near, far = (fixed_support_kl(judge, side, record, ids) for side in (baseline, candidate))
    if not (near.usable & far.usable).any():
        return "no position has a finite KL on both sides"
    if np.any(far.infinite & ~near.infinite):
        return f"KL to the candidate is infinite at {int(far.infinite.sum()):,} tokens"
    share = max(heavy_tail_share(near) or 0.0, heavy_tail_share(far) or 0.0)
    if share > MAX_HEAVY_SHARE:
        return f"{share:.0%} of a KL comes from tails over 4 times the record run's"
    return near, far
