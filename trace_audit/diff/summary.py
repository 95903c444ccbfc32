"""What a report says: frozen dataclasses that all renderers share.

Nothing here computes or formats. Log-probabilities and deltas are natural logarithms (nats);
``delta`` is always **candidate minus baseline**, positive where the candidate is more confident.
Token text is already neutral (:func:`trace_audit.text.display_bytes`), but not yet escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# 1: first version.
REPORT_FORMAT_VERSION = 1

MetricSection = Literal["logprob", "probability", "distribution", "kl", "top1"]
TopChange = Literal["none", "tie change", "flip", "hard flip", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % confidence interval in the unit of its metric.

    Attributes:
        method: ``t``, ``bootstrap``, ``clopper-pearson`` or ``rule of three``.
    """

    low: float
    high: float
    method: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a comparison.

    Attributes:
        name: Stable dotted name, as in docs/metrics.md.
        unit: ``nats``, ``share`` (of tokens, 0 to 1), ``prob``, ``ratio`` (near 1), ``ppl``
            (perplexity) or ``factor``.
        value: None when the metric cannot be had ("n/a"); never zero in that case.
        effective_n: Tokens over the design effect; None where it has no meaning.
        detectable: Smallest change of the value seen with 80 % power.
        at_least: The value is a lower bound, to be read as ">=".
        note: The reason of an n/a, or a remark on the value.
    """

    name: str
    label: str
    section: MetricSection
    unit: str
    value: float | None
    interval: Interval | None = None
    effective_n: float | None = None
    detectable: float | None = None
    at_least: bool = False
    note: str | None = None


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
class RunIdentity:
    """What a run was, as its run.json says; None where it does not say.

    Attributes:
        requested, resolved: Flat configurations.
        backends: What actually ran, by part ("attention": "sdpa").
        subset: Sequence ids of a run that was restricted on purpose.
    """

    name: str
    model: str | None
    model_fingerprint: str | None
    environment_fingerprint: str | None
    environment: Mapping[str, object]
    requested: Mapping[str, object]
    resolved: Mapping[str, object]
    backends: Mapping[str, str]
    subset: tuple[str, ...] | None
    engine_seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key whose value differs between the baseline and the candidate (None: not set)."""

    key: str
    baseline: object
    candidate: object


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """One candidate against the baseline.

    Attributes:
        unscored: Trace tokens of the compared sequences that the score mask leaves out.
        bitwise: Every row has the same logits hash and the same logprob on both sides.
        unequal_rows: Rows whose logits hash differs; None where a run has no hashes.
        non_finite: Candidate rows whose logprob is not finite.
        effective_n: Tokens over the design effect of mean |delta|; None with one group.
        metrics: Empty when ``bitwise``.
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
    non_finite: int
    effective_n: float | None
    design_effect: float | None
    influence: Influence | None
    metrics: tuple[Metric, ...]
    kl_coverage: KLCoverage | None
    flips: FlipSummary
    first_difference: Place | None
    first_flip: Place | None
    first_non_finite: Place | None
    buckets: tuple[PositionBucket, ...]
    worst: tuple[TokenDiff, ...]

    def metric(self, name: str) -> Metric | None:
        """The metric of that name, or None if the table has no such row."""
        return next((metric for metric in self.metrics if metric.name == name), None)


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
        redacted: Tokens are told by their ids, and no prompt is in it.
    """

    format_version: int
    trace: TraceIdentity
    baseline: str
    pairs: tuple[PairSummary, ...]
    invalid: tuple[InvalidPair, ...]
    next_commands: tuple[tuple[str, str], ...]
    redacted: bool = False
