"""The identity panel: what two runs were, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.config.scoring import RAW
from trace_audit.diff.scoring import words
from trace_audit.diff.summary import Difference, PairSummary, RunIdentity
from trace_audit.report.format import count, fingerprint, number, plain, setting

# Parts that ran, and the configuration key that asked for each.
_ALWAYS_SHOWN = {"attention": "engine.attention_backend", "device": "engine.device"}


@dataclass(frozen=True, kw_only=True)
class IdentityRow:
    """One line of the identity panel."""

    label: str
    baseline: str
    candidate: str
    differs: bool = False


def identity_rows(pair: PairSummary) -> list[IdentityRow]:
    """Fingerprints, backends, speed, drafts, then every config key that differs."""
    a, b = pair.baseline, pair.candidate
    rows = [
        _row("model", fingerprint(a.model_fingerprint), fingerprint(b.model_fingerprint)),
        _row(
            "environment",
            fingerprint(a.environment_fingerprint),
            fingerprint(b.environment_fingerprint),
        ),
    ]
    if not all(run.distribution == RAW for run in (a, b)):
        rows.append(_row("logprobs", words(a), words(b)))
    for part in sorted(a.backends.keys() | b.backends.keys()):
        ran = [run.backends.get(part) for run in (a, b)]
        if part in _ALWAYS_SHOWN or ran[0] != ran[1]:
            sides = [_backend(run, part) for run in (a, b)]
            rows.append(IdentityRow(label=part, baseline=sides[0], candidate=sides[1]))
    speeds = [_speed(run.tokens_per_second) for run in (a, b)]
    rows.append(IdentityRow(label="tokens/s", baseline=speeds[0], candidate=speeds[1]))
    kept = [_drafts_kept(run) for run in (a, b)]
    if any(kept):
        rows.append(IdentityRow(label="drafts kept", baseline=kept[0], candidate=kept[1]))
    if a.preemptions or b.preemptions:
        rows.append(_row("preemptions", count(a.preemptions), count(b.preemptions)))
    for difference in [*_environment_differences(pair), *pair.config_differences]:
        sides = [setting(difference.baseline), setting(difference.candidate)]
        rows.append(_row(difference.key, *sides))
    return rows


def _environment_differences(pair: PairSummary) -> tuple[Difference, ...]:
    # Equal fingerprints: what differs there cannot change numbers.
    if pair.baseline.environment_fingerprint == pair.candidate.environment_fingerprint:
        return ()
    return pair.environment_differences


def _row(label: str, baseline: str, candidate: str) -> IdentityRow:
    return IdentityRow(
        label=label, baseline=baseline, candidate=candidate, differs=baseline != candidate
    )


def _speed(tokens_per_second: float | None) -> str:
    """Whole tokens a second; of slow runs two digits."""
    if tokens_per_second is None or tokens_per_second >= 10:
        return count(tokens_per_second)
    return f"{tokens_per_second:.2g}"


def _drafts_kept(run: RunIdentity) -> str:
    if run.acceptance_rate is None:
        return ""
    return f"{number(run.acceptance_rate, 'share')} of {count(run.draft_tokens)}"


def _backend(run: RunIdentity, part: str) -> str:
    ran = run.backends.get(part)
    asked = run.requested.get(_ALWAYS_SHOWN.get(part, ""))
    if asked is None or asked == ran:
        return plain(ran)
    return f"{plain(ran)} (asked for {plain(asked)})"
