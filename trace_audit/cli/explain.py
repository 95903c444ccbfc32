"""`trace-audit explain`: what a metric is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trace_audit.diff.metric_info import MetricInfo

_NOTATION = (
    "A is the baseline, B the candidate, y the forced token, lp natural-log probability in nats;\n"
    "delta = lp_B(y) - lp_A(y): positive where the candidate is more confident.\n"
)


@click.command()
@click.argument("metric", required=False)
def explain(metric: str | None) -> None:
    """Explain a metric: formula, unit, when it is valid, source.

    METRIC is a name as in a report, like kl.mean. Without it every metric is listed.
    """
    from trace_audit.diff.catalog import CATALOG, metric_info

    if metric is not None:
        click.echo(_page(metric, metric_info(metric)), nl=False)
        return
    from trace_audit.cli.table import format_table

    rows = [(name, info.unit, info.formula) for name, info in CATALOG.items()]
    click.echo(format_table(("metric", "unit", "formula"), rows), nl=False)


def _page(name: str, info: MetricInfo) -> str:
    lines = [
        ("formula", info.formula),
        ("unit", info.unit),
        ("reads as", info.reads),
        ("valid", info.valid),
        ("no difference", "" if info.neutral is None else f"{info.neutral:g}"),
        ("gate", f"refused: {info.not_gated}" if info.not_gated else f"--fail-on '{name} > BOUND'"),
        ("profiles", ", ".join(_profiles(name))),
        *(("normal", band) for band in _bands(name)),
        ("source", f"trace_audit/{info.source}"),
    ]
    shown = "".join(f"  {key:<14} {value}\n" for key, value in lines if value)
    return f"{name}: {info.label.strip()}\n{shown}\n{_NOTATION}"


def _bands(name: str) -> list[str]:
    from trace_audit.diff.bands import BANDS

    return [
        f"{kind.bands[name][0]:g} to {kind.bands[name][1]:g} for {kind.change}"
        for kind in BANDS
        if name in kind.bands
    ]


def _profiles(name: str) -> list[str]:
    from trace_audit.diff.profiles import PROFILES

    return [
        f"{profile.name} over {gate.bound:g}{' (watched)' if gate.watch else ''}"
        for profile in PROFILES.values()
        for gate in profile.gates
        if gate.metric == name and gate.bound is not None
    ]
