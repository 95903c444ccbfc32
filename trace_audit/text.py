"""Text as people read it: a model's, made harmless, and numbers of things."""

from __future__ import annotations

import re
import unicodedata

_NAMED = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Controls, formats (bidi, zero width), surrogates, private and unassigned, separators.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Letters, marks and symbols that show as nothing.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_REPLACEMENT = "\ufffd"
# CommonMark lets every ASCII punctuation character be escaped.
_MARKDOWN = re.compile(r"([!-/:-@\[-`{-~])")
_EMPTY_SPAN = "[b][/b]"
_MARKUP = re.compile(r"\\+(?=\[|\Z)|\[|:(?=\S*?:)")


def display_bytes(data: bytes) -> str:
    r"""A token's bytes as visible text that no terminal acts on.

    Valid UTF-8 is shown as it is, other bytes as ``\xNN``. A backslash is doubled, so that the
    text tells exactly which bytes it stands for. Newline, carriage return and tab are ``\n``,
    ``\r`` and ``\t``; every other character that is invisible, moves the cursor or reorders text
    is ``\uNNNN`` (``\UNNNNNNNN`` above the basic plane), and so is U+FFFD. A space stays one.
    Markup of terminals (rich), Markdown and HTML is left to their own escape functions.
    """
    text = data.decode("utf-8", "surrogateescape")
    return "".join(_visible(character, i == 0) for i, character in enumerate(text))


def escape_markup(text: str) -> str:
    """Text that rich's markup shows as it is, also in the middle of other markup.

    Neither a [tag] nor an :emoji: nor a trailing backslash is acted on.
    """
    return _MARKUP.sub(lambda found: _neutral_markup(found[0]), text)


def escape_markdown(text: str) -> str:
    """One line of text that Markdown shows as it is, also in a table's cell.

    Every ASCII punctuation character is escaped and ends of lines become spaces. The name after
    an @ is kept from being a mention.
    """
    text = " ".join(text.splitlines())
    return _MARKDOWN.sub(r"\\\1", text).replace("\\@", "@<!-- -->")


def _neutral_markup(found: str) -> str:
    if found == "[":
        return "\\["
    # Rich reads backslashes as escapes only before a tag, so they get one; a colon gets one to
    # keep the name of an emoji from being one piece.
    return (found if found == ":" else found * 2) + _EMPTY_SPAN


def _visible(character: str, is_first: bool) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if " " <= character <= "~":
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        # A byte that is not UTF-8.
        return f"\\x{code - 0xDC00:02x}"
    category = unicodedata.category(character)
    # A leading combining mark would be drawn onto whatever comes before the token.
    hidden = category in _HIDDEN_CATEGORIES or (is_first and category in ("Mn", "Me", "Mc"))
    if not hidden and character != _REPLACEMENT and not _INVISIBLE.match(character):
        return character
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def plural(value: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")
