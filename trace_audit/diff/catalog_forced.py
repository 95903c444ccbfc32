"""Definitions of the metrics of the forced token."""

from __future__ import annotations

from functools import partial

from trace_audit.diff.metric_info import SIGNED, MetricInfo

_ANY = float("-inf")
_metric = partial(MetricInfo, source="diff/metrics.py")
_nats = partial(_metric, section="logprob", unit="nats")
_probability = partial(_metric, section="probability")
_TAIL = "under 10,000 effective tokens it is marked, and not gated"

FORCED: dict[str, MetricInfo] = {
    "delta.mean": _nats(
        label="bias: mean delta",
        formula="mean delta",
        reads="near zero while the spread is wide is common, so never read it alone",
        minimum=_ANY,
        signed=True,
        not_gated=f"{SIGNED}; gate on abs.mean",
    ),
    "abs.mean": _nats(label="mean |delta|", formula="mean |delta|", reads="typical size"),
    "delta.rms": _nats(
        label="RMS delta", formula="sqrt(mean delta^2)", reads="size that weighs outliers"
    ),
    "abs.p50": _nats(
        label="|delta| median",
        formula="quantile 0.5 of |delta| (linear between order statistics)",
        level=0.5,
    ),
    "abs.p90": _nats(label="|delta| p90", formula="quantile 0.9 of |delta|", level=0.9),
    "abs.p99": _nats(label="|delta| p99", formula="quantile 0.99 of |delta|", level=0.99),
    "abs.p99_9": _nats(
        label="|delta| p99.9", formula="quantile 0.999 of |delta|", level=0.999, valid=_TAIL
    ),
    "abs.max": _nats(
        label="|delta| max",
        formula="largest |delta|",
        reads="grows with N: do not compare it between audits of different length",
        not_gated="it grows with the number of tokens; gate on abs.p99",
    ),
    "delta.equal": _metric(
        section="logprob",
        unit="share",
        label="delta exactly 0",
        formula="share of delta = 0",
        reads="equal stored logprobs, not equal logits",
        neutral=1.0,
        not_gated="more of it is better; gate on rows.unequal",
    ),
    "rows.unequal": _metric(
        section="logprob",
        unit="share",
        label="logits not bit-equal",
        formula="share of rows whose logits hash or logprob differs",
        reads="0 on every row is **BITWISE**: one line, no table",
        valid="both runs have a logits hash in every row",
    ),
    "tme": _probability(
        unit="ratio",
        label="TME: mean exp|delta|",
        formula="mean exp|delta|",
        reads="token multiplicative error; 1 is perfect",
        minimum=1.0,
        neutral=1.0,
    ),
    "ratio.outside": _probability(
        unit="share",
        label="exp(delta) outside 0.9-1.1",
        formula="share of exp(delta) outside [0.9, 1.1]",
        reads="spread that a zero bias hides",
    ),
    "dp.rms": _probability(
        unit="prob",
        label="RMS dp",
        formula="sqrt(mean dp^2), dp = p_B - p_A",
        reads="in probability: does not care about unlikely tokens",
    ),
    "dp.p50": _probability(
        unit="prob", label="|dp| median", formula="quantile 0.5 of |dp|", level=0.5
    ),
    "dp.p99": _probability(
        unit="prob", label="|dp| p99", formula="quantile 0.99 of |dp|", level=0.99
    ),
    "ppl.baseline": _probability(
        unit="ppl",
        label="perplexity, baseline",
        formula="exp(-mean lp_A)",
        reads="perplexity of the forced tokens",
        minimum=1.0,
        neutral=None,
        not_gated="it belongs to one run; gate on ppl.ratio",
    ),
    "ppl.candidate": _probability(
        unit="ppl",
        label="perplexity, candidate",
        formula="exp(-mean lp_B)",
        reads="perplexity of the forced tokens",
        minimum=1.0,
        neutral=None,
        not_gated="it belongs to one run; gate on ppl.ratio",
    ),
    "ppl.ratio": _probability(
        unit="ratio",
        label="perplexity ratio",
        formula="exp(-mean delta)",
        reads="candidate over baseline; over 1: the candidate is less sure of the trace",
        neutral=1.0,
        signed=True,
    ),
}
