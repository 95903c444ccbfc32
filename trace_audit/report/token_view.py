"""`diff show`: single tokens at length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from trace_audit.diff.summary import PairSummary, TokenDiff
from trace_audit.report import view
from trace_audit.report.format import NOT_AVAILABLE, number, place, plain, signed
from trace_audit.report.terminal import heading, render_blocks
from trace_audit.report.token_tables import both_sides, in_context
from trace_audit.text import plural


def render_tokens(
    pair: PairSummary, tokens: Sequence[TokenDiff], *, width: int, color: bool
) -> str:
    """Each token in its text with both sides' numbers and best tokens."""
    return render_blocks(_blocks(pair, tokens, width), width=width, color=color)


def _blocks(pair: PairSummary, tokens: Sequence[TokenDiff], width: int) -> Iterable[RenderableType]:
    yield heading(f"{plain(pair.candidate.name)} against {plain(pair.baseline.name)}")
    yield Text(view.CONVENTION, style="dim")
    if not tokens:
        yield Text("No token differs.")
    for token in tokens:
        yield ""
        yield from _token(token, width)


def _token(token: TokenDiff, width: int) -> Iterable[RenderableType]:
    yield heading(place(token.place))
    yield Padding(in_context(token, width - 2), (0, 0, 0, 2))
    for line in _lines(token):
        yield Padding(Text(line), (0, 0, 0, 2))
    if token.baseline_top or token.candidate_top:
        yield Padding(both_sides(token), (0, 0, 0, 2))


def _lines(token: TokenDiff) -> list[str]:
    logprobs = f"{number(token.baseline_logprob)} to {number(token.candidate_logprob)}"
    lines = [
        f"token {token.token_id}: delta {signed(token.delta)} nats ({logprobs}), "
        f"rank {plain(token.baseline_rank)} to {plain(token.candidate_rank)}, "
        f"KL {NOT_AVAILABLE if token.kl is None else number(token.kl)}",
    ]
    margins = [
        NOT_AVAILABLE if margin is None else number(margin)
        for margin in (token.margin, token.candidate_margin)
    ]
    lines.append(f"best token: {token.change}; margin {margins[0]} to {margins[1]} nats")
    if token.routers_changed is not None:
        lines.append(f"other experts in {plural(token.routers_changed, 'layer')}")
    if token.launch is not None:
        tokens, requests, chunk_start = token.launch
        lines.append(
            f"candidate's launch: {plain(token.phase)}, {tokens} tokens of {requests} requests, "
            f"chunk from {chunk_start}"
        )
    return lines
