"""Which distribution a run's logprobs are of, and what two runs of different ones may not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_audit.config.scoring import RAW, Distribution
from trace_audit.diff.runs import RunIdentity
from trace_audit.errors import InvalidComparisonError

_HINT = (
    "A temperature, top-k or top-p on one side only is no difference of numerics; "
    "replay both with the same [scoring]."
)
UNKNOWN_HINT = (
    'Say it on every line of the prompts file, as in "scoring": {"mode": "raw"}, and record again.'
)


def distribution(info: Mapping[str, Any], resolved: Mapping[str, object]) -> Distribution | None:
    """The distribution that a run scored; None where nobody said.

    Args:
        info: Its run.json; that of an imported run holds what the prompts file declared.
        resolved: Its resolved configuration with dotted keys; empty for an imported run.
    """
    declared = info.get("scoring")
    values = resolved
    if isinstance(declared, Mapping):
        values = {f"scoring.{key}": value for key, value in declared.items()}
    elif not resolved and info.get("logprobs") != "raw":
        return None
    if values.get("scoring.mode", "raw") == "raw":
        return RAW
    found = Distribution(
        temperature=_number(values, "scoring.temperature", 1.0),
        top_k=int(_number(values, "scoring.top_k", 0)),
        top_p=_number(values, "scoring.top_p", 1.0),
    )
    size = info.get("vocabulary_size")
    return found.within(size) if isinstance(size, int) else found


def check_same(baseline: RunIdentity, candidate: RunIdentity) -> None:
    """Refuses to compare logprobs of two distributions.

    Raises:
        InvalidComparisonError: Both are known, and differ.
    """
    if _differ(baseline, candidate):
        raise InvalidComparisonError(
            f"Run {candidate.name!r} has {words(candidate)} logprobs, the baseline has "
            f"{words(baseline)} ones.",
            hint=_HINT,
        )


def check_referee(referee: RunIdentity, baseline: RunIdentity) -> None:
    """Refuses a referee that scored another distribution than the two sides.

    Raises:
        InvalidComparisonError: Both are known, and differ.
    """
    if _differ(referee, baseline):
        raise InvalidComparisonError(
            f"The referee {referee.name!r} has {words(referee)} logprobs, the compared runs have "
            f"{words(baseline)} ones.",
            hint=_HINT,
        )


def why_not_gated(baseline: RunIdentity, candidate: RunIdentity) -> str | None:
    """Why a difference may be reported and not judged; None if it may be judged."""
    unknown = [run.name for run in (baseline, candidate) if run.distribution is None]
    if not unknown:
        return None
    return (
        f"{' and '.join(unknown)} does not say how its logprobs were made "
        "(raw, or at what temperature, top_k and top_p)"
    )


def words(run: RunIdentity) -> str:
    """The distribution as an adjective: `raw`, `temperature 0.7, top_p 0.9`, `unknown`."""
    return "unknown" if run.distribution is None else str(run.distribution)


def _differ(a: RunIdentity, b: RunIdentity) -> bool:
    return None not in (a.distribution, b.distribution) and a.distribution != b.distribution


def _number(values: Mapping[str, object], key: str, default: float) -> float:
    value = values.get(key, default)
    return float(value) if isinstance(value, int | float) else default
