"""The words for runs that must be bit-equal: kept, broken, or not owed after all."""

from __future__ import annotations

from trace_audit.diff.summary import PairSummary
from trace_audit.report.format import plain
from trace_audit.text import plural


def equality_words(pair: PairSummary) -> str:
    """What bit-equal rows are: by chance, or as they had to be."""
    owed = pair.expected is not None and pair.expected.void is None
    return "bit-equal, as it must be" if owed else "bit-equal"


def fault_words(pair: PairSummary) -> str:
    """How much differs that must not, and what is between the two runs (of a fault only)."""
    assert pair.expected is not None
    keys = [f"{k.key}: {plain(k.baseline)} -> {plain(k.candidate)}" for k in pair.expected.keys]
    what = ", ".join(keys) or "other sequences beside the same ones"
    return (
        f"{pair.expected.differing_rows:,} of {plural(pair.tokens, 'row')} differ, and nothing "
        f"between the two runs may change a bit ({what})"
    )


def expectation_lines(pair: PairSummary) -> list[str]:
    """Why a difference is a fault, or why equal bits are not owed; nothing otherwise."""
    expected = pair.expected
    if expected is None:
        return []
    if expected.void is not None:
        return [f"nothing asked for may change a bit, but {plain(expected.void)}: not a fault"]
    if not pair.fault:
        return []
    columns = ", ".join(expected.differing_columns)
    return [f"this is a fault, not drift: {plain(expected.reason)}; columns that differ: {columns}"]
