"""The KL estimate against exact KL at the same positions, through the real sampler's statistics.

The bound is three standard errors of the paired difference: the error of the mean itself would hide
a bias of several per cent. Here that standard error is computed, not sampled: the estimate differs
from the exact KL by its tail draws alone, whose distribution is known. The same on the demo model:
`test_kl_golden_demo.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.kl_estimator import plain_form
from trace_audit.config import Distribution
from trace_audit.diff.columns import RunColumns
from trace_audit.diff.kl import KLTerms, fixed_support, fixed_support_kl
from trace_audit.engine.draws import uniforms
from trace_audit.engine.sampler import Sampler, SamplingInputs
from trace_audit.engine.token_statistics import SUPPORT_TAIL_DRAWS, SUPPORT_TOP_K
from trace_audit.full_kl import full_kl
from trace_audit.kernels.statistics import REFERENCE

POSITIONS = 2000
VOCABULARY = 4096
CHUNK = 250
BROKEN_SHARE = 0.01

Floats = NDArray[np.float64]
Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def noise(logits: torch.Tensor, generator: torch.Generator, std: float) -> torch.Tensor:
    return std * torch.randn(logits.shape, generator=generator)


def directions(logits: torch.Tensor, generator: torch.Generator, std: float) -> torch.Tensor:
    """As rounded weights do: an error of few dimensions, so ids share it."""
    hidden = torch.randn(len(logits), 16, generator=generator)
    weights = torch.randn(16, logits.shape[1], generator=generator)
    return std / 4 * hidden @ weights


def broken(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """1 % of the positions are broken, the others differ as float32 backends do."""
    hit = torch.rand(len(logits), 1, generator=generator) < BROKEN_SHARE
    return logits + torch.where(hit, noise(logits, generator, 1.0), noise(logits, generator, 1e-6))


CHANGES: dict[str, Change] = {
    "float32": lambda logits, generator: logits + noise(logits, generator, 1e-6),
    "bf16": lambda logits, generator: logits.bfloat16(),
    "fp16": lambda logits, generator: logits.half(),
    "int8": lambda logits, generator: logits + directions(logits, generator, 0.05),
    "int4": lambda logits, generator: logits + directions(logits, generator, 0.5),
    "broken": broken,
}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A run's statistics at the support, and its whole distributions float32 [N, V]."""

    columns: RunColumns
    full: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Case:
    record: Scored
    candidates: dict[str, Scored]
    support: NDArray[np.int64]

    def sides(self) -> Iterator[tuple[str, Scored, Scored]]:
        for name, candidate in self.candidates.items():
            yield name, self.record, candidate
            yield f"{name} reversed", candidate, self.record

    @cached_property
    def exact(self) -> dict[str, Floats]:
        return {name: full_kl(x.full, y.full) for name, x, y in self.sides()}

    @cached_property
    def error(self) -> dict[str, float]:
        """Standard error of the mean of (estimate minus exact)."""
        chunks = [slice(start, start + CHUNK) for start in range(0, POSITIONS, CHUNK)]
        return {
            name: float(np.sqrt(sum(self._variance(x, y, c) for c in chunks)) / POSITIONS)
            for name, x, y in self.sides()
        }

    def _variance(self, x: Scored, y: Scored, rows: slice) -> float:
        """Of the rows' summed estimates, from the tail terms of every id that could be drawn."""
        top = self.support[rows, :SUPPORT_TOP_K]
        tails = []
        for run in (x, y, self.record):
            probability = np.exp(run.full[rows].astype(np.float64))
            np.put_along_axis(probability, top, 0.0, axis=1)
            tails.append(probability)
        drawn = tails[2]
        # The top ids, which are never drawn, have no weight and any ratio.
        ratios = [np.divide(t, drawn, where=drawn > 0, out=np.ones_like(t)) for t in tails[:2]]
        mass = [t.sum(axis=1, keepdims=True) for t in tails]
        r_x, r_y = (r * mass[2] / m for r, m in zip(ratios, mass[:2], strict=True))
        terms = mass[0] * (r_x * np.log(r_x / r_y) - r_x + r_y)
        weight = drawn / mass[2]
        spread = (weight * terms**2).sum(axis=1) - (weight * terms).sum(axis=1) ** 2
        return float(spread.sum()) / SUPPORT_TAIL_DRAWS


