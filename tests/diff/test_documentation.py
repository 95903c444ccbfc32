from __future__ import annotations

from tests.diff.metric_tables import BLOCK, PAGE, tables


def test_every_table_is_on_the_page_once() -> None:
    names = [match[2] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(tables())


def test_the_pages_tables_are_the_catalogues() -> None:
    """When this fails: `python -m tests.diff.metric_tables`."""
    text = PAGE.read_text(encoding="utf-8")
    current = tables()
    for match in BLOCK.finditer(text):
        assert match[0].split("\n", 1)[1] == f"{current[match[2]]}<!-- end -->", match[2]
