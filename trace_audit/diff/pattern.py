"""How differences are spread over positions and kinds of tokens: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.diff.metric import Interval


@dataclass(frozen=True, kw_only=True)
class Onset:
    """Where differences begin to be the rule rather than the exception.

    Attributes:
        position: First absolute position of it.
        limit: |delta| over which a token counts as moved, nats.
        first: First compared position: an onset there is no onset of its own.
        persistence: Share of the 16-position windows from there on that are mostly moved.
        persistent: Whether nearly all of them are.
    """

    position: int
    limit: float
    first: int
    persistence: float
    persistent: bool


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Theil-Sen slope of mean |delta| over position, nats per 1,000 positions."""

    slope: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Period:
    """Mean |delta| by position modulo a size: the residue that stands out most.

    Attributes:
        size: The modulus.
        residue: position mod size of the residue with the largest t.
        ratio: Its mean |delta| over that of all tokens.
        stands_out: Its lower bound is over the mean of all tokens, at 95 % for all residues of all
            sizes together (Bonferroni).
    """

    size: int
    residue: int
    ratio: float
    stands_out: bool


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Mean |delta| of one kind of tokens."""

    label: str
    tokens: int
    mean_abs_delta: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Everything that is known about where differences are.

    Attributes:
        onset: None where no 16 positions are mostly moved.
        drift: None with under three position bins.
        periods: A size each; sizes that the positions do not cover twice are absent.
        phases: By the candidate's phase; empty if it has none.
        launches: By the tokens of the candidate's launch, in powers of two.
        confidence: By the baseline's probability of its own best token.
        routers: By the number of layers whose router chose other experts; empty where that is not
            known.
        worst_kl_share: Part of the summed KL in the worst 1 % of tokens; None without KL.
    """

    onset: Onset | None
    drift: Drift | None
    periods: tuple[Period, ...]
    phases: tuple[Slice, ...]
    launches: tuple[Slice, ...]
    confidence: tuple[Slice, ...]
    worst_kl_share: float | None
    routers: tuple[Slice, ...] = ()
