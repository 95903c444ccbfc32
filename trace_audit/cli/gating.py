"""What `diff report` gates: a profile, `--fail-on`, and how an open question counts."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trace_audit.cli.messages import say
from trace_audit.errors import InvalidComparisonError, UsageError

if TYPE_CHECKING:
    from trace_audit.diff.profiles import Profile
    from trace_audit.diff.source import AuditSource
    from trace_audit.diff.summary import ReportSummary
    from trace_audit.diff.verdict import Gating, Outcome


def chosen_profile(name: str | None) -> Profile | None:
    """The profile of that name or in that file, None if none was asked for.

    Raises:
        UsageError: There is none (the hint names the nearest), or the file is no profile.
    """
    if name is None:
        return None
    from trace_audit.diff.profile_file import read_profile
    from trace_audit.diff.profiles import PROFILES

    if name in PROFILES:
        return PROFILES[name]
    if Path(name).suffix == ".toml" or Path(name).is_file():
        return read_profile(Path(name))
    near = difflib.get_close_matches(name, PROFILES, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Profiles are {', '.join(PROFILES)}."
    raise UsageError(f"There is no profile {name!r}.", hint=hint)


def make_gating(
    profile: Profile | None,
    expressions: Sequence[str],
    *,
    inconclusive: str | None,
    require_floor: bool,
) -> Gating | None:
    """Everything to gate; None without a profile and an expression.

    Raises:
        UsageError: An expression is wrong, or an option has nothing to apply to.
    """
    from trace_audit.diff.gate_expression import parse_gate
    from trace_audit.diff.verdict import Gating

    gates = (
        *(() if profile is None else profile.gates),
        *(parse_gate(text) for text in expressions),
    )
    if not gates:
        for option, given in (("--inconclusive", inconclusive), ("--require-floor", require_floor)):
            if given:
                raise UsageError(
                    f"{option} has nothing to apply to.", hint="Name a --profile or a --fail-on."
                )
        return None
    counts: dict[str | None, Outcome] = {None: "inconclusive", "fail": "fail", "pass": "pass"}
    return Gating(
        profile=None if profile is None else profile.name,
        gates=gates,
        requires_floor=require_floor,
        inconclusive=counts[inconclusive],
    )


def chosen_baseline(source: AuditSource, name: str | None, profile: Profile | None) -> str:
    """The baseline that was named, else the profile's where the audit has it, else the record."""
    from trace_audit.diff.source import RECORD

    if name is not None:
        return name
    names = source.audit.run_names()
    return profile.baseline if profile is not None and profile.baseline in names else RECORD


def check_profile(source: AuditSource, profile: Profile | None) -> None:
    """Refuses a profile that has no meaning on the audit; warns of one from another model.

    Raises:
        UsageError: The trace is greedy and the profile needs a sample, or it is imported without
            the logprobs that the profile compares with.
    """
    from trace_audit.diff.source import RECORD

    if profile is None:
        return
    if profile.sampled_only and "greedy" in source.trace.sources:
        raise UsageError(
            f"Profile {profile.name} needs sampled or imported tokens, and this trace is greedy.",
            hint="Record with --temperature 1, or import a rollout's tokens and logprobs.",
        )
    lacks_logprobs = profile.baseline not in (RECORD, *source.audit.run_names())
    if profile.sampled_only and lacks_logprobs and "imported" in source.trace.sources:
        raise UsageError(
            f"Profile {profile.name} compares with the rollout's own logprobs, and the prompts "
            "file gave none.",
            hint="Record again with logprobs beside output_token_ids (docs/rl.md).",
        )
    learned_on = profile.model_fingerprint
    if learned_on is not None and learned_on != source.audit.info.model_fingerprint:
        say(f"warning: the bounds of profile {profile.name} were learned on another model")


def tell(summary: ReportSummary, output: Path | None) -> None:
    """What standard error says after the report: verdicts that went to a file, and refusals.

    Raises:
        InvalidComparisonError: A candidate could not be compared, or not be judged.
    """
    from trace_audit.diff.scoring import UNKNOWN_HINT
    from trace_audit.report.gate_view import verdict_line

    if output is not None:
        for pair in summary.pairs:
            line = verdict_line(pair, summary.gating)
            if line is not None:
                say(line)
    if summary.invalid:
        first = summary.invalid[0]
        raise InvalidComparisonError(
            f"{len(summary.invalid)} of {len(summary.invalid) + len(summary.pairs)} candidates "
            f"cannot be compared; {first.candidate}: {first.message}",
            hint=first.hint,
        )
    for pair in summary.pairs:
        if pair.verdict is not None and pair.not_gated is not None:
            raise InvalidComparisonError(
                f"{pair.candidate.name} cannot be judged: {pair.not_gated}.", hint=UNKNOWN_HINT
            )
        for result in () if pair.verdict is None else pair.verdict.results:
            if result.outcome == "invalid" and not result.gate.watch:
                raise InvalidComparisonError(
                    f"{pair.candidate.name} cannot be judged by {result.gate.metric}: "
                    f"{result.reason}."
                )
