"""What two runs were: their run.json, and how they differ other than in the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_audit.diff.config_differences import BATCH_ORDER, differences, own_changes
from trace_audit.diff.scoring import check_same, distribution, why_not_gated, words
from trace_audit.diff.summary import Difference, RunIdentity
from trace_audit.diff.top_tokens import MANTISSA_BITS
from trace_audit.errors import InvalidComparisonError
from trace_audit.text import plural


def run_identity(name: str, info: Mapping[str, Any]) -> RunIdentity:
    """Reads the parts of run.json that a report shows; what it lacks is None or empty."""
    timing = info.get("timing") or {}
    resolved = flat(info.get("resolved_config") or {})
    subset = info.get("subset")
    counters = info.get("counters") or {}
    return RunIdentity(
        name=name,
        model=info.get("model"),
        model_fingerprint=info.get("model_fingerprint"),
        environment_fingerprint=info.get("environment_fingerprint"),
        environment=flat(info.get("environment") or {}),
        requested=flat(info.get("requested_config") or {}),
        resolved=resolved,
        backends={k: str(v) for k, v in flat(info.get("backends") or {}).items()},
        subset=None if not subset else tuple(str(sequence) for sequence in subset),
        engine_seconds=timing.get("engine_seconds"),
        tokens_per_second=timing.get("tokens_per_second"),
        distribution=distribution(info, resolved),
        acceptance_rate=(info.get("acceptance") or {}).get("acceptance_rate"),
        draft_tokens=counters.get("draft_tokens"),
        preemptions=counters.get("preemptions"),
        # Every replay says what it repeats, and be it nothing.
        is_replay="repeat_of" in info,
    )


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Dotted keys of a nested mapping."""
    result: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result


def _checkpoint_format(run: RunIdentity) -> str:
    """How a run's checkpoint was quantized, in words; before that was told it was plain."""
    return run.backends.get("checkpoint", "plain")


def logit_dtype(identity: RunIdentity) -> str | None:
    """dtype of the run's logits, where its configuration states it."""
    for key in ("engine.lm_head_dtype", "engine.dtype"):
        value = identity.resolved.get(key)
        if isinstance(value, str) and value in MANTISSA_BITS:
            return value
    return None


def check_comparable(baseline: Mapping[str, Any], candidate: Mapping[str, Any], name: str) -> None:
    """Refuses another vocabulary, logprobs of something else, and an attention that fell back.

    Args:
        baseline: The baseline's run.json.
        candidate: The candidate's run.json.
        name: The candidate's name.

    Raises:
        InvalidComparisonError: The two are not the same comparison.
    """
    sizes = [info.get("vocabulary_size") for info in (baseline, candidate)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise InvalidComparisonError(
            f"Run {name!r} has a vocabulary of {sizes[1]} ids, the baseline one of {sizes[0]}.",
            hint="Replay a model of the same vocabulary.",
        )
    identity = run_identity(name, candidate)
    check_same(run_identity("", baseline), identity)
    kinds = [info.get("logprobs") for info in (baseline, candidate)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise InvalidComparisonError(
            f"Run {name!r} has {kinds[1]} logprobs, the baseline has {kinds[0]} ones.",
            hint="A temperature or top-p on one side only is no difference of numerics.",
        )
    _check_no_fallback(identity)


# Keys that name what a part of the run is to be, and the part in run.json that says what it was.
_PARTS = {
    "attention_backend": "attention",
    "kv_cache_dtype": "kv_cache",
    "moe_backend": "experts",
    "quantization": "quantization",
}


def _check_no_fallback(run: RunIdentity) -> None:
    for key, part in _PARTS.items():
        asked, ran = run.resolved.get(f"engine.{key}"), run.backends.get(part)
        if isinstance(asked, str) and asked != "auto" and ran is not None and ran != asked:
            raise InvalidComparisonError(
                f"Run {run.name!r} asked for {key} {asked!r} but ran {ran!r}.",
                hint="A fallback would be audited under the wrong name; replay it.",
            )


def why_no_repeat(first: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> str | None:
    """Why a run that says it repeats another is no repeat of it; None if it is one.

    Args:
        first: run.json of the run it says it repeats.
        other: Its own run.json.
        kind: ``rerun`` or ``batch``; the latter has another batch order on purpose.
    """
    runs = [run_identity("", info) for info in (first, other)]
    if runs[0].model_fingerprint != runs[1].model_fingerprint:
        return "it is another checkpoint"
    if runs[0].environment_fingerprint != runs[1].environment_fingerprint:
        return "its environment differs"
    changed = [d.key for d in differences(runs[0].resolved, runs[1].resolved)]
    if kind == "batch":
        changed = [key for key in changed if key != BATCH_ORDER]
    if changed:
        return f"its configuration differs ({', '.join(changed)})"
    return None


def why_no_excess(
    record: RunIdentity | None, baseline: RunIdentity, candidate: RunIdentity
) -> str | None:
    """Why KL(record, candidate) / KL(record, baseline) has no meaning; None if it has one."""
    if record is None:
        return "the audit has no record run"
    if baseline.name == record.name:
        return f"the baseline is {record.name} itself; name a --baseline of the candidate's dtype"
    if record.distribution != baseline.distribution:
        scored = [words(run) for run in (record, baseline)]
        return f"the record has {scored[0]} logprobs and {baseline.name} has {scored[1]} ones"
    dtypes = [run.resolved.get("engine.dtype") for run in (record, baseline, candidate)]
    if dtypes[0] != "float32":
        return f"it needs a float32 record, and this one is {dtypes[0] or 'of unknown dtype'}"
    if dtypes[1] is None or dtypes[1] != dtypes[2]:
        return (
            "it needs a baseline of the candidate's dtype, and they are "
            f"{dtypes[1] or 'unknown'} and {dtypes[2] or 'unknown'}"
        )
    return None


def warnings(
    baseline: RunIdentity,
    candidate: RunIdentity,
    config: tuple[Difference, ...],
    environment: tuple[Difference, ...],
) -> tuple[str, ...]:
    """What a reader must know before believing the numbers."""
    found = []
    changes = len(own_changes(config, baseline, candidate))
    if changes > 1:
        found.append(f"{changes} config keys differ, so a difference cannot be laid to one of them")
    prints = (baseline.environment_fingerprint, candidate.environment_fingerprint)
    if None not in prints and prints[0] != prints[1]:
        keys = ", ".join(difference.key for difference in environment) or "fingerprint"
        found.append(f"the runs come from different environments ({keys})")
    models = (baseline.model_fingerprint, candidate.model_fingerprint)
    if None not in models and models[0] != models[1]:
        formats = [_checkpoint_format(run) for run in (baseline, candidate)]
        told = (
            "" if formats[0] == formats[1] else f": {formats[1]}, and the baseline's {formats[0]}"
        )
        found.append(f"the candidate is another checkpoint than the baseline{told}")
    reason = why_not_gated(baseline, candidate)
    if reason is not None:
        found.append(f"{reason}, so the two are reported and cannot be gated")
    for run in (baseline, candidate):
        if not run.resolved:
            found.append(f"{run.name} states no configuration, so its dtype is not known here")
    for run in (baseline, candidate):
        if run.subset is not None:
            found.append(f"{run.name} is a subset of {plural(len(run.subset), 'sequence')}")
    return tuple(found)
