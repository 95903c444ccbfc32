"""What logprobs give away, each as a kind of fault; sound runs give away nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.diff.synthetic import (
    FakeAudit,
    best_ids,
    draw_support,
    log_softmax,
    logprob_pair,
    make_sequences,
    model_audit,
    run_info,
    run_table,
    statistics,
)
from trace_audit.diff.align import AlignedPair, reduced
from trace_audit.diff.compare import compare
from trace_audit.diff.hints import hints
from trace_audit.diff.source import AuditSource

COUNT, LENGTH, VOCABULARY = 8, 40, 200
RNG = np.random.default_rng(0)
# Peaked and flat rows, as a language model has them.
RECORD = RNG.normal(0, 1, (COUNT * LENGTH, VOCABULARY)) * RNG.uniform(0.5, 6, (COUNT * LENGTH, 1))
NOISE = RNG.normal(0, 1, RECORD.shape)
GREEDY = best_ids(RECORD, 1)[:, 0]
SAMPLED = np.array([RNG.choice(VOCABULARY, p=np.exp(row)) for row in log_softmax(RECORD)])


def forced(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logprobs [S, T] of the forced tokens."""
    return log_softmax(logits)[np.arange(len(tokens)), tokens].reshape(COUNT, LENGTH)


def pair_of(baseline: np.ndarray, candidate: np.ndarray, **options) -> AlignedPair:
    return logprob_pair(baseline, candidate, **options)


TOKENS = pytest.mark.parametrize("tokens", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@TOKENS
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.03, 0.3, 1.0])
def test_noise_of_any_size_gives_no_hint(tokens, noise):
    assert hints(pair_of(forced(RECORD, tokens), forced(RECORD + noise * NOISE, tokens))) == ()


@TOKENS
@pytest.mark.parametrize("shift", [-1.5, 0.2])
def test_a_shift_of_all_logits_gives_no_hint(tokens, shift):
    assert (
        hints(pair_of(forced(RECORD, tokens), forced(RECORD + shift + 0.03 * NOISE, tokens))) == ()
    )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.1, 1.5])
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_temperature_on_one_side_is_one_scale_of_greedy_logprobs(temperature, side):
    plain = forced(RECORD, GREEDY)
    scaled = forced((RECORD + 0.02 * NOISE) / temperature, GREEDY)
    sides = (scaled, plain) if side == "baseline" else (plain, scaled)
    (hint,) = hints(pair_of(*sides))
    assert "one scale explains" in hint
    assert "a temperature may be on one side only" in hint


def audit_of(tokens, record, **runs) -> FakeAudit:
    """Runs with every statistic but `imported`, which has logprobs alone."""
    support = draw_support(record, np.random.default_rng(1))
    sequences = make_sequences(
        tokens.reshape(COUNT, LENGTH), support.reshape(COUNT, LENGTH, -1), source="imported"
    )
    tables = {}
    for name, logits in {"record": record, **runs}.items():
        columns = statistics(logits, tokens, support)
        if name == "imported":
            columns = {"logprob": columns["logprob"]}
        tables[name] = run_table(sequences, columns)
    infos = {name: {} if name == "imported" else run_info(name) for name in tables}
    return FakeAudit(sequences=sequences, tables=tables, infos=infos, sampling={})


def told(data: FakeAudit, baseline: str, candidate: str) -> list[str]:
    source = AuditSource(data)
    return list(hints(reduced(source.pair_rows(baseline, candidate))))


@TOKENS
@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 0.97, 1.03, 1.1, 1.5])
def test_a_temperature_of_an_import_is_found_from_the_other_sides_distribution(tokens, temperature):
    data = audit_of(tokens, RECORD, imported=(RECORD + 0.005 * NOISE) / temperature)
    for names in (("imported", "record"), ("record", "imported")):
        (hint,) = told(data, *names)
        found = float(hint.partition("temperature of about ")[2].split(",")[0])
        assert found == pytest.approx(temperature, rel=0.03)
        assert hint.startswith("the logprobs of imported are those of record at")


@TOKENS
def test_a_temperature_on_the_baseline_is_found_by_any_run_with_a_support(tokens):
    noisy = RECORD + 0.01 * NOISE
    data = audit_of(tokens, RECORD, b=noisy, imported=RECORD / 0.7)
    (hint,) = told(data, "imported", "b")
    assert hint.startswith("the logprobs of imported are those of b at a temperature of about 0.70")


