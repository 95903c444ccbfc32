"""Which configuration keys a report lays a difference to."""

from __future__ import annotations

import pytest

from trace_audit.config import RunConfig, flat
from trace_audit.diff.config_differences import BEFORE_THE_KEY, config_differences
from trace_audit.diff.identity import run_identity, warnings

FIRST_KEYS = {
    "device",
    "dtype",
    "lm_head_dtype",
    "attention_backend",
    "gpu_memory_utilization",
    "matmul_precision",
    "max_num_seqs",
    "num_threads",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_kv_blocks",
    "preemption",
    "shard_size",
    "enable_trace_replay",
}


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


def test_a_kv_cache_that_follows_the_dtype_is_no_second_change():
    a, b = (
        run({"dtype": dtype, "kv_cache_dtype": "auto"}, {"dtype": dtype, "kv_cache_dtype": dtype})
        for dtype in ("float32", "bfloat16")
    )
    assert keys(a, b) == ["engine.dtype"]


def test_a_run_from_before_the_kv_cache_had_a_dtype_stored_its_own():
    old = run({"dtype": "bfloat16"}, {"dtype": "bfloat16"})
    new = run(
        {"dtype": "bfloat16", "kv_cache_dtype": "auto"},
        {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    )
    kv8 = run(
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    )
    assert keys(old, new) == []
    assert keys(old, kv8) == keys(new, kv8) == ["engine.kv_cache_dtype"]


def test_auto_that_was_decided_differently_on_another_machine_is_shown():
    a = run({"device": "auto"}, {"device": "cpu"})
    b = run({"device": "auto"}, {"device": "cuda"})
    assert keys(a, b) == ["engine.device"]


def ranks(tensor=1, pipeline=1, backend="auto", reduction="auto", threads=0, **engine):
    """A run as it was asked for on a machine of 8 cores."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    world = tensor * pipeline
    ran = backend if backend != "auto" else ("single" if world == 1 else "process")
    native = "native" if ran == "process" else "rank_order"
    order = native if reduction == "auto" and tensor > 1 else reduction
    cores = 8 // world if ran == "process" else 8
    requested = {
        "engine": {"num_threads": threads, **engine},
        "parallel": {**sizes, "backend": backend, "reduction": reduction},
    }
    resolved = {
        "engine": {"num_threads": threads or cores, **engine},
        "parallel": {**sizes, "backend": ran, "reduction": order},
    }
    return run_identity("r", {"requested_config": requested, "resolved_config": resolved})


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"tensor": 2}, ["parallel.tensor_parallel_size"]),
        ({"pipeline": 2}, ["parallel.pipeline_parallel_size"]),
        (
            {"tensor": 2, "threads": 4},
            ["engine.num_threads", "parallel.tensor_parallel_size"],
        ),
        (
            {"tensor": 4, "backend": "emulated"},
            ["parallel.backend", "parallel.tensor_parallel_size"],
        ),
    ],
)
def test_what_follows_the_number_of_ranks_is_not_a_second_change(changed, found):
    assert keys(ranks(), ranks(**changed)) == found


def test_the_reduction_follows_the_backend():
    a, b = (
        ranks(tensor=2, backend="process", threads=1),
        ranks(tensor=2, backend="emulated", threads=1),
    )
    assert keys(a, b) == ["parallel.backend"]


@pytest.mark.parametrize(
    ("baseline", "candidate", "warned"),
    [
        ({}, {"tensor": 4, "backend": "emulated", "reduction": "ring"}, False),
        ({}, {"pipeline": 2, "backend": "process"}, False),
        ({}, {"tensor": 2, "pipeline": 2}, True),
        ({}, {"tensor": 2, "backend": "emulated", "dtype": "bfloat16"}, True),
        (
            {"tensor": 4, "backend": "process", "reduction": "ring"},
            {"tensor": 4, "backend": "emulated", "reduction": "tree"},
            True,
        ),
    ],
)
def test_how_ranks_add_up_is_no_change_beside_there_being_some(baseline, candidate, warned):
    a, b = ranks(**baseline), ranks(**candidate)
    found = warnings(a, b, config_differences(a, b), ())
    assert any("config keys differ" in line for line in found) == warned


def test_a_run_from_before_a_key_differs_in_nothing_but_what_changed():
    old = run({"dtype": "float32"}, {"dtype": "float32"})
    assert keys(old, ranks(dtype="float32", threads=8)) == ["engine.num_threads"]
    assert keys(old, ranks(dtype="float32", threads=8, pipeline=2)) == [
        "engine.num_threads",
        "parallel.pipeline_parallel_size",
    ]
    assert keys(old, run({"dtype": "float32"}, {"dtype": "float32", "fixed_batch": False})) == []
    assert keys(old, run({"dtype": "float32"}, {"dtype": "float32", "fixed_batch": True})) == [
        "engine.fixed_batch"
    ]


def test_every_later_key_says_what_runs_before_it_did():
    """When this fails: add the new key to `BEFORE_THE_KEY`."""
    later = set(flat(RunConfig(name="x"))) - {"name", *(f"engine.{key}" for key in FIRST_KEYS)}
    assert later <= set(BEFORE_THE_KEY)


def speculative(**keys: object):
    config = {"engine": {"dtype": "float32"}, "speculative": keys}
    return run_identity("r", {"requested_config": config, "resolved_config": config})


@pytest.mark.parametrize(
    ("baseline", "candidate", "warned"),
    [
        ({}, {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2}, False),
        ({"method": "none"}, {"method": "draft_model", "draft_model": "demo"}, False),
        (
            {"method": "ngram", "draft_model": ""},
            {"method": "draft_model", "draft_model": "demo"},
            False,
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2},
            {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2},
            True,
        ),
    ],
)
def test_how_drafts_are_made_is_part_of_there_being_some(baseline, candidate, warned):
    a, b = speculative(**baseline), speculative(**candidate)
    found = config_differences(a, b)
    assert len(found) >= 2
    assert any("keys differ" in text for text in warnings(a, b, found, ())) is warned
