"""Exact KL at the positions where the record keeps whole distributions, and what it says of the
estimate there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.agreement import Agreement, ExactCheck
from trace_audit.diff.catalog import absent, metric
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.kl import KLTerms
from trace_audit.diff.metric import Metric
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.row_sample import RowSample
from trace_audit.diff.source import RECORD, AuditSource
from trace_audit.storage.exact_files import full_logprobs_entry, read_exact_kl

NOT_ASKED = "the exact check was not asked for"
# Over this the estimate is called wrong; 3 would cry wolf in one report of two hundred.
MAX_STANDARD_ERRORS = 4.0

Grouped = Callable[[NDArray[np.bool_]], GroupedTokens]


@dataclass(frozen=True, kw_only=True)
class ExactKL:
    """Exact KL of a pair, n positions.

    Attributes:
        row: int64 [n], rows of the pair, ascending.
        forward: float64 [n], KL(baseline || candidate), nats.
        reverse: float64 [n], KL(candidate || baseline).
    """

    row: IntArray
    forward: FloatArray
    reverse: FloatArray


def exact_kl(source: AuditSource, pair: PairRows) -> ExactKL | str:
    """The exact KL of a pair, or why it cannot be had.

    Raises:
        AuditDirError: A file is damaged.
        InvalidComparisonError: It is of another trace.
    """
    names = (pair.baseline_name, pair.candidate_name)
    if RECORD not in names:
        return "neither run is the record, whose whole distributions it needs"
    if full_logprobs_entry(source.audit) is None:
        return "the trace was recorded without --exact-positions"
    run = names[names[0] == RECORD]
    table = read_exact_kl(source.audit, run)
    if table is None:
        return f"{run} has no exact KL: its logits were never seen"
    flat = pair.trace.start[table["sequence_index"].to_numpy()] + table["step"].to_numpy()
    present = np.ones(len(flat), dtype=np.bool_) if pair.wanted is None else pair.wanted[flat]
    if not present.any():
        return f"no scored token of {run} is one of the exact positions"
    from_record, to_record = (
        table[name].to_numpy()[present] for name in ("kl_from_record", "kl_to_record")
    )
    forward, reverse = from_record, to_record
    if names[0] != RECORD:
        forward, reverse = to_record, from_record
    row = flat[present]
    if pair.wanted is not None:
        row = np.cumsum(pair.wanted)[row] - 1
    return ExactKL(row=row, forward=forward, reverse=reverse)


def exact_check(exact: ExactKL | str, sample: RowSample | None) -> ExactCheck | None:
    """What the exact KL says of the estimates; None where there is no exact KL.

    Args:
        exact: The exact KL, or why it cannot be had.
        sample: Its rows.
    """
    if isinstance(exact, str):
        return None
    assert sample is not None
    return ExactCheck(
        forward=_agreement(exact.forward, sample.kl()),
        reverse=_agreement(exact.reverse, sample.kl(reverse=True)),
    )


def exact_metrics(
    grouped: Grouped,
    num_rows: int,
    exact: ExactKL | str,
    check: ExactCheck | None,
) -> list[Metric]:
    """The exact rows of the section "kl".

    Args:
        grouped: Groups of some of the pair's rows.
        num_rows: Rows of the pair.
        exact: The exact KL, or why it cannot be had.
        check: What it says of the estimates.
    """
    if isinstance(exact, str):
        return [absent(name, exact) for name in ("kl.exact", "kl.exact_reverse")]
    assert check is not None
    sides = (
        ("kl.exact", exact.forward, check.forward),
        ("kl.exact_reverse", exact.reverse, check.reverse),
    )
    return [
        _metric(grouped, num_rows, name, exact.row, values, agreement)
        for name, values, agreement in sides
    ]


def exact_warnings(check: ExactCheck | None) -> tuple[str, ...]:
    """What a reader must know before believing the estimate of KL(baseline || candidate)."""
    forward = None if check is None else check.forward
    errors = None if forward is None else forward.standard_errors
    if forward is None or errors is None or errors <= MAX_STANDARD_ERRORS:
        return ()
    return (
        f"the KL estimate is {errors:.1f} standard errors from the exact KL at "
        f"{forward.positions:,} positions; believe kl.exact",
    )


def _agreement(exact: FloatArray, terms: KLTerms | None) -> Agreement | None:
    if terms is None:
        return None
    both = np.isfinite(exact) & terms.usable
    if not both.any():
        return None
    exact, estimate = exact[both], terms.estimate[both]
    difference = estimate - exact
    count = len(difference)
    return Agreement(
        positions=count,
        exact=float(exact.mean()),
        estimate=float(estimate.mean()),
        lower_bound=float(terms.lower_bound[both].mean()),
        difference=float(difference.mean()),
        standard_error=float(difference.std(ddof=1) / np.sqrt(count)) if count > 1 else None,
    )


def _metric(
    grouped: Grouped,
    num_rows: int,
    name: str,
    row: IntArray,
    values: FloatArray,
    agreement: Agreement | None,
) -> Metric:
    finite = np.isfinite(values)
    if not finite.any():
        return absent(name, "it is infinite or not a number at every exact position")
    mask = np.zeros(num_rows, dtype=np.bool_)
    mask[row[finite]] = True
    left_out = int((~finite).sum())
    found = metric(name, grouped(mask).mean(values[finite]), note=_note(agreement, finite))
    return replace(found, unbounded=left_out)


def _note(agreement: Agreement | None, finite: NDArray[np.bool_]) -> str:
    count, left_out = int(finite.sum()), int((~finite).sum())
    parts = [f"at {count:,} positions"]
    if left_out:
        parts.append(f"infinite or not a number at {left_out:,} more, which are left out")
    if agreement is None:
        parts.append("there is no estimate to compare with")
    else:
        said = f"the estimate there is {agreement.estimate:.4g}"
        if agreement.standard_error is not None:
            said += (
                f", {agreement.difference:+.2g} off with standard error "
                f"{agreement.standard_error:.2g}"
            )
        parts.append(said)
    return "; ".join(parts)
