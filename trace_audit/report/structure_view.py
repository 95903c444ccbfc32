"""Where differences are, as rows of text, shared by every renderer."""

from __future__ import annotations

from trace_audit.diff.pattern import Drift, Onset, Period, Slice, Structure
from trace_audit.diff.summary import PairSummary
from trace_audit.report.format import interval, number, signed

SLICE_HEADERS = ("tokens by", "tokens", "mean |delta|", "95 % interval")
_SPARSE = 0.5
_BAR = 8


def structure_lines(pair: PairSummary) -> list[tuple[str, str]]:
    """Label and sentence: onset, drift, period, concentration."""
    structure = pair.structure
    if structure is None:
        return []
    lines = [("onset", onset_text(structure.onset))]
    if structure.drift is not None:
        lines.append(("drift", _drift(structure.drift)))
    if structure.periods:
        lines.append(("period", _periods(structure.periods)))
    share = structure.worst_kl_share
    if share is not None:
        kind = "sparse" if share > _SPARSE else "diffuse"
        lines.append(
            (
                "concentration",
                f"{kind}: the worst 1 % of tokens hold {number(share, 'share')} of KL",
            )
        )
    return lines


def onset_text(onset: Onset | None) -> str:
    """Where differences begin, and whether they stay."""
    if onset is None:
        return "none: no 16 positions of which over half moved"
    where = f"position {onset.position}"
    if onset.position == onset.first:
        where += ", the first"
    stays = "persistent" if onset.persistent else "not persistent"
    return (
        f"{where}, {stays} ({number(onset.persistence, 'share')} of the windows from there on; "
        f"limit {number(onset.limit)} nats)"
    )


def slice_rows(pair: PairSummary) -> list[tuple[str, str, str, str, str]]:
    """Kind of token, count, mean, interval and a bar; kinds with one slice say nothing."""
    if pair.structure is None:
        return []
    blocks = _slice_blocks(pair.structure)
    top = max((s.mean_abs_delta for _, slices in blocks for s in slices), default=0.0)
    return [
        (
            f"{kind} {one.label}",
            f"{one.tokens:,}",
            number(one.mean_abs_delta),
            interval(one.interval, "nats"),
            "\N{FULL BLOCK}" * (round(_BAR * one.mean_abs_delta / top) if top else 0),
        )
        for kind, slices in blocks
        for one in slices
    ]


def _slice_blocks(structure: Structure) -> list[tuple[str, tuple[Slice, ...]]]:
    blocks = [
        ("phase", structure.phases),
        ("launch of", structure.launches),
        ("confidence", structure.confidence),
        ("routers changed", structure.routers),
    ]
    return [(kind, slices) for kind, slices in blocks if len(slices) > 1]


def _drift(drift: Drift) -> str:
    text = f"{signed(drift.slope)} nats per 1,000 positions"
    bounds = drift.interval
    if bounds is None:
        return text
    text += f" {interval(bounds, 'nats')}"
    if bounds.low > 0:
        return f"{text}: it grows"
    return f"{text}: it shrinks" if bounds.high < 0 else f"{text}: none seen"


def _periods(periods: tuple[Period, ...]) -> str:
    found = [
        f"position mod {p.size} = {p.residue} has {number(p.ratio)} times the mean"
        for p in periods
        if p.stands_out
    ]
    sizes = ", ".join(str(p.size) for p in periods)
    return "; ".join(found) if found else f"none seen among {sizes}"
