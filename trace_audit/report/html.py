"""The report as one HTML page that needs nothing but itself: no network, no font, no library."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trace_audit import __version__
from trace_audit.diff.exhibit import Exhibit
from trace_audit.diff.summary import ReportSummary
from trace_audit.report import gate_view, scale, view
from trace_audit.report.format import plain
from trace_audit.report.html_view import grid_row, next_commands, pair_view
from trace_audit.report.token_data import TokenData

_PAGE = "page"


def render_html(summary: ReportSummary, exhibits: Sequence[Exhibit]) -> str:
    """The report as HTML in ASCII, with a final newline; the same input gives the same bytes.

    Args:
        summary: What to say.
        exhibits: One for each of the summary's pairs, in that order.
    """
    data = TokenData()
    together = zip(summary.pairs, exhibits, strict=True)
    pairs = [
        pair_view(i, pair, summary.gating, exhibit, data)
        for i, (pair, exhibit) in enumerate(together)
    ]
    style, script = _own("report.css"), _own("report.js")
    text = (
        _environment()
        .get_template("report.html.j2")
        .render(
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=Markup(data.to_json(summary.pairs)),
            title=_title(summary),
            audit=plain(summary.trace.path),
            trace=view.trace_line(summary.trace),
            convention=view.CONVENTION,
            redacted=view.REDACTED if summary.redacted else None,
            invalid=view.invalid_lines(summary),
            grid=[grid_row(i, pair) for i, pair in enumerate(summary.pairs)],
            pairs=pairs,
            gate_headers=gate_view.GATE_HEADERS,
            gate_sources=gate_view.source_lines(summary.gating),
            legend=scale.legend(),
            commands=next_commands(summary),
            version=__version__,
        )
    )
    # ASCII is the same in every encoding that a mail gateway or a web server may claim.
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("trace_audit.report", _PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _own(name: str) -> str:
    """A file of this package that goes into the page as it is."""
    return (files("trace_audit.report") / _PAGE / name).read_text(encoding="ascii")


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, and only this page's own style and script count."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _title(summary: ReportSummary) -> str:
    names = [plain(pair.candidate.name) for pair in summary.pairs]
    what = names[0] if len(names) == 1 else f"{len(names)} candidates"
    return f"{what} against {plain(summary.baseline)}"