def score(logits: torch.Tensor, seed: int, support: torch.Tensor | None) -> tuple[Scored, ...]:
    """What the engine stores of [N, V] logits; the record run draws the support."""
    device = torch.device("cpu")
    sampler = Sampler(
        vocabulary_size=VOCABULARY,
        device=device,
        kernels=REFERENCE,
        trace_replay=None,
        scored=Distribution(),
    )
    rows = np.arange(POSITIONS)
    draws = torch.from_numpy(
        uniforms(np.full(POSITIONS, seed), rows // 100, rows % 100, SUPPORT_TAIL_DRAWS + 1)
    )
    parts = []
    for start in range(0, POSITIONS, CHUNK):
        chunk = slice(start, start + CHUNK)
        inputs = SamplingInputs(
            temperatures=None,
            uniforms=draws[chunk] if support is None else None,
            support=None if support is None else support[chunk],
            has_support=None,
        )
        nothing = torch.zeros(0)
        _, statistics = sampler(logits[chunk], inputs, nothing, None)  # type: ignore[arg-type]
        parts.append(statistics)

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    columns = RunColumns(
        logprob=joined("logprob").double().numpy(),
        support_logprobs=joined("support_logprobs").double().numpy(),
        log_tail_mass=joined("log_tail_mass").double().numpy(),
    )
    full = (logits.float() - joined("logsumexp")[:, None]).numpy()
    return Scored(columns=columns, full=full), joined("support_token_ids")


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(seed=0)


def make_case(seed: int) -> Case:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    record, support = score(logits, seed, None)
    candidates = {
        name: score(change(logits, generator), seed, support)[0] for name, change in CHANGES.items()
    }
    return Case(record=record, candidates=candidates, support=support.long().numpy())


def faults(estimate: Floats, exact: Floats, error: float) -> list[str]:
    """What is wrong with an estimate, from both of them at every position: float64 [N]."""
    found = []
    if (estimate < 0).any():
        found.append("negative")
    if abs((estimate - exact).mean()) > 3 * error:
        found.append("biased")
    return found


Estimator = Callable[[Case, RunColumns, RunColumns], Floats]


def fixed(case: Case, x: RunColumns, y: RunColumns, record: RunColumns | None = None) -> KLTerms:
    sides = [fixed_support(side) for side in (x, y, record or case.record.columns)]
    assert None not in sides
    return fixed_support_kl(*sides, case.support)  # type: ignore[arg-type]


def judged(case: Case, estimator: Estimator) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with an estimator, for every candidate in both directions."""
    for name, x, y in case.sides():
        estimate = estimator(case, x.columns, y.columns)
        yield name, faults(estimate, case.exact[name], case.error[name])


def test_the_estimate_is_the_exact_kl_within_three_standard_errors(case: Case) -> None:
    found = dict(judged(case, lambda case, x, y: fixed(case, x, y).estimate))
    assert found == {key: [] for key in found}
    assert len(found) == 2 * len(CHANGES)


def test_three_standard_errors_are_narrow(case: Case) -> None:
    # Of a sparse fault 20 positions with 4 draws each carry everything.
    for name, _, _ in case.sides():
        limit = 0.3 if name.startswith("broken") else 0.015
        assert case.error[name] < limit * case.exact[name].mean(), name


def test_the_computed_standard_error_is_that_of_the_samples(case: Case) -> None:
    for name, x, y in case.sides():
        if not name.startswith("broken"):
            difference = fixed(case, x.columns, y.columns).estimate - case.exact[name]
            sampled = difference.std(ddof=1) / np.sqrt(POSITIONS)
            assert sampled == pytest.approx(case.error[name], rel=0.35), name


def test_the_bound_is_a_bound(case: Case) -> None:
    for name, x, y in case.sides():
        bound, exact = fixed(case, x.columns, y.columns).lower_bound, case.exact[name]
        assert (exact > 0).all()
        assert (bound >= 0).all()
        assert bound.mean() < exact.mean()
        # Float32 statistics: the bound of a row may be over its KL by their rounding.
        assert (bound <= exact * (1 + 1e-3) + 1e-12).all()


def without_added_terms(case: Case, x: RunColumns, y: RunColumns) -> Floats:
    supports = [fixed_support(run) for run in (x, y, case.record.columns)]
    a, b, record = (support for support in supports if support is not None)
    return plain_form(a, b, record)


def bound_only(case: Case, x: RunColumns, y: RunColumns) -> Floats:
    return fixed(case, x, y).lower_bound


def drawn_from_x(case: Case, x: RunColumns, y: RunColumns) -> Floats:
    """Forgets that the draws are the record's."""
    return fixed(case, x, y, record=x).estimate


def weighed_by_probability(case: Case, x: RunColumns, y: RunColumns) -> Floats:
    """Forgets that the draws are from the tail alone."""
    whole = replace(case.record.columns, log_tail_mass=np.zeros(POSITIONS))
    return fixed(case, x, y, record=whole).estimate


def three_draws_of_four(case: Case, x: RunColumns, y: RunColumns) -> Floats:
    """Loses a draw and still divides by four."""
    terms = fixed(case, x, y)
    return terms.lower_bound + 0.75 * (terms.estimate - terms.lower_bound)


@pytest.mark.parametrize(
    ("estimator", "candidate", "fault"),
    [
        (without_added_terms, "float32", "negative"),
        (without_added_terms, "float32", "biased"),
        (without_added_terms, "broken", "negative"),
        (bound_only, "bf16", "biased"),
        (bound_only, "int4 reversed", "biased"),
        (bound_only, "broken", "biased"),
        (drawn_from_x, "int4 reversed", "biased"),
        (weighed_by_probability, "bf16", "biased"),
        (three_draws_of_four, "bf16", "biased"),
        (three_draws_of_four, "int8 reversed", "biased"),
    ],
)
def test_a_worse_estimator_is_caught(
    case: Case, estimator: Estimator, candidate: str, fault: str
) -> None:
    assert fault in dict(judged(case, estimator))[candidate]


def test_exact_kl_on_a_hand_computed_example() -> None:
    x = np.log([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], where=np.array([[1, 1, 1], [1, 0, 0]]) > 0,
               out=np.full((2, 3), -np.inf)).astype(np.float32)  # fmt: skip
    y = np.log([[0.4, 0.4, 0.2], [0.5, 0.5, 0.0]], where=np.array([[1, 1, 1], [1, 1, 0]]) > 0,
               out=np.full((2, 3), -np.inf)).astype(np.float32)  # fmt: skip
    expected = [0.5 * np.log(0.5 / 0.4) + 0.3 * np.log(0.3 / 0.4), np.log(2)]
    np.testing.assert_allclose(full_kl(x, y), expected, rtol=1e-6)
    # Y gives nothing to what X does not: infinite. What neither has counts for nothing.
    assert np.isinf(full_kl(y, x)[1])
    assert np.isnan(full_kl(np.full((1, 3), np.nan, np.float32), y[:1])[0])