@TOKENS
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.03, 0.3, 1.0])
def test_noise_is_no_temperature(tokens, noise):
    data = audit_of(tokens, RECORD, imported=RECORD + noise * NOISE, b=RECORD - noise * NOISE)
    for names in (("imported", "record"), ("record", "b"), ("imported", "b")):
        assert told(data, *names) == []


@TOKENS
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_same_temperature_on_both_sides_gives_no_hint(tokens, temperature):
    a, b = (forced(x / temperature, tokens) for x in (RECORD, RECORD + 0.05 * NOISE))
    assert hints(pair_of(a, b)) == ()


def rolled(values: np.ndarray, by: int) -> np.ndarray:
    """Entry t becomes that of token t + by; the end is filled with an ordinary logprob."""
    moved = np.full_like(values, -1.0)
    if by > 0:
        moved[:, :-by] = values[:, by:]
    else:
        moved[:, -by:] = values[:, :by]
    return moved


@TOKENS
@pytest.mark.parametrize(("by", "word"), [(1, "next"), (-1, "previous")])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_logprobs_shifted_by_one_are_told_with_the_direction(tokens, by, word, noise):
    own = forced(RECORD, tokens)
    (hint,) = hints(pair_of(own, rolled(forced(RECORD + noise * NOISE, tokens), by)))
    assert (
        f"the logprobs of b look shifted by one: they correlate with record's of the {word}" in hint
    )


@TOKENS
def test_shifted_and_at_another_temperature_is_still_told_as_shifted(tokens):
    (hint,) = hints(pair_of(forced(RECORD, tokens), rolled(forced(RECORD / 0.8, tokens), 1)))
    assert "shifted by one" in hint


@TOKENS
def test_a_shift_by_two_or_unrelated_numbers_are_no_shift_by_one(tokens):
    own = forced(RECORD, tokens)
    other = forced(RECORD, tokens)[::-1]
    for given in (rolled(own, 2), rolled(own, -2), other):
        assert not any("shifted" in hint for hint in hints(pair_of(own, given)))


def test_few_tokens_tell_nothing():
    own = forced(RECORD, SAMPLED)[:1, :12]
    assert hints(pair_of(own, rolled(own, 1))) == ()
    assert hints(pair_of(own, own * 1.4)) == ()


def test_masked_tokens_are_no_neighbours():
    own = forced(RECORD, SAMPLED)
    mask = np.zeros(LENGTH, dtype=bool)
    mask[::2] = True
    masks = dict.fromkeys(range(COUNT), mask)
    assert hints(pair_of(own, rolled(own, 1), masks=masks)) == ()


@pytest.mark.parametrize("value", [0.0, -1.0, -1e-9])
@pytest.mark.parametrize("side", [0, 1])
def test_a_constant_logprob_is_told(value, side):
    sides = [forced(RECORD, SAMPLED), forced(RECORD, SAMPLED)]
    sides[side] = np.full((COUNT, LENGTH), value)
    found = hints(pair_of(*sides))
    name = ("record", "b")[side]
    assert any(hint.startswith(f"logprob of {name} is ") for hint in found)
    assert not any(hint.startswith(f"logprob of {('b', 'record')[side]} is ") for hint in found)


@pytest.mark.parametrize("column", ["entropy", "logsumexp", "log_tail_mass"])
def test_another_constant_column_is_told(column):
    data = model_audit(
        {"record": RECORD[:, :60], "b": (RECORD + 0.01 * NOISE)[:, :60]}, length=LENGTH
    )
    plain = compare(AuditSource(data), "record", "b").summary
    assert plain.warnings == ()
    table = data.tables["b"]
    index = table.schema.get_field_index(column)
    constant = np.full(table.num_rows, -0.5, dtype=np.float32)
    data.tables["b"] = table.set_column(index, table.schema.field(index), [constant])
    (hint,) = compare(AuditSource(data), "record", "b").summary.warnings
    assert hint.startswith(f"{column} of b is -0.5 at every token")


@pytest.mark.parametrize("value", [0.03, 0.125, 1e-6])
def test_a_positive_logprob_is_told(value):
    own = forced(RECORD, SAMPLED)
    given = own.copy()
    given[2, 5] = value
    found = hints(pair_of(own, given))
    assert any(hint.startswith("1 logprobs of b are positive") for hint in found)


def test_confident_tokens_of_logprob_zero_are_nothing_to_tell():
    own = forced(RECORD, GREEDY)
    given = np.where(np.arange(LENGTH) % 2 == 0, 0.0, own)
    assert hints(pair_of(np.where(np.arange(LENGTH) % 2 == 0, -0.0, own), given)) == ()
