"""What a report says: frozen dataclasses that all renderers share.

Nothing here computes or formats. Log-probabilities and deltas are natural logarithms (nats);
``delta`` is always **candidate minus baseline**, positive where the candidate is more confident.
Token text is already neutral (:func:`trace_audit.text.display_bytes`), but not yet escaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trace_audit.diff.agreement import ExactCheck
from trace_audit.diff.metric import Interval as Interval
from trace_audit.diff.metric import Metric as Metric
from trace_audit.diff.metric import MetricSection as MetricSection
from trace_audit.diff.pattern import Structure
from trace_audit.diff.routing import RouterSummary as RouterSummary
from trace_audit.diff.runs import Difference as Difference
from trace_audit.diff.runs import Expectation as Expectation
from trace_audit.diff.runs import RunIdentity as RunIdentity
from trace_audit.diff.verdict import FloorSummary, Gating, Referee, Verdict

# 1: first version.
REPORT_FORMAT_VERSION = 1

TopChange = Literal["none", "tie change", "flip", "hard flip", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One output token: its sequence, 0-based output step and absolute position."""

    sequence_id: str
    step: int
    position: int


@dataclass(frozen=True, kw_only=True)
class TopToken:
    """One of a run's own best tokens at a position."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class TokenDiff:
    """One token in its text, with both sides' view of it.

    Attributes:
        before: Text of the tokens before it (may start inside the prompt).
        margin: The baseline's logprob gap between its own best two tokens.
        candidate_margin: The candidate's gap between those same two tokens (signed).
        launch: The candidate's launch: tokens, requests and chunk start, where known.
        routers_changed: Layers whose router chose other experts, where known.
    """

    place: Place
    token_id: int
    text: str
    before: str
    after: str
    baseline_logprob: float
    candidate_logprob: float
    delta: float
    baseline_rank: int | None
    candidate_rank: int | None
    change: TopChange
    margin: float | None
    candidate_margin: float | None
    kl: float | None
    baseline_top: tuple[TopToken, ...]
    candidate_top: tuple[TopToken, ...]
    phase: str | None
    launch: tuple[int, int, int] | None
    routers_changed: int | None = None


@dataclass(frozen=True, kw_only=True)
class FlipSummary:
    """Changes of the best token (docs/metrics.md, "Flips").

    Attributes:
        known: Tokens where both runs' best tokens are known.
        hard: None where no unit in the last place is known.
        scale: s, the typical change of the baseline's top-2 gap, median over tokens, nats.
        threshold: tau, median over tokens, nats: a flip of a larger gap is hard.
        expected: Flips that noise of size s explains; None where s is unknown.
        examples: Flips with the largest margins first.
        reason: Why there are no numbers, when there are none.
    """

    known: int
    flips: int
    hard: int | None
    tie_changes: int
    expected: float | None
    scale: float | None
    threshold: float | None
    examples: tuple[TokenDiff, ...]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PositionBucket:
    """Mean |delta| of the tokens at absolute positions start <= position < end."""

    start: int
    end: int
    tokens: int
    mean_abs_delta: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Influence:
    """The group whose removal would move the mean most.

    Attributes:
        share, token_share: Its parts of the summed |delta| and of the tokens.
    """

    group_id: str
    share: float
    token_share: float


@dataclass(frozen=True, kw_only=True)
class KLCoverage:
    """Where the fixed-support KL could be computed.

    Attributes:
        no_support: Tokens whose support is empty (small vocabulary, empty tail).
        non_finite: Tokens with a NaN on either side.
        infinite: Tokens where the candidate gives zero probability to a token that the baseline
            does not; infinite, and therefore not averaged.
        heavy_tail_share: Part of the reverse estimate carried by tokens where the candidate's
            tail mass is over four times the record run's.
    """

    used: int
    no_support: int
    non_finite: int
    infinite: int
    heavy_tail_share: float | None


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """One candidate against the baseline.

    Attributes:
        unscored: Trace tokens of the compared sequences that the score mask leaves out.
        bitwise: Every row has the same logits hash and the same logprob on both sides.
        unequal_rows: Rows whose logits hash differs; None where a run has no hashes.
        expected: Why the two must be bit-equal, and whether they are; None where a bit may change.
        non_finite: Candidate rows whose logprob is not finite, where the baseline's is.
        effective_n: Tokens over the design effect of mean |delta|; None with one group.
        metrics: Empty when ``bitwise``.
        exact_check: The KL estimate against the exact one; None when ``bitwise`` or where there is
            no exact KL.
        floors: What repeats of either run say about noise; empty if there are none.
        not_gated: Why it may be reported and not judged; None if it may be judged.
        verdict: None when nothing was gated.
        referee: Which side is nearer to a third run; None if none was named.
        structure: Where the differences are; None when ``bitwise``.
        router: Choices of experts by layer; None where there are none to compare.
    """

    baseline: RunIdentity
    candidate: RunIdentity
    config_differences: tuple[Difference, ...]
    environment_differences: tuple[Difference, ...]
    warnings: tuple[str, ...]
    sequences: int
    groups: int
    tokens: int
    unscored: int
    bitwise: bool
    unequal_rows: int | None
    expected: Expectation | None = None
    non_finite: int
    effective_n: float | None
    design_effect: float | None
    influence: Influence | None
    metrics: tuple[Metric, ...]
    kl_coverage: KLCoverage | None
    exact_check: ExactCheck | None = None
    flips: FlipSummary
    first_difference: Place | None
    first_flip: Place | None
    first_non_finite: Place | None
    buckets: tuple[PositionBucket, ...]
    worst: tuple[TokenDiff, ...]
    floors: tuple[FloorSummary, ...] = ()
    not_gated: str | None = None
    verdict: Verdict | None = None
    referee: Referee | None = None
    structure: Structure | None = None
    router: RouterSummary | None = None

    def metric(self, name: str) -> Metric | None:
        """The metric of that name, or None if the table has no such row."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    @property
    def fault(self) -> bool:
        """Whether rows differ though nothing between the two runs may change a bit."""
        return self.expected is not None and self.expected.broken


@dataclass(frozen=True, kw_only=True)
class InvalidPair:
    """A candidate that cannot be compared, and why."""

    candidate: str
    message: str
    hint: str | None


@dataclass(frozen=True, kw_only=True)
class TraceIdentity:
    """The trace that every run scored.

    Attributes:
        sources: How its tokens came about: greedy, sampled, imported (sorted, distinct).
        vocabulary_size: Width of the model's logits, which may exceed the tokenizer's size.
    """

    path: str
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str | None
    trace_sha256: str
    prompts_sha256: str
    sources: tuple[str, ...]
    sequences: int
    output_tokens: int
    vocabulary_size: int
    tokenizer_size: int | None


@dataclass(frozen=True, kw_only=True)
class ReportSummary:
    """A whole report: the trace, one summary per candidate, and what to run next.

    Attributes:
        pairs: Cheapest candidate first (engine seconds), unknown cost last.
        next_commands: Commands with a word on what each shows.
        gating: What was gated; None without a profile or ``--fail-on``.
        redacted: Tokens are told by their ids, and no prompt is in it.
    """

    format_version: int
    trace: TraceIdentity
    baseline: str
    pairs: tuple[PairSummary, ...]
    invalid: tuple[InvalidPair, ...]
    next_commands: tuple[tuple[str, str], ...]
    gating: Gating | None = None
    redacted: bool = False
