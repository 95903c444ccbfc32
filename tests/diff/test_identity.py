from __future__ import annotations

import pytest

from tests.diff.synthetic import run_info
from trace_audit.diff.config_differences import (
    config_differences,
    differences,
    environment_differences,
)
from trace_audit.diff.identity import check_comparable, flat, logit_dtype, run_identity, warnings
from trace_audit.diff.summary import Difference
from trace_audit.errors import InvalidComparisonError


def test_every_differing_key_is_listed_and_the_name_is_not() -> None:
    a = run_identity("record", run_info("record"))
    b = run_identity("b", run_info("b", dtype="bfloat16", block_size=32))
    assert differences(a.resolved, b.resolved) == (
        Difference(key="engine.block_size", baseline=None, candidate=32),
        Difference(key="engine.dtype", baseline="float32", candidate="bfloat16"),
    )


@pytest.mark.parametrize(("changed", "warned"), [(0, False), (1, False), (2, True)])
def test_more_than_one_differing_key_is_warned_about(changed: int, warned: bool) -> None:
    keys = dict(list({"dtype": "bfloat16", "attention_backend": "sdpa"}.items())[:changed])
    a = run_identity("record", run_info("record"))
    b = run_identity("b", run_info("b", **keys))
    found = warnings(a, b, differences(a.resolved, b.resolved), ())
    assert any("config keys differ" in line for line in found) == warned


def test_another_environment_is_warned_about_with_its_keys() -> None:
    other = run_info("b")
    other["environment_fingerprint"] = "f" * 64
    other["environment"] = {"versions": {"torch": "2.11.0"}}
    a, b = run_identity("record", run_info("record")), run_identity("b", other)
    found = warnings(a, b, (), differences(a.environment, b.environment))
    assert found == ("the runs come from different environments (versions.torch)",)


def test_another_checkpoint_and_a_subset_are_warned_about() -> None:
    other = run_info("b")
    other["model_fingerprint"] = "q" * 64
    other["subset"] = ["s1", "s2"]
    a, b = run_identity("record", run_info("record")), run_identity("b", other)
    assert warnings(a, b, (), ()) == (
        "the candidate is another checkpoint than the baseline",
        "b is a subset of 2 sequences",
    )


def test_a_checkpoint_that_was_quantized_is_told_with_its_format() -> None:
    other = run_info("b")
    other["model_fingerprint"] = "q" * 64
    other["backends"] = {"checkpoint": "torchao (Int8WeightOnlyConfig)"}
    a, b = run_identity("record", run_info("record")), run_identity("b", other)
    assert warnings(a, b, (), ()) == (
        "the candidate is another checkpoint than the baseline: torchao (Int8WeightOnlyConfig), "
        "and the baseline's plain",
    )


def test_a_run_that_says_nothing_is_read_without_inventing_anything() -> None:
    identity = run_identity("imported", {})
    assert identity.model_fingerprint is None
    assert identity.resolved == {}
    assert identity.subset is None
    assert logit_dtype(identity) is None


def test_logit_dtype_is_that_of_the_head() -> None:
    info = run_info("b", dtype="bfloat16", lm_head_dtype="float32")
    assert logit_dtype(run_identity("b", info)) == "float32"
    info = run_info("b", dtype="bfloat16", lm_head_dtype="auto")
    assert logit_dtype(run_identity("b", info)) == "bfloat16"


def test_flat_and_nested_configurations_read_the_same() -> None:
    assert flat({"engine": {"dtype": "x", "a": {"b": 1}}}) == flat(
        {"engine.dtype": "x", "engine.a.b": 1}
    )


def test_another_vocabulary_is_invalid() -> None:
    with pytest.raises(InvalidComparisonError, match="vocabulary of 9 ids, the baseline one of 8"):
        check_comparable({"vocabulary_size": 8}, {"vocabulary_size": 9}, "b")


def test_raw_logprobs_are_not_compared_with_processed_ones() -> None:
    with pytest.raises(InvalidComparisonError, match="processed logprobs, the baseline has raw"):
        check_comparable({"logprobs": "raw"}, {"logprobs": "processed"}, "b")
    check_comparable({"logprobs": "raw"}, {}, "b")


def test_a_fallback_backend_is_invalid() -> None:
    info = run_info("b", attention_backend="triton")
    info["backends"] = {"attention": "eager"}
    with pytest.raises(InvalidComparisonError, match="asked for attention_backend 'triton'"):
        check_comparable(run_info("record"), info, "b")
    info = run_info("b", quantization="fp8")
    info["backends"] = {"quantization": "none"}
    with pytest.raises(InvalidComparisonError, match="asked for quantization 'fp8' but ran 'none'"):
        check_comparable(run_info("record"), info, "b")


def test_how_long_a_rank_waits_is_no_second_change() -> None:
    infos = [run_info(name) for name in "ab"]
    infos[1]["resolved_config"]["engine"]["dtype"] = "bfloat16"
    infos[1]["resolved_config"]["parallel"] = {"timeout_seconds": 5}
    a, b = (run_identity(name, info) for name, info in zip("ab", infos, strict=True))
    assert warnings(a, b, differences(a.resolved, b.resolved), ()) == ()


def test_against_an_engine_that_states_nothing_no_key_is_said_to_differ() -> None:
    ours, other = run_identity("record", run_info("record")), run_identity("imported", {})
    for a, b in ((ours, other), (other, ours)):
        assert config_differences(a, b) == ()
        assert environment_differences(a, b) == ()
        undeclared, unstated = warnings(a, b, (), ())
        assert "imported does not say how its logprobs were made" in undeclared
        assert unstated == "imported states no configuration, so its dtype is not known here"
