"""Definitions of the metrics of importance ratios: A is the rollout, B the trainer."""

from __future__ import annotations

from functools import partial

from trace_audit.diff.metric_info import SAMPLED, SIGNED, MetricInfo

_rl = partial(MetricInfo, section="rl", unit="share", source="diff/rl.py", valid=SAMPLED)
_MORE = "more of it is better; gate on rho.chi2"

RL: dict[str, MetricInfo] = {
    "clip.high": _rl(
        label="ratio over 1.2",
        formula="share of rho > 1 + 0.2, rho = exp(delta)",
        reads="tokens that a clipped objective cuts off above",
    ),
    "clip.low": _rl(
        label="ratio under 0.8",
        formula="share of rho < 1 - 0.2",
        reads="tokens that a clipped objective cuts off below",
    ),
    "ess.share": _rl(
        label="ESS / N",
        formula="(sum rho)^2 / (N sum rho^2)",
        reads="part of the tokens that the weighted sample is worth; not clamped, so it can go bad",
        neutral=1.0,
        not_gated=_MORE,
    ),
    "ess.clamped": _rl(
        label="  ratios clamped at 2",
        formula="the same with min(rho, 2)",
        reads="what truncated importance sampling keeps",
        neutral=1.0,
        not_gated=_MORE,
    ),
    "rho.chi2": _rl(
        unit="factor",
        label="chi2",
        formula="mean rho^2 - 1",
        reads="variance of the ratios; 0 where rollout and trainer agree",
        minimum=-1.0,
    ),
    "rho.geometric": _rl(
        unit="ratio",
        label="geometric mean ratio",
        formula="mean over sequences of exp(mean delta of the sequence)",
        reads="the sequence-level ratio; 1 where they agree",
        neutral=1.0,
        signed=True,
        not_gated=f"{SIGNED}; gate on kl.k3",
    ),
    "rho.worst": _rl(
        unit="ratio",
        label="  farthest sequence",
        formula="exp(mean delta) of the sequence whose mean |log| is largest",
        reads="named in its note; grows with the number of sequences",
        neutral=1.0,
        signed=True,
        not_gated="it grows with the number of sequences; gate on kl.k3",
    ),
    "logppl.gap": _rl(
        unit="nats",
        label="log-perplexity gap",
        formula="mean(lp_A - lp_B)",
        reads="log perplexity of the candidate minus the baseline's; its note says which is surer",
        minimum=float("-inf"),
        signed=True,
        not_gated=f"{SIGNED}; gate on kl.k3",
    ),
}
