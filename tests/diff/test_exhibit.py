from __future__ import annotations

import math

import numpy as np
import pytest

from tests.diff.synthetic import PROMPT_LENGTH, FakeAudit, logprob_pair
from tests.diff.test_compare import LENGTH, audit, logits
from trace_audit.diff import exhibit as exhibit_module
from trace_audit.diff.compare import Comparison, compare
from trace_audit.diff.exhibit import Exhibit, exhibit
from trace_audit.diff.sequences import choose_sequences, sums_of_abs_delta, window
from trace_audit.diff.source import AuditSource


def made(data: FakeAudit, *names: str, **options: int | None) -> list[Exhibit]:
    source = AuditSource(data)  # type: ignore[arg-type]
    comparisons: list[Comparison] = [compare(source, "record", name) for name in names]
    shared = len(comparisons)
    return [exhibit(source, one, page_comparisons=shared, **options) for one in comparisons]  # type: ignore[arg-type]


def test_the_worst_by_summed_delta_come_first_then_the_first_of_the_trace() -> None:
    pair = logprob_pair(np.zeros((4, 2)), [[0.1, 0], [0, 0], [-3, 3], [1, 1]])
    assert sums_of_abs_delta(pair).tolist() == pytest.approx([0.1, 0, 6, 2])
    assert choose_sequences(pair, 4) == [(2, "worst"), (3, "worst"), (0, "worst")]
    assert choose_sequences(pair, 2) == [(2, "worst"), (0, "first")]
    assert choose_sequences(pair, 1) == [(2, "worst")]


def test_without_differences_only_the_first_is_shown() -> None:
    pair = logprob_pair(np.zeros((3, 2)), np.zeros((3, 2)))
    assert choose_sequences(pair, 3) == [(0, "first")]


def test_a_non_finite_row_makes_its_sequence_the_worst() -> None:
    pair = logprob_pair(np.zeros((3, 2)), [[5, 5], [0, 0], [0, math.nan]])
    assert choose_sequences(pair, 2)[0] == (2, "worst")


def test_the_window_holds_the_largest_sum() -> None:
    size = np.array([0.0, 1.0, 5.0, 5.0, 0.0, 9.0])
    assert window(size, 2) == (2, 4)
    assert window(size, 1) == (5, 6)
    assert window(size, 6) == (0, 6)
    assert window(np.zeros(5), 2) == (0, 2)


def test_tokens_carry_both_sides_and_the_texts() -> None:
    data = audit()
    data.texts[int(data.sequences[0].output_token_ids[0])] = b"line\n"
    (shown,) = made(data, "noisy")
    assert len(shown.sequences) == 8
    assert shown.left_out == 0
    first = next(s for s in shown.sequences if s.index == 0)
    assert [t.step for t in first.tokens] == list(range(LENGTH))
    assert first.prompt == " w0 w1 w2 w3 w4"
    token = first.tokens[0]
    assert (token.text, token.ends_line) == ("line\\n", True)
    assert token.diff is not None
    assert token.diff.place.position == PROMPT_LENGTH
    assert len(token.diff.baseline_top) == len(token.diff.candidate_top) == 5
    assert (token.diff.before, token.diff.after) == ("", "")


def test_masked_tokens_have_text_but_no_numbers() -> None:
    mask = np.ones(LENGTH, dtype=np.bool_)
    mask[3] = False
    data = audit()
    data.sequences[0] = data.sequences[0].__class__(
        **{**vars(data.sequences[0]), "score_mask": mask}
    )
    (shown,) = made(data, "noisy")
    tokens = next(s for s in shown.sequences if s.index == 0).tokens
    assert [t.step for t in tokens if t.diff is None] == [3]


def test_a_long_sequence_is_cut_to_where_it_differs_most() -> None:
    (shown,) = made(audit(), "noisy", num_sequences=1, max_steps=4)
    (sequence,) = shown.sequences
    assert len(sequence.tokens) == 4
    assert sequence.output_tokens == LENGTH
    assert shown.left_out == 7


def test_many_candidates_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhibit_module, "TOKEN_BUDGET", 5 * LENGTH)
    data = audit(third=logits(0.3))
    assert [len(e.sequences) for e in made(data, "noisy", "third")] == [2, 2]
    # What was asked for by number is given.
    assert [len(e.sequences) for e in made(data, "noisy", "third", num_sequences=6)] == [6, 6]
    monkeypatch.setattr(exhibit_module, "TOKEN_BUDGET", 1)
    assert [len(e.sequences) for e in made(data, "noisy", "third")] == [1, 1]


def test_bitwise_pairs_show_no_sequence() -> None:
    (shown,) = made(audit(same=logits(0)), "same")
    assert shown.sequences == ()
    assert shown.histogram.zero == 8 * LENGTH


def test_every_token_of_the_summary_has_its_sequence() -> None:
    data = audit()
    (shown,) = made(data, "noisy", num_sequences=1)
    for name, index in shown.sequence_indices.items():
        assert data.sequences[index].sequence_id == name
