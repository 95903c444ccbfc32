"""Tokens of an HTML page: in the text of their sequence, and as rows of a table."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from trace_audit.diff.exhibit import Exhibit
from trace_audit.diff.sequences import SequenceText, TextToken
from trace_audit.diff.summary import TokenDiff
from trace_audit.report import scale, view
from trace_audit.report.format import NOT_AVAILABLE, number, plain, signed
from trace_audit.report.token_data import TokenData, shown_text
from trace_audit.text import plural

_CHANGE_CSS = {"hard flip": "hard", "flip": "flip", "tie change": "tie"}
_CHANGE_SHOWN = ("hard flip", "flip", "tie change")


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """A token as it is drawn.

    Attributes:
        key: Of its details; None where there are none (not scored).
        css: Classes: colour of |delta|, and how its best token changed.
    """

    key: str | None
    css: str
    text: str
    ends_line: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A token in a table, in its context.

    Attributes:
        target: Key of the same token in a shown sequence, if it is there.
    """

    token: TokenView
    before: str
    after: str
    sequence: str
    step: int
    position: int
    delta: str
    logprobs: str
    ranks: str
    change: str
    margins: str
    best: str
    target: str | None


@dataclass(frozen=True, kw_only=True)
class SequenceView:
    """A sequence in its text."""

    title: str
    facts: str
    prompt: str
    prompt_note: str
    first_step: int
    tokens: tuple[TokenView, ...]


def sequence_view(index: int, sequence: SequenceText, data: TokenData) -> SequenceView:
    """A sequence of a pair; details of its tokens are added to ``data``."""
    tokens = sequence.tokens
    facts = [
        f"summed |delta| {number(sequence.sum_abs_delta)} nats",
        plural(sequence.output_tokens, "output token"),
    ]
    if len(tokens) < sequence.output_tokens:
        facts.append(f"shown: steps {tokens[0].step} to {tokens[-1].step}, where it is largest")
    if sequence.chosen == "first":
        facts.append("the first of the trace")
    note = plural(sequence.prompt_tokens, "prompt token")
    if sequence.prompt_left_out:
        note += f", the first {sequence.prompt_left_out:,} not shown"
    return SequenceView(
        title=plain(sequence.sequence_id),
        facts=", ".join(facts),
        prompt=sequence.prompt,
        prompt_note=note,
        first_step=tokens[0].step if tokens else 0,
        tokens=tuple(_text_token(index, sequence.index, token, data) for token in tokens),
    )


def _text_token(pair: int, sequence: int, token: TextToken, data: TokenData) -> TokenView:
    if token.diff is None:
        return TokenView(
            key=None, css=scale.MASKED, text=shown_text(token.text), ends_line=token.ends_line
        )
    return TokenView(
        key=data.add(pair, sequence, token.diff),
        css=_css(token.diff),
        text=shown_text(token.text),
        ends_line=token.ends_line,
    )


def token_row(
    pair: int, token: TokenDiff, exhibit: Exhibit, data: TokenData, shown: Set[str]
) -> TokenRow:
    """A token as a row; ``shown`` has the keys of the tokens in shown sequences."""
    key = data.add(pair, exhibit.sequence_indices[token.place.sequence_id], token)
    margins = [
        NOT_AVAILABLE if margin is None else number(margin)
        for margin in (token.margin, token.candidate_margin)
    ]
    logprobs = (number(token.baseline_logprob), number(token.candidate_logprob))
    return TokenRow(
        token=TokenView(key=key, css=_css(token), text=shown_text(token.text)),
        before=token.before,
        after=token.after,
        sequence=plain(token.place.sequence_id),
        step=token.place.step,
        position=token.place.position,
        delta=signed(token.delta),
        logprobs=" \u2192 ".join(logprobs),
        ranks=f"{plain(token.baseline_rank)} \u2192 {plain(token.candidate_rank)}",
        change=token.change if token.change in _CHANGE_SHOWN else "",
        margins=" \u2192 ".join(margins),
        best=view.best_change(token),
        target=key if key in shown else None,
    )


def _css(token: TokenDiff) -> str:
    change = _CHANGE_CSS.get(token.change)
    color = scale.css_class(abs(token.delta))
    return color if change is None else f"{color} {change}"
