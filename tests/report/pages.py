"""HTML reports of synthetic audits, and a strict reader of them."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from tests.diff.synthetic import FakeAudit, run_info
from tests.diff.test_compare import audit
from trace_audit.diff.exhibit import Exhibit, exhibit
from trace_audit.diff.report_plan import plan_report
from trace_audit.diff.source import AuditSource
from trace_audit.report.html import render_html

# What browsers close by themselves; everything else must be closed.
_VOID = {"meta", "link", "br"}
HOSTILE = (
    b"<script>alert(1)</script>",
    b"</script><b>",
    b"<!--",
    b"[bold]x[/bold]",
    b"\x1b[31mred",
    b"\xed\xa0\x80",
    "\u202eright to left".encode(),
    "\u05e9\u05dc\u05d5\u05dd".encode(),
    b"\x00",
    "\ufffd".encode(),
    b"{{ 7 * 7 }}",
    b"\"><img src=x onerror='alert(2)'>",
    "\u2028&amp;".encode(),
    b"\xf0\x9f",
    b"javascript:alert(3)",
)


def page(data: FakeAudit, *candidates: str, redact: bool = False, **options: int) -> str:
    source = AuditSource(data, redact_text=redact)  # type: ignore[arg-type]
    names = candidates or tuple(name for name in data.run_names() if name != "record")
    shown: list[Exhibit] = []
    plan = plan_report(source, "record", names)
    shared = len(plan.candidates)
    summary = plan.run(
        lambda one: shown.append(exhibit(source, one, page_comparisons=shared, **options))
    )
    return render_html(summary, shown)


def hostile_audit() -> FakeAudit:
    """Hostile text in tokens, names, ids and configuration values."""
    data = audit()
    data.texts = {i: HOSTILE[i % len(HOSTILE)] for i in range(60)}
    data.sequences = [
        replace(s, sequence_id=f"<script>{i}</script>\ud800\u202e")
        for i, s in enumerate(data.sequences)
    ]
    ids = [s.sequence_id for s in data.sequences]
    name = "<script>run</script>\ud800[bold]"
    info = run_info(name, dtype="</script>\x00\ud800", attention_backend="eager")
    tables = {"record": data.tables["record"], name: data.tables["noisy"]}
    data.tables = {key: _SurrogateTable(table, ids) for key, table in tables.items()}
    data.infos = {"record": run_info("record"), name: info}
    return data


class _SurrogateTable:
    """A table whose sequence ids Arrow could not hold: it has no lone surrogates."""

    def __init__(self, table: Any, ids: list[str]) -> None:
        self._table, self._ids = table, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __len__(self) -> int:
        return len(self._table)

    def slice(self, start: int, length: int) -> _SurrogateTable:
        return _SurrogateTable(self._table.slice(start, length), self._ids)

    def select(self, columns: Any) -> Any:
        # Ids are looked up by the index.
        return self if "sequence_id" in columns else self._table.select(columns)

    def __getitem__(self, name: str) -> Any:
        return _Ids(self._table, self._ids) if name == "sequence_id" else self._table[name]


class _Ids:
    def __init__(self, table: Any, ids: list[str]) -> None:
        self._table, self._ids = table, ids

    def take(self, rows: Any) -> list[Any]:
        indices = self._table["sequence_index"].to_numpy()[rows]
        return [_Value(self._ids[i]) for i in indices]


class _Value:
    def __init__(self, value: str) -> None:
        self._value = value

    def as_py(self) -> str:
        return self._value


class Page(HTMLParser):
    """Walks a page, and fails where its tags do not balance.

    Attributes:
        tags: Every start tag with its attributes.
        data: The JSON of its data element.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._in: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self._open == [], "unclosed tags"
        self.data: dict[str, Any] = json.loads("".join(self._in["data"]))

    @property
    def text(self) -> str:
        """What a reader sees, without style, script and data."""
        return "".join(self.texts)

    def ids(self) -> list[str]:
        """Every id, in order."""
        return [a["id"] for _, a in self.tags if a.get("id")]  # type: ignore[misc]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), "an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self._open[-1] if self._open else ""
        if where not in ("script", "style"):
            self.texts.append(data)
            return
        attributes = next(a for tag, a in reversed(self.tags) if tag == where)
        self._in.setdefault(attributes.get("id") or where, []).append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")
