from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.diff.synthetic import run_table
from tests.diff.test_compare import audit, one, run
from trace_audit.diff.compare import Comparison
from trace_audit.diff.save import diff_tables, save_comparison
from trace_audit.errors import AuditDirError


def diff_table(comparison: Comparison) -> pa.Table:
    return pa.concat_tables(diff_tables(comparison))


def test_a_row_per_scored_token_with_both_sides() -> None:
    comparison = one(audit(), "noisy")
    table = diff_table(comparison)
    assert table.num_rows == len(comparison.pair)
    delta = table["delta"].to_numpy()
    assert delta.dtype == np.float64
    np.testing.assert_array_equal(delta, comparison.pair.delta)
    stored = table["candidate_logprob"].to_numpy().astype(np.float64)
    np.testing.assert_array_equal(delta, stored - table["baseline_logprob"].to_numpy())
    changes = comparison.changes
    assert changes is not None
    np.testing.assert_array_equal(table["flip"].to_numpy(), changes.flip)
    assert table["kl_contribution"].null_count == 0
    assert table["baseline_top1"].to_pylist() == comparison.pair.token_id.tolist()


def test_what_a_run_lacks_is_null_and_what_is_not_finite_stays() -> None:
    data = audit()
    values = data.tables["record"]["logprob"].to_numpy().copy()
    values[3] = np.nan
    data.tables["imported"] = run_table(data.sequences, {"logprob": values})
    table = diff_table(one(data, "imported"))
    for name in ("flip", "margin", "candidate_rank", "candidate_top1", "kl_contribution"):
        assert table[name].null_count == table.num_rows, name
    assert np.isnan(table["delta"].to_numpy()[3])
    assert table["delta"].null_count == 0
    assert table["baseline_rank"].null_count == 0


def test_files_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    _, done = run(audit(), "noisy")
    for text in ("{}\n", '{"a": 1}\n'):
        save_comparison(tmp_path / "diffs", done[0], text)
    names = sorted(path.name for path in (tmp_path / "diffs").iterdir())
    assert names == ["noisy-vs-record.json", "noisy-vs-record.parquet"]
    assert (tmp_path / "diffs" / names[0]).read_text() == '{"a": 1}\n'
    assert pq.read_table(tmp_path / "diffs" / names[1]).equals(diff_table(done[0]))


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    _, done = run(audit(), "noisy")
    (tmp_path / "diffs").write_text("a file in the way")
    with pytest.raises(AuditDirError, match="cannot be written") as caught:
        save_comparison(tmp_path / "diffs", done[0], "{}")
    assert caught.value.hint is not None
    assert "--no-save" in caught.value.hint
