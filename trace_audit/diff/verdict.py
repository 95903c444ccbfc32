"""What a comparison was decided on: gates, their outcomes, and the floors they were held against.

Plain data; :mod:`trace_audit.diff.gate` decides and :mod:`trace_audit.diff.floor` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trace_audit.diff.metric import Floor, FloorKind, Interval

Outcome = Literal["pass", "inconclusive", "fail", "invalid"]
Nearness = Literal["nearer", "not farther", "farther", "undecided"]
PassKind = Literal["BITWISE", "WITHIN-FLOOR", "WITHIN-BOUND"]
EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid": 4}
# Of several outcomes the first of these counts.
PRECEDENCE: tuple[Outcome, ...] = ("invalid", "fail", "inconclusive", "pass")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One rule: the metric must not be over a bound.

    Attributes:
        metric: Name in the catalog.
        bound: In the metric's unit; None if only the floor bounds it.
        fp8_bound: Used instead where a run's configuration names an fp8 format.
        floor_factor: The threshold is at least this many floors; 0: the floor plays no part.
        watch: Shown with its outcome, and never part of the verdict.
        source: Where the bound comes from.
    """

    metric: str
    bound: float | None
    fp8_bound: float | None = None
    floor_factor: float = 0.0
    watch: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Gating:
    """What a report gates.

    Attributes:
        profile: Name of the profile, or None.
        requires_floor: A gated metric without a measured floor is invalid.
        inconclusive: What an inconclusive comparison counts as.
    """

    profile: str | None
    gates: tuple[Gate, ...]
    requires_floor: bool = False
    inconclusive: Outcome = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One gate on one pair.

    Attributes:
        threshold: What the interval was held against; None where nothing could be.
        floor_over_bound: The floor alone is over the bound: noise would not pass it.
        census: Decided on the observed count: every row was looked at.
        passing_bound: The smallest bound that would have passed; None if none would have.
        sequences_needed: How many sequences like these would decide an inconclusive gate, if the
            value stays; None where it is decided or no number would.
        reason: Why the gate is invalid, or failed or undecided other than by its interval.
    """

    gate: Gate
    outcome: Outcome
    unit: str
    value: float | None
    interval: Interval | None
    bound: float | None
    threshold: float | None
    floor: Floor | None
    floor_over_bound: bool = False
    census: bool = False
    within_floor: bool = False
    passing_bound: float | None = None
    sequences_needed: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The gates of one pair taken together.

    Attributes:
        passed: How it passed; None if it did not.
        reason: What decided it besides the gates.
    """

    outcome: Outcome
    passed: PassKind | None
    results: tuple[GateResult, ...]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Referee:
    """Which side is nearer to a run that is trusted.

    Attributes:
        margin: How much farther counts as not farther: three KL floors, 0 without one, nats.
        baseline_kl: Mean KL(referee || baseline), nats.
        candidate_kl: Mean KL(referee || candidate).
        difference: Candidate minus baseline, paired by group: negative where the candidate is
            nearer.
        left_out: Tokens without a finite KL on both sides.
        reason: Why there is no answer, when there is none.
    """

    run: str
    margin: float
    baseline_kl: float | None = None
    candidate_kl: float | None = None
    difference: float | None = None
    interval: Interval | None = None
    nearness: Nearness = "undecided"
    left_out: int = 0
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class FloorSummary:
    """Repeats of one run, as a floor.

    Attributes:
        runs: The repeats that were compared, the run they repeat first.
        pairs: Pairs of them.
        bitwise: Every row of every pair was bit-equal: the floor is exactly zero.
        unequal_share: Largest share of unequal rows of a pair; None without hashes.
        left_out: Runs that say they are repeats and are not, each with the reason.
    """

    run: str
    kind: FloorKind
    runs: tuple[str, ...]
    pairs: int
    bitwise: bool
    unequal_share: float | None
    left_out: tuple[str, ...] = ()
