"""Which configuration keys a report lays a difference to."""

from __future__ import annotations

from trace_audit.diff.identity import config_differences, run_identity


def run(requested: dict[str, str], resolved: dict[str, str]):
    return run_identity(
        "r", {"requested_config": {"engine": requested}, "resolved_config": {"engine": resolved}}
    )


def keys(baseline, candidate) -> list[str]:
    return [d.key for d in config_differences(baseline, candidate)]


def test_a_key_at_auto_that_follows_another_is_not_a_second_change():
    a = run(
        {"dtype": "float32", "lm_head_dtype": "auto"},
        {"dtype": "float32", "lm_head_dtype": "float32"},
    )
    b = run(
        {"dtype": "bfloat16", "lm_head_dtype": "auto"},
        {"dtype": "bfloat16", "lm_head_dtype": "bfloat16"},
    )
    assert keys(a, b) == ["engine.dtype"]


def test_a_key_that_was_asked_for_is_a_change_of_its_own():
    a = run(
        {"dtype": "float32", "lm_head_dtype": "auto"},
        {"dtype": "float32", "lm_head_dtype": "float32"},
    )
    b = run(
        {"dtype": "bfloat16", "lm_head_dtype": "bfloat16"},
        {"dtype": "bfloat16", "lm_head_dtype": "bfloat16"},
    )
    assert keys(a, b) == ["engine.dtype", "engine.lm_head_dtype"]


def test_auto_that_was_decided_differently_on_another_machine_is_shown():
    a = run({"device": "auto"}, {"device": "cpu"})
    b = run({"device": "auto"}, {"device": "cuda"})
    assert keys(a, b) == ["engine.device"]
