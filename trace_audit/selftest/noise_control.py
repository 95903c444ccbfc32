"""The control of KL and flips: Gaussian noise of known size on every logit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from trace_audit.selftest.bench import Bench
from trace_audit.selftest.expectation import (
    BoolArray,
    ExpectedFlips,
    FloatArray,
    Held,
    Recorded,
    kl_of_noise,
    kl_on_average,
)
from trace_audit.selftest.faults import LogitNoise
from trace_audit.selftest.finding import Finding

NOISE = LogitNoise(sigma=0.1, seed=0)
NUM_ERRORS = 4.0
"""Standard errors that a sound tool may be off: chance alone does that once in 16,000 times."""


def logit_noise(bench: Bench) -> Finding:
    """Noise of known size: the KL and the flips that the tool finds must be those of the noise."""
    bench.replay("noise", NOISE)
    answer = bench.report("noise")
    kl, excess = answer.value("kl.mean"), answer.value("flip.excess")
    recorded = Recorded.of(bench.trace, bench.audit.read_tokens("record"))
    noise = recorded.noise(NOISE, bench.audit.info.vocabulary_size)
    saved = _saved(bench, recorded)
    average = Held.of(saved.kl, kl_on_average(recorded, NOISE.sigma))
    planted = Held.of(saved.kl, kl_of_noise(recorded, noise, NOISE.sigma))
    flips = ExpectedFlips.of(recorded, noise, NOISE.sigma)
    slack = NUM_ERRORS * flips.excess_error
    holds = (
        # The table's number is the mean of the rows that are held to the noise.
        math.isclose(kl, average.measured, rel_tol=1e-9)
        and average.holds(NUM_ERRORS)
        and planted.holds(NUM_ERRORS)
        and bool((saved.flip == flips.flips).all())
        and answer.pair["flips"]["flips"] == int(flips.flips.sum())
        # With too few flips to expect it is n/a, and the flips themselves were looked at.
        and (math.isnan(excess) or abs(excess - flips.excess) <= slack)
    )
    return Finding(
        control="logit noise",
        planted=f"noise of {NOISE.sigma} nats on every logit",
        expected=f"kl.mean {_range(average)} by sigma^2/2 (1 - sum p^2), {_range(planted)} for "
        f"this noise; flips {int(flips.flips.sum())}, excess {flips.excess:.2f} +- {slack:.2f}",
        said=f"kl.mean {kl:.3e}; flips {int(saved.flip.sum())}, excess "
        f"{_estimate(answer.metric('flip.excess'))}",
        holds=holds,
    )


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Columns of the saved diff: kl float64 [N], flip bool [N]."""

    kl: FloatArray
    flip: BoolArray


def _saved(bench: Bench, recorded: Recorded) -> _Saved:
    table = pq.read_table(bench.path / "diffs" / "noise-vs-record.parquet")
    flip = table["flip"].to_numpy().astype(np.bool_)
    return _Saved(kl=table["kl_contribution"].to_numpy()[recorded.rows], flip=flip[recorded.rows])


def _range(held: Held) -> str:
    return f"{held.expected:.3e} +- {NUM_ERRORS * held.error:.1e}"


def _estimate(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["value"] is None:
        return "n/a"
    interval = metric["interval"]
    return f"{metric['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"
