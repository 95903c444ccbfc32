"""Token details as compact JSON inside an HTML page: both sides' view of every shown token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from trace_audit.diff.summary import PairSummary, TokenDiff, TopToken
from trace_audit.report.format import plain, shorten_right

MAX_TEXT = 200
# In a script element these could end it, or end a line of JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
# float32 has seven digits; what is stored as one is not printed as if it had seventeen.
_DIGITS = 7

Field = str | int | float | None | list[int] | list[str | float | None]


class TokenData:
    """Collects tokens, and the texts of all token ids in them, each once."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._sequences: dict[str, str] = {}
        self._tokens: dict[str, list[Field]] = {}

    def add(self, pair: int, sequence: int, token: TokenDiff) -> str:
        """Keeps one token; the same one twice is kept once.

        Args:
            pair: Number of the pair in the report.
            sequence: Index of the token's sequence in the trace.
            token: Both sides' view of it.

        Returns:
            Its key: pair, sequence and step, joined by hyphens.
        """
        key = f"{pair}-{sequence}-{token.place.step}"
        if key in self._tokens:
            return key
        self._sequences[str(sequence)] = plain(token.place.sequence_id)
        self._texts[str(token.token_id)] = shown_text(token.text)
        self._tokens[key] = [
            token.token_id,
            token.place.position,
            _number(token.delta),
            _number(token.baseline_logprob),
            _number(token.candidate_logprob),
            token.baseline_rank,
            token.candidate_rank,
            token.change,
            _number(token.margin),
            _number(token.candidate_margin),
            _number(token.kl),
            None if token.phase is None else plain(token.phase),
            None if token.launch is None else list(token.launch),
            *self._side(token.baseline_top),
            *self._side(token.candidate_top),
        ]
        return key

    def to_json(self, pairs: Sequence[PairSummary]) -> str:
        """Everything that was added, as JSON that is safe inside a script element."""
        document = {
            "pairs": [[plain(pair.baseline.name), plain(pair.candidate.name)] for pair in pairs],
            "sequences": self._sequences,
            "texts": self._texts,
            "tokens": self._tokens,
        }
        return script_json(document)

    def _side(self, top: Iterable[TopToken]) -> tuple[list[int], list[str | float | None]]:
        self._texts.update((str(entry.token_id), shown_text(entry.text)) for entry in top)
        return [entry.token_id for entry in top], [_number(entry.logprob) for entry in top]


def shown_text(text: str) -> str:
    """A token's text, cut where no reader would go on reading."""
    return shorten_right(text, MAX_TEXT)


def script_json(document: object) -> str:
    """Compact JSON in ASCII in which no character can end a script element.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def _number(value: float | None) -> float | str | None:
    """Seven significant digits; a value that is not finite as a word."""
    if value is None or value == 0:
        return value
    if not math.isfinite(value):
        return str(value)
    return float(f"{value:.{_DIGITS}g}")
