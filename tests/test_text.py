"""Text of a model is shown, never acted on."""

from __future__ import annotations

import random
import unicodedata

import pytest
from rich.text import Text

from trace_audit.text import display_bytes, escape_markdown, escape_markup

SHOWN: list[tuple[bytes, str]] = [
    (b"", ""),
    (b" the cat", " the cat"),
    ("é日本🎉 ́x".encode(), "é日本🎉 ́x"),
    (b"\n\r\t", "\\n\\r\\t"),
    (b"\x00\x07\x08\x1b[31mred\x7f", "\\x00\\x07\\x08\\x1b[31mred\\x7f"),
    (b"a\\nb", "a\\\\nb"),
    (b"\xf0\x9f\x8e", "\\xf0\\x9f\\x8e"),
    (b"ok\xffok\xc3", "ok\\xffok\\xc3"),
    (b"\xc0\xaf", "\\xc0\\xaf"),
    (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),
    ("\ufffd".encode(), "\\ufffd"),
    ("\x9b31m\x85".encode(), "\\u009b31m\\u0085"),
    ("a\u202eb\u2066c\u200fd".encode(), "a\\u202eb\\u2066c\\u200fd"),
    ("\u200b\u200d\ufeff\u2060\u00ad".encode(), "\\u200b\\u200d\\ufeff\\u2060\\u00ad"),
    ("\u00a0\u3000\u2028\u2029".encode(), "\\u00a0\\u3000\\u2028\\u2029"),
    ("\u3164\u115f\u2800\ufe0f".encode(), "\\u3164\\u115f\\u2800\\ufe0f"),
    ("\u0301a\u0301".encode(), "\\u0301a\u0301"),
    ("\U000e0041\U000f0000\ue000".encode(), "\\U000e0041\\U000f0000\\ue000"),
    (b"[bold]<script>|`*", "[bold]<script>|`*"),
]


@pytest.mark.parametrize(("data", "shown"), SHOWN, ids=range(len(SHOWN)))
def test_bytes_are_shown(data: bytes, shown: str) -> None:
    assert display_bytes(data) == shown


def test_no_character_that_a_terminal_acts_on_is_left() -> None:
    every = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    shown = display_bytes(b"".join(b"x" + c.encode() for c in every))
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not {c for c in shown if unicodedata.category(c) in hidden}
    assert {c for c in shown if unicodedata.category(c) == "Zs"} == {" "}
    assert "\ufffd" not in shown


def test_different_bytes_are_shown_differently() -> None:
    rng = random.Random(0)
    alphabet = [b"\\", b"x", b"0", b"a", b"\x0a", b"\xc2", b"\x80", b"\xef\xbf\xbd", b"n", b"u"]
    words = {b"".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(20_000)}
    assert len({display_bytes(word) for word in words}) == len(words)


def test_markup_is_shown_as_it_is() -> None:
    rng = random.Random(0)
    pieces = ["[", "]", "bold", "/", "\\", ":", "smile", " ", "#", "@", "[/]", ":warning:", "-"]
    words = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(5000)]
    for text in [
        *words,
        "[bold]x[/bold]",
        ":smile:",
        "a:b:c",
        "x\\",
        "[link=file:///]x",
        "[b]",
        "x[",
        "[b",
    ]:
        assert Text.from_markup(escape_markup(text)).plain == text
        inside = Text.from_markup(f"[red]({escape_markup(text)})[/red][i]{escape_markup(text)}[/i]")
        assert inside.plain == f"({text}){text}"


def test_markup_gives_no_style() -> None:
    parsed = Text.from_markup(escape_markup("[red]x[/red] :smile: [@click=f]y"))
    assert all(span.start == span.end for span in parsed.spans)


def test_markdown_is_escaped() -> None:
    assert escape_markdown("plain text 12 é") == "plain text 12 é"
    assert escape_markdown("a|b *c* `d` _e_ <f> [g](h) #i ~j~ \\k &l;") == (
        r"a\|b \*c\* \`d\` \_e\_ \<f\> \[g\]\(h\) \#i \~j\~ \\k \&l\;"
    )
    assert escape_markdown("two\nlines\r\nand\x0bmore") == "two lines and more"
    assert escape_markdown("@team") == "@<!-- -->team"
    assert escape_markdown("1. x") == r"1\. x"
