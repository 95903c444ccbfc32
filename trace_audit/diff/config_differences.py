"""How the configurations and environments of two runs differ, and which keys count as a change."""

from __future__ import annotations

from collections.abc import Mapping

from trace_audit.diff.summary import Difference, RunIdentity

# A name is no numerics, and neither is room to spare: a test holds that it changes no byte.
_IGNORED_KEYS = frozenset({"name", "engine.max_model_len"})
# The configuration grows: what runs did that were recorded before a key existed.
BEFORE_THE_KEY: Mapping[str, object] = {
    "engine.path": "decode",
    "engine.prefill_chunk": 0,
    "engine.fixed_batch": False,
    "engine.batch_order_seed": 0,
    "engine.kv_cache_dtype": "auto",
    "engine.quantization": "none",
    "engine.moe_backend": "auto",
    "engine.compile": False,
    "engine.fused": False,
    "engine.enforce_eager": False,
    "scoring.mode": "raw",
    "scoring.temperature": 1.0,
    "scoring.top_p": 1.0,
    "scoring.top_k": 0,
    "speculative.method": "none",
    "speculative.num_speculative_tokens": 4,
    "speculative.draft_model": "",
    "speculative.prompt_lookup_min": 1,
    "speculative.prompt_lookup_max": 4,
    "speculative.rejection": "greedy",
    "parallel.tensor_parallel_size": 1,
    "parallel.pipeline_parallel_size": 1,
    "parallel.backend": "single",
    "parallel.reduction": "auto",
    "parallel.reduction_dtype": "model",
    "parallel.timeout_seconds": 300,
}
BATCH_ORDER = "engine.batch_order_seed"
_RANKS = ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size")
# What decides a key that is left at "auto" or 0.
_DECIDED_BY: Mapping[str, tuple[str, ...]] = {
    "engine.lm_head_dtype": ("engine.dtype",),
    "engine.kv_cache_dtype": ("engine.dtype",),
    "engine.attention_backend": ("engine.device",),
    "engine.shard_size": ("engine.max_num_seqs",),
    "engine.num_threads": ("parallel.backend", *_RANKS),
    "parallel.backend": _RANKS,
    "parallel.reduction": ("parallel.backend", "parallel.tensor_parallel_size"),
}
# Keys without an effect where all of these sizes are 1: they are part of a change from 1.
_NO_EFFECT_AT_1: Mapping[str, tuple[str, ...]] = {
    "parallel.backend": _RANKS,
    "parallel.reduction": ("parallel.tensor_parallel_size",),
    "parallel.reduction_dtype": ("parallel.tensor_parallel_size",),
}
_DRAFTING = ("ngram", "draft_model")
# Keys of drafting, and the methods under which they have an effect.
DRAFTING_KEYS: Mapping[str, tuple[str, ...]] = {
    "speculative.num_speculative_tokens": _DRAFTING,
    "speculative.rejection": _DRAFTING,
    "speculative.draft_model": ("draft_model",),
    "speculative.prompt_lookup_min": ("ngram",),
    "speculative.prompt_lookup_max": ("ngram",),
}
_PATIENCE = "parallel.timeout_seconds"  # how long a rank waits is in no number


def differences(
    baseline: Mapping[str, object], candidate: Mapping[str, object]
) -> tuple[Difference, ...]:
    """Keys whose values differ, sorted; a key that one side lacks is None there."""
    keys = sorted((baseline.keys() | candidate.keys()) - _IGNORED_KEYS)
    return tuple(
        Difference(key=key, baseline=baseline.get(key), candidate=candidate.get(key))
        for key in keys
        if baseline.get(key) != candidate.get(key)
    )


def resolved_differences(baseline: RunIdentity, candidate: RunIdentity) -> tuple[Difference, ...]:
    """Resolved configuration keys that differ; a run from before a key did what was done then.

    Against a run of another engine, which states none, no key is known to differ.
    """
    sides = (baseline.resolved, candidate.resolved)
    if not all(sides):
        return ()
    return differences(*(_as_it_was_done(side) for side in sides))


def _as_it_was_done(resolved: Mapping[str, object]) -> dict[str, object]:
    """The configuration with the keys that it is older than."""
    whole = {**BEFORE_THE_KEY, **resolved}
    if whole["engine.kv_cache_dtype"] == "auto":
        whole["engine.kv_cache_dtype"] = whole.get("engine.dtype")
    return whole


def environment_differences(
    baseline: RunIdentity, candidate: RunIdentity
) -> tuple[Difference, ...]:
    """What differs between two environments; nothing is known to against one that is not stated."""
    sides = (baseline.environment, candidate.environment)
    return differences(*sides) if all(sides) else ()


def config_differences(baseline: RunIdentity, candidate: RunIdentity) -> tuple[Difference, ...]:
    """Configuration keys that differ, without those that only follow others that do.

    A key that both runs left at its automatic value ("auto" or 0) and that was decided by another
    key which differs is a consequence, not a second change.
    """
    found = resolved_differences(baseline, candidate)
    changed = {difference.key for difference in found}

    def follows(key: str) -> bool:
        automatic = all(_is_automatic(run, key) for run in (baseline, candidate))
        return automatic and not changed.isdisjoint(_DECIDED_BY.get(key, ()))

    return tuple(difference for difference in found if not follows(difference.key))


def _is_automatic(run: RunIdentity, key: str) -> bool:
    if key in BEFORE_THE_KEY and key not in run.requested:
        return True
    return run.requested.get(key) in ("auto", 0)


def own_changes(
    config: tuple[Difference, ...], baseline: RunIdentity, candidate: RunIdentity
) -> tuple[Difference, ...]:
    """The differences that stand for themselves: how ranks add up is part of there being some."""

    def is_part(key: str) -> bool:
        if key in DRAFTING_KEYS:
            return not all(drafting_key_counts(run, key) for run in (baseline, candidate))
        sizes = _NO_EFFECT_AT_1.get(key)
        if sizes is None:
            return False
        alone = [all(_size(run, size) == 1 for size in sizes) for run in (baseline, candidate)]
        return alone[0] != alone[1]

    return tuple(
        difference
        for difference in config
        if difference.key != _PATIENCE and not is_part(difference.key)
    )


def _size(run: RunIdentity, key: str) -> object:
    return run.resolved.get(key, BEFORE_THE_KEY[key])


def drafting_key_counts(run: RunIdentity, key: str) -> bool:
    """Whether a key of `DRAFTING_KEYS` had an effect on the run."""
    if key == "speculative.rejection" and run.is_replay:
        return False
    return run.resolved.get("speculative.method", "none") in DRAFTING_KEYS[key]
