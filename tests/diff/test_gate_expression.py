from __future__ import annotations

import pytest

from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.gate_expression import parse_gate
from trace_audit.diff.profiles import PROFILES
from trace_audit.errors import UsageError


@pytest.mark.parametrize(
    ("text", "metric", "bound", "factor"),
    [
        ("kl.mean > 3e-3", "kl.mean", 0.003, 0.0),
        ("kl.mean>.003", "kl.mean", 0.003, 0.0),
        (" kl.mean  >  3e-3 nats ", "kl.mean", 0.003, 0.0),
        ("flip.hard > 0.1%", "flip.hard", 0.001, 0.0),
        ("flip.hard > 0.1 %", "flip.hard", 0.001, 0.0),
        ("flip.hard > 0.001", "flip.hard", 0.001, 0.0),
        ("abs.p99 > 3*floor", "abs.p99", None, 3.0),
        ("abs.p99 > 2.5 * floor", "abs.p99", None, 2.5),
        ("kl.excess > 1.25", "kl.excess", 1.25, 0.0),
        ("rows.unequal > 0", "rows.unequal", 0.0, 0.0),
    ],
)
def test_expressions(text: str, metric: str, bound: float | None, factor: float) -> None:
    gate = parse_gate(text)
    assert gate.metric == metric
    assert gate.bound == (None if bound is None else pytest.approx(bound, rel=1e-15))
    assert gate.floor_factor == factor
    assert not gate.watch


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("kl.maen > 1", "no metric 'kl.maen'", "'kl.mean'"),
        ("flip.hrad > 1%", "no metric", "'flip.hard'"),
        ("kl.mean > 3 nat", "'nat' is no unit", "'nats'"),
        ("abs.p99 > 3*flor", "'*flor' is no unit", "'*floor'"),
        ("abs.p99 > 3 parsecs", "'parsecs' is no unit", "%"),
        ("kl.mean > 3%", "in nats, not in %", "Leave out"),
        ("flip.hard > 3 nats", "in share, not in nats", "Leave out"),
        ("kl.mean < 3", "'<'", "'>'"),
        ("kl.mean >= 3", "'>='", "'>'"),
        ("kl.mean > ", "no gate", "kl.mean > 3e-3"),
        ("kl.mean", "no gate", "kl.mean > 3e-3"),
        ("", "no gate", "kl.mean > 3e-3"),
        ("kl.mean > x", "'x' is no number", "3e-3"),
        ("kl.mean > -1", "'-1' is no number", "3e-3"),
        ("kl.mean > nan", "no number", "3e-3"),
        ("kl.mean > 1e999", "no finite number", None),
        ("kl.mean > 1; import os", "is no unit", None),
        ("abs.max > 3", "grows with", "abs.p99"),
        ("delta.mean > 3", "sign has no better side", "abs.mean"),
        ("flip.excess > 2", "cannot be gated", "flip.hard"),
    ],
)
def test_mistakes_name_the_thing_and_the_nearest_name(
    text: str, said: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gate(text)
    assert said in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_every_gate_of_a_profile_is_on_a_metric_that_may_be_gated() -> None:
    for profile in PROFILES.values():
        assert any(not gate.watch for gate in profile.gates)
        for gate in profile.gates:
            assert CATALOG[gate.metric].not_gated is None
            assert gate.source


def test_the_profiles_and_their_primary_bounds() -> None:
    bounds = {
        name: {gate.metric: gate.bound for gate in profile.gates if not gate.watch}
        for name, profile in PROFILES.items()
    }
    assert bounds == {
        "bitwise": {"rows.unequal": 0.0},
        "kernel": {"kl.excess": 1.25},
        "kv8": {"kl.excess": 1.5},
        "w8": {"kl.mean": 5e-3},
        "w4": {"kl.mean": 5e-2, "top1.disagreement": 0.11},
        "rl": {"kl.k3": 1e-3, "abs.mean": 0.05},
    }
