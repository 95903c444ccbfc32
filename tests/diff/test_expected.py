"""Which pairs of runs must be bit-equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diff.run_infos import info
from trace_audit.diff.expected import expectation
from trace_audit.diff.summary import Expectation


def keys(expected: Expectation | None) -> list[str] | None:
    return None if expected is None else [difference.key for difference in expected.keys]


def test_the_same_configuration_twice_is_left_to_the_noise_floor() -> None:
    assert expectation(info(), info()) is None


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        # Stages add nothing up, whatever the ranks are.
        ({}, {"pipeline_parallel_size": 2, "backend": "process"}),
        ({}, {"pipeline_parallel_size": 2, "backend": "emulated"}),
        (
            {"tensor_parallel_size": 4, "backend": "process", "reduction": "native"},
            {
                "tensor_parallel_size": 4,
                "backend": "process",
                "reduction": "native",
                "pipeline_parallel_size": 2,
            },
        ),
        # One tensor-parallel rank adds nothing up.
        ({}, {"backend": "emulated"}),
        ({}, {"backend": "process", "reduction": "ring", "reduction_dtype": "float32"}),
        # Of two a + b has one order and one rounding.
        (
            {"tensor_parallel_size": 2, "backend": "process", "reduction": "native"},
            {"tensor_parallel_size": 2, "backend": "emulated", "reduction": "rank_order"},
        ),
        (
            {"tensor_parallel_size": 2, "backend": "emulated", "reduction": "ring"},
            {
                "tensor_parallel_size": 2,
                "backend": "emulated",
                "reduction": "tree",
                "reduction_dtype": "float32",
            },
        ),
        # Of more, a named order is the same order anywhere.
        (
            {"tensor_parallel_size": 8, "backend": "process", "reduction": "ring"},
            {"tensor_parallel_size": 8, "backend": "emulated", "reduction": "ring"},
        ),
        ({}, {"timeout_seconds": 5}),
        ({}, {"gpu_memory_utilization": 0.5}),
        ({}, {"num_kv_blocks": 200}),
        ({}, {"preemption": "recompute"}),
        # A wider cache holds the model's numbers as they are.
        ({}, {"kv_cache_dtype": "float32"}),
        (
            {"attention_backend": "eager"},
            {"attention_backend": "eager", "kv_cache_dtype": "float32"},
        ),
    ],
)
def test_keys_that_cannot_change_a_bit(baseline: dict[str, Any], candidate: dict[str, Any]) -> None:
    a, b = info(**baseline), info(**candidate)
    expected = expectation(a, b)
    flat = [
        {**side["resolved_config"]["engine"], **side["resolved_config"]["parallel"]}
        for side in (a, b)
    ]
    changed = sorted(key for key in flat[0] if flat[0][key] != flat[1][key])
    assert expected is not None
    assert sorted(difference.key.partition(".")[2] for difference in expected.keys) == changed
    assert expected.reason
    assert not expected.broken


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ({}, {"dtype": "float16"}),
        ({}, {"attention_backend": "eager"}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"kv_cache_dtype": "float32"}, {"kv_cache_dtype": "float16"}),
        # Compiled for another cache, a kernel is another kernel.
        (
            {"attention_backend": "triton"},
            {"attention_backend": "triton", "kv_cache_dtype": "float32"},
        ),
        ({}, {"num_threads": 2}),
        ({}, {"max_num_seqs": 8}),
        ({}, {"a_key_of_the_future": 1}),
        ({}, {"tensor_parallel_size": 2, "backend": "process", "reduction": "native"}),
        ({}, {"pipeline_parallel_size": 2, "backend": "process", "num_threads": 2}),
        # The same order is not known, or is another.
        (
            {"tensor_parallel_size": 4, "backend": "process", "reduction": "native"},
            {"tensor_parallel_size": 4, "backend": "emulated", "reduction": "rank_order"},
        ),
        (
            {"tensor_parallel_size": 4, "backend": "emulated", "reduction": "ring"},
            {"tensor_parallel_size": 4, "backend": "emulated", "reduction": "tree"},
        ),
        (
            {"tensor_parallel_size": 4, "backend": "emulated", "reduction": "ring"},
            {
                "tensor_parallel_size": 4,
                "backend": "process",
                "reduction": "ring",
                "reduction_dtype": "float32",
            },
        ),
        # NCCL may order three or more by how their devices are connected.
        (
            {"tensor_parallel_size": 4, "reduction": "native", "device": "cuda"},
            {
                "tensor_parallel_size": 4,
                "reduction": "native",
                "device": "cuda",
                "pipeline_parallel_size": 2,
            },
        ),
    ],
)
def test_keys_that_may_change_bits(baseline: dict[str, Any], candidate: dict[str, Any]) -> None:
    assert expectation(info(**baseline), info(**candidate)) is None


def test_two_ranks_on_cuda_may_be_laid_out_in_any_way() -> None:
    two = {"tensor_parallel_size": 2, "reduction": "native", "device": "cuda"}
    assert keys(expectation(info(**two), info(**two, pipeline_parallel_size=2))) == [
        "parallel.pipeline_parallel_size"
    ]


@pytest.mark.parametrize("preemptions", [1, None])
@pytest.mark.parametrize("changed", [{"num_kv_blocks": 8}, {"preemption": "recompute"}])
def test_room_matters_once_a_run_preempted(
    preemptions: int | None, changed: dict[str, Any]
) -> None:
    assert expectation(info(0), info(0, **changed)) is not None
    assert expectation(info(0), info(preemptions, **changed)) is None
    assert expectation(info(preemptions), info(0, **changed)) is None


def test_room_matters_where_drafts_give_way_to_it() -> None:
    def run(**changed: Any) -> dict[str, Any]:
        made = info(0, **changed)
        made["resolved_config"]["speculative"] = {"method": "ngram"}
        return made

    assert expectation(run(), run(num_kv_blocks=8)) is None
    assert expectation(run(), {**run(timeout_seconds=5), "num_kv_blocks": 12}) is None
    assert expectation(run(), run(preemption="recompute")) is not None


def test_with_launches_of_a_fixed_shape_swapping_keeps_the_bits() -> None:
    fixed = info(0, fixed_batch=True)
    assert expectation(fixed, info(3, fixed_batch=True, num_kv_blocks=8)) is not None
    recomputed = info(3, fixed_batch=True, num_kv_blocks=8, preemption="recompute")
    assert expectation(fixed, recomputed) is None


@pytest.mark.parametrize("changed", [{"batch_order_seed": 7}, {"shard_size": 16}])
def test_with_fixed_batch_neighbours_and_order_change_no_bit(changed: dict[str, Any]) -> None:
    fixed = {"fixed_batch": True}
    assert keys(expectation(info(**fixed), info(**fixed, **changed))) is not None
    assert keys(expectation(info(2, **fixed), info(3, **fixed, **changed))) is not None
    assert expectation(info(), info(**changed)) is None
    assert expectation(info(**fixed), info(**changed)) is None
    # Which sequences were recomputed depends on who else was there.
    recomputed = fixed | {"preemption": "recompute"}
    assert expectation(info(2, **recomputed), info(3, **recomputed, **changed)) is None
    assert expectation(info(0, **recomputed), info(0, **recomputed, **changed)) is not None


@pytest.mark.parametrize("other", [{"subset": ["s0"]}, {"repeat_kind": "batch"}])
def test_with_fixed_batch_other_sequences_beside_change_no_bit(other: dict[str, Any]) -> None:
    fixed = info(fixed_batch=True)
    expected = expectation(fixed, {**fixed, **other})
    assert expected is not None
    assert expected.keys == ()
    assert "no sequence depends on the others" in expected.reason
    assert expectation(info(), {**info(), **other}) is None


@pytest.mark.parametrize("elsewhere", ["path", "method"])
def test_fixed_batch_promises_nothing_of_other_ways_to_score(elsewhere: str) -> None:
    def run(**changed: Any) -> dict[str, Any]:
        made = info(fixed_batch=True, **changed)
        config = made["resolved_config"]
        if elsewhere == "path":
            config["engine"]["path"] = "prefill"
        else:
            config["speculative"] = {"method": "ngram"}
        return made

    assert expectation(run(), run(shard_size=8)) is None


def test_a_cache_that_memory_fitted_otherwise_matters_once_a_run_preempted() -> None:
    staged = {"pipeline_parallel_size": 2}
    assert expectation(info(0), {**info(0, **staged), "num_kv_blocks": 12}) is not None
    assert expectation(info(0), {**info(2, **staged), "num_kv_blocks": 12}) is None
    assert expectation(info(2), info(2, **staged)) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"model_fingerprint": "q" * 64},
        {"environment_fingerprint": "f" * 64},
        {"model_fingerprint": None},
        {"environment_fingerprint": None},
        {"resolved_config": {}},
        {"subset": ["s0"]},
        {"repeat_kind": "batch"},
        {"backends": {"attention": "eager"}},
    ],
)
def test_other_weights_machines_parts_or_schedules_owe_nothing(changed: dict[str, Any]) -> None:
    other = {**info(), **changed}
    assert expectation(info(), other) is None
    assert expectation(other, info()) is None


def test_two_imported_runs_owe_nothing() -> None:
    assert expectation({"model": "elsewhere"}, {"model": "elsewhere"}) is None


def test_parts_that_only_move_data_may_differ() -> None:
    other = info(backend="process") | {"backends": {"attention": "sdpa", "transport": "gloo"}}
    assert expectation(info(), other) is not None


def test_a_run_from_before_the_parallel_table_was_one_rank() -> None:
    old = info()
    del old["resolved_config"]["parallel"]
    assert keys(expectation(old, info(timeout_seconds=5))) == ["parallel.timeout_seconds"]
    assert keys(expectation(old, info(pipeline_parallel_size=2))) == [
        "parallel.pipeline_parallel_size"
    ]
    assert expectation(old, info(tensor_parallel_size=2)) is None


@pytest.mark.parametrize(
    ("method", "key", "equal"),
    [
        ("none", "num_speculative_tokens", True),
        ("ngram", "num_speculative_tokens", False),
        ("draft_model", "num_speculative_tokens", False),
        ("draft_model", "prompt_lookup_max", True),
        ("ngram", "prompt_lookup_max", False),
        ("ngram", "method", False),
    ],
)
def test_keys_of_drafting_change_no_bit_where_they_have_no_effect(
    method: str, key: str, equal: bool
) -> None:
    a, b = info(), info()
    a["resolved_config"] = a["resolved_config"] | {"speculative": {"method": method, key: 4}}
    b["resolved_config"] = b["resolved_config"] | {"speculative": {"method": method, key: 7}}
    assert keys(expectation(a, b)) == ([f"speculative.{key}"] if equal else None)


def test_how_drafts_are_rejected_is_nothing_to_a_replay() -> None:
    def run(rejection: str, **more: Any) -> dict[str, Any]:
        made = info(0) | more
        drafting = {"method": "ngram", "rejection": rejection}
        made["resolved_config"] = made["resolved_config"] | {"speculative": drafting}
        return made

    replay = {"repeat_of": None}
    found = expectation(run("greedy", **replay), run("probabilistic", **replay))
    assert keys(found) == ["speculative.rejection"]
    assert expectation(run("greedy"), run("probabilistic")) is None
