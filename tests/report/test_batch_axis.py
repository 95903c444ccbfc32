"""A difference of batching alone is told apart from noise, where reruns allow it."""

from __future__ import annotations

import pytest

from tests.cli.test_gates import audit, logits, repeats
from tests.diff.synthetic import FakeAudit, run_info
from trace_audit.diff.compare import compare
from trace_audit.diff.source import AuditSource
from trace_audit.report.batch_axis import batch_axis_line
from trace_audit.report.view import scope_lines


def line(data: FakeAudit, **changed: object) -> str | None:
    data.infos["b"] = run_info("b", dtype="bfloat16", **changed)
    summary = compare(AuditSource(data), "a", "b").summary  # type: ignore[arg-type]
    told = batch_axis_line(summary)
    assert told is None or told in scope_lines(summary)
    return told


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"batch_order_seed": 3}, "batch order alone"),
        ({"max_num_seqs": 8}, "batch size alone"),
        ({"max_num_batched_tokens": 64}, "tokens of a launch alone"),
        ({"batch_order_seed": 3, "max_num_seqs": 8}, "batch order and batch size alone"),
    ],
)
@pytest.mark.parametrize(
    ("rerun", "told"),
    [
        (None, "`replay --repeat 2` tells whether reruns differ too"),
        (logits(0.05), "deterministic but different, since reruns are bit-equal"),
        (logits(0.05, 5), "reruns differ too, in up to 100"),
    ],
)
def test_batching_alone(changed, what, rerun, told) -> None:
    runs = {"a": logits(0.05), "b": logits(0.05, 1)}
    data = audit(**runs) if rerun is None else audit(**runs, a2=rerun)
    if rerun is not None:
        repeats(data, "a2", "a")
    text = line(data, **changed)
    assert text is not None
    assert what in text
    assert told in text


def test_batching_that_moves_no_bit() -> None:
    text = line(audit(a=logits(0.05), b=logits(0.05)), batch_order_seed=3)
    assert text == "The runs differ in batch order alone, and no bit does."


@pytest.mark.parametrize("changed", [{}, {"block_size": 32, "batch_order_seed": 3}])
def test_nothing_is_told_of_other_differences(changed: dict[str, object]) -> None:
    assert line(audit(a=logits(0.05), b=logits(0.05, 1)), **changed) is None


@pytest.mark.parametrize("key", ["model_fingerprint", "environment_fingerprint"])
def test_another_machine_or_checkpoint_is_not_batching_alone(key: str) -> None:
    data = audit(a=logits(0.05), b=logits(0.05, 1))
    data.infos["a"][key] = "0" * 64
    assert line(data, batch_order_seed=3) is None
