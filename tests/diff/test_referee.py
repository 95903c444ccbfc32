from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.cli.test_gates import audit, logits, repeats
from tests.diff.synthetic import FakeAudit, compare_all
from tests.diff.test_kl_excess import exact_kl
from trace_audit.diff.verdict import Referee
from trace_audit.errors import UsageError
from trace_audit.report.gate_view import referee_line


def referee(data: FakeAudit, candidate: str, baseline: str = "base", by: str = "record") -> Referee:
    summary, _ = compare_all(data, baseline, [candidate], referee=by)
    found = summary.pairs[0].referee
    assert found is not None
    return found


def three(**more: Any) -> FakeAudit:
    return audit(base=logits(0.2, 1), near=logits(0.05, 2), far=logits(0.4, 3), **more)


def test_the_difference_is_that_of_two_kls_by_group() -> None:
    found = referee(three(), "far")
    exact = exact_kl(logits(0), logits(0.4, 3)).mean() - exact_kl(logits(0), logits(0.2, 1)).mean()
    assert found.difference is not None
    assert found.candidate_kl is not None
    assert found.baseline_kl is not None
    assert found.difference == pytest.approx(found.candidate_kl - found.baseline_kl)
    assert found.difference == pytest.approx(exact, rel=0.1)
    assert found.interval is not None
    assert found.interval.low < exact < found.interval.high


def test_near_and_far_are_told_apart() -> None:
    assert referee(three(), "near").nearness == "nearer"
    assert referee(three(), "far").nearness == "farther"
    assert referee(three(other=logits(0.2, 5)), "other").nearness == "undecided"


def test_repeats_give_the_margin() -> None:
    data = three(base2=logits(0.2, 6), other=logits(0.2, 5))
    repeats(data, "base2", "base")
    found = referee(data, "other")
    assert found.margin > 0
    assert found.nearness == "not farther"


def test_a_referee_without_a_support_gives_no_answer() -> None:
    data = three()
    table = data.tables["record"]
    data.tables["bare"] = table.set_column(
        table.schema.get_field_index("support_logprobs"),
        table.schema.field("support_logprobs"),
        [pa.nulls(len(table), table.schema.field("support_logprobs").type)],
    )
    found = referee(data, "far", by="bare")
    assert found.difference is None
    assert "fixed support" in str(found.reason)


def test_a_candidate_that_makes_tokens_impossible_gives_no_answer() -> None:
    impossible = logits(0.2, 4)
    impossible[3, np.argsort(-logits(0)[3])[1]] = -np.inf
    found = referee(three(impossible=impossible), "impossible")
    assert "infinite at 1 tokens" in str(found.reason)


@pytest.mark.parametrize("by", ["base", "far"])
def test_nothing_is_nearer_to_itself(by: str) -> None:
    with pytest.raises(UsageError, match="itself"):
        referee(three(), "far", by=by)


def test_it_is_one_sentence() -> None:
    summary, _ = compare_all(three(), "base", ["near"], referee="record")
    line = referee_line(summary.pairs[0])
    assert line is not None
    assert line.startswith("Referee record: the candidate is nearer: KL(record || candidate)")
    assert "margin 0" in line
