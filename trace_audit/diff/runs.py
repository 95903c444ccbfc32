"""What a report says of the two runs themselves: identity, what differs, what must not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trace_audit.config.scoring import Distribution


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a run was, as its run.json says; None where it does not say.

    Attributes:
        requested, resolved: Flat configurations.
        backends: What actually ran, by part ("attention": "sdpa").
        subset: Sequence ids of a run that was restricted on purpose.
        distribution: What its logprobs are of; None where nobody said.
        acceptance_rate: Share of its draft tokens that stayed.
        draft_tokens: How many it drafted.
        preemptions: How often a request lost its place.
        is_replay: Whether its tokens were given; false where nobody said.
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
    distribution: Distribution | None = None
    acceptance_rate: float | None = None
    draft_tokens: int | None = None
    preemptions: int | None = None
    is_replay: bool = False


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key whose value differs between the baseline and the candidate (None: not set)."""

    key: str
    baseline: object
    candidate: object


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Why two runs must be bit-equal, and whether they are.

    Attributes:
        keys: Resolved configuration keys that differ; none of them may change a bit. Empty where
            only the sequences that ran beside differ.
        reason: Why the bits must be equal, as a clause.
        void: Why equal bits are not owed after all, as a clause: the launches were others.
        differing_rows: Scored rows with a difference in any stored column.
        differing_columns: The columns that it is in.
    """

    keys: tuple[Difference, ...]
    reason: str
    void: str | None = None
    differing_rows: int = 0
    differing_columns: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the two must be bit-equal and are not."""
        return self.void is None and self.differing_rows > 0
