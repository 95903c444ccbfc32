"""Definitions of the metrics of the whole distribution and of the best token."""

from __future__ import annotations

from functools import partial

from trace_audit.diff.metric_info import SAMPLED, SIGNED, MetricInfo

_ANY = float("-inf")
_kl = partial(MetricInfo, section="kl", unit="nats", source="diff/kl_metrics.py")
_SUPPORT = "both runs and the record run have logprobs at the fixed support"
_exact = partial(
    MetricInfo,
    section="kl",
    unit="nats",
    source="diff/exact_kl.py",
    valid="one run is the record, which was made with --exact-positions",
)
_logits = partial(MetricInfo, section="distribution", unit="nats", source="diff/metrics.py")
_top = partial(
    MetricInfo,
    section="top1",
    unit="share",
    source="diff/flips.py",
    valid="both runs have their own best tokens",
)
_DTYPED = "as flip.all, and a run states the dtype of its logits"

DISTRIBUTION: dict[str, MetricInfo] = {
    "kl.mean": _kl(
        label="KL(baseline||candidate)",
        formula="mean KL(A || B), estimated at the fixed support",
        reads="what changed in the whole distribution",
        valid=_SUPPORT,
    ),
    "kl.lower": _kl(
        label="  lower bound",
        formula="mean of the top ids' terms and one tail bucket of KL(A || B)",
        reads="KL is at least this",
        valid=_SUPPORT,
        not_gated="it bounds KL from below; gate on kl.mean",
    ),
    "kl.reverse": _kl(
        label="KL(candidate||baseline)",
        formula="mean KL(B || A)",
        reads="weighs what the candidate adds",
        valid=f"{_SUPPORT}; not gated where it is only a lower bound",
    ),
    "kl.reverse_lower": _kl(
        label="  lower bound",
        formula="mean of the top ids' terms and one tail bucket of KL(B || A)",
        reads="the reverse KL is at least this",
        valid=_SUPPORT,
        not_gated="it bounds KL from below; gate on kl.reverse",
    ),
    "kl.exact": _exact(
        label="exact KL(baseline||candidate)",
        formula="mean KL(A || B) over the whole vocabulary, at the record's exact positions",
        reads="whether kl.mean holds here: its note compares the two at the same positions",
    ),
    "kl.exact_reverse": _exact(
        label="exact KL(candidate||baseline)",
        formula="mean KL(B || A) over the whole vocabulary, at the record's exact positions",
        reads="whether kl.reverse holds here",
    ),
    "kl.excess": _kl(
        unit="factor",
        label="KL excess over baseline",
        formula="KL(record || B) / KL(record || A), sum over sum, paired by group",
        reads="1: the candidate is as far from the record as the baseline is; 2: twice as far",
        valid=f"a float32 record, a baseline of the candidate's dtype; {_SUPPORT}",
        neutral=1.0,
    ),
    "kl.k1": _kl(
        label="k1 = mean -delta",
        formula="mean(-delta)",
        reads="unbiased for KL(A || B), noisy, can be negative",
        valid=SAMPLED,
        minimum=_ANY,
        signed=True,
        not_gated=f"{SIGNED}; gate on kl.k3",
    ),
    "kl.k2": _kl(
        label="k2",
        formula="mean(delta^2) / 2",
        reads="biased for KL(A || B) unless the runs are close, little noise",
        valid=SAMPLED,
    ),
    "kl.k3": _kl(
        label="k3",
        formula="mean(exp(delta) - 1 - delta)",
        reads="unbiased for KL(A || B), never negative",
        valid=SAMPLED,
    ),
    "lse.drift": _logits(
        label="logsumexp drift",
        formula="mean(lse_B - lse_A)",
        reads="a shift of all logits, not a change of shape",
        valid="both runs have it",
        minimum=_ANY,
        signed=True,
        not_gated=f"{SIGNED}; gate on kl.mean",
    ),
    "entropy.drift": _logits(
        label="entropy drift",
        formula="mean(H_B - H_A)",
        reads="sharper (negative) or flatter",
        valid="both runs have it",
        minimum=_ANY,
        signed=True,
        not_gated=f"{SIGNED}; gate on kl.mean",
    ),
    "rank.changed": _logits(
        unit="share",
        label="forced token's rank changed",
        formula="share of forced tokens whose rank differs",
        reads="rank = 1 + strictly larger logits; ties are apart",
        valid="both runs have it",
    ),
    "ties.baseline": _logits(
        unit="share",
        label="forced token tied, baseline",
        formula="share of forced tokens with another of the same logit in A",
        reads="common in 16-bit logits",
        valid="the run has it",
        neutral=None,
        not_gated="it belongs to one run; gate on rank.changed",
    ),
    "ties.candidate": _logits(
        unit="share",
        label="forced token tied, candidate",
        formula="share of forced tokens with another of the same logit in B",
        reads="common in 16-bit logits",
        valid="the run has it",
        neutral=None,
        not_gated="it belongs to one run; gate on rank.changed",
    ),
    "top1.disagreement": _top(
        label="best token differs",
        formula="share of positions where the best token differs",
        reads="flips and tie changes",
    ),
    "flip.all": _top(
        label="flips",
        formula="share of flips",
        reads="the best token changed, and not between equals",
    ),
    "flip.hard": _top(
        label="hard flips",
        formula="share of flips with gap_A > tau",
        reads="noise of size s does not explain them",
        valid=_DTYPED,
    ),
    "flip.tie": _top(
        label="tie changes",
        formula="share of changes of the best token that are no flips",
        reads="exact ties that fell the other way",
    ),
    "flip.near_tie": _top(
        label="near ties",
        formula="share of positions with gap_A <= tau",
        reads="where noise of size s can flip",
        valid=_DTYPED,
        neutral=None,
        not_gated="it is a property of trace and noise; gate on flip.all or flip.hard",
    ),
    "flip.excess": _top(
        unit="factor",
        label="flips / expected",
        formula="flips / expected, bootstrap interval",
        reads="1: as many flips as noise of size s explains",
        valid="logit dtypes are stated and not both coarse; at least 5 expected flips",
        neutral=None,
        not_gated="s grows with the fault itself; gate on flip.hard",
    ),
}
