"""A column that some runs have: read where it is, missed nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.storage.build import (
    COUNTERS,
    NUM_SEQUENCES,
    RUN_INFO,
    SHARDS,
    make_audit,
    make_run,
    shard_table,
)
from trace_audit.errors import AuditDirError, InvalidComparisonError
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.schema import OPTIONAL_FIELDS, TOKENS_SCHEMA
from trace_audit.storage.tables import read_table, write_table

(EXPERT_IDS,) = OPTIONAL_FIELDS
WIDTH = 6


def with_experts(table: pa.Table) -> pa.Table:
    rng = np.random.default_rng(len(table))
    ids = np.sort(rng.integers(0, 65_535, (len(table), WIDTH)).astype(np.uint16), axis=1)
    return table.append_column(EXPERT_IDS, pa.array(list(ids), EXPERT_IDS.type))


def make_routed_run(audit: AuditDir, name: str, *, without: int | None = None) -> Path:
    """A run with the column, `without` it in one shard."""
    how = {"job_digest": name, "num_shards": len(SHARDS), "force": False}
    with audit.run_writer(name, **how) as writer:
        for index, sequences in enumerate(SHARDS):
            table = shard_table(sequences)
            writer.write_shard(
                index,
                table if index == without else with_experts(table),
                counters=COUNTERS,
                finish_reasons=["stop"] * len(sequences),
            )
        return writer.finish(RUN_INFO)


def test_a_run_with_it_stands_beside_runs_without(tmp_path: Path) -> None:
    audit = make_audit(tmp_path / "audit")
    make_run(audit, "dense")
    path = make_routed_run(audit, "routed") / "tokens.parquet"
    table = audit.read_tokens("routed")
    assert table.schema.equals(TOKENS_SCHEMA.append(EXPERT_IDS))
    stored = with_experts_by_shard()
    assert table["expert_ids"].to_pylist() == stored["expert_ids"].to_pylist()
    assert audit.open_tokens("routed").column_names == (*TOKENS_SCHEMA.names, "expert_ids")
    (piece,) = audit.open_tokens("routed").slices([range(2, 4)], ["expert_ids"])
    assert piece["expert_ids"].to_pylist() == stored["expert_ids"].to_pylist()[2:4]
    for name in ("record", "dense"):
        assert audit.read_tokens(name).schema.equals(TOKENS_SCHEMA)
        assert audit.open_tokens(name).column_names == tuple(TOKENS_SCHEMA.names)
    assert audit.verify() == []
    group = pq.ParquetFile(path).metadata.row_group(0)
    last = group.column(group.num_columns - 1)
    assert last.path_in_schema == "expert_ids.list.element"
    assert "DELTA_BINARY_PACKED" in last.encodings
    again = make_routed_run(audit, "again") / "tokens.parquet"
    assert again.read_bytes() == path.read_bytes()


def with_experts_by_shard() -> pa.Table:
    return pa.concat_tables([with_experts(shard_table(sequences)) for sequences in SHARDS])


@pytest.mark.parametrize("without", [0, len(SHARDS) - 1])
def test_a_run_has_it_in_every_shard_or_in_none(tmp_path: Path, without: int) -> None:
    audit = make_audit(tmp_path / "audit")
    with pytest.raises(ValueError, match="expert_ids"):
        make_routed_run(audit, "mixed", without=without)
    with pytest.raises((AuditDirError, InvalidComparisonError)):
        audit.open_tokens("mixed")


def test_it_is_refused_where_nobody_expects_it(tmp_path: Path) -> None:
    table = with_experts(shard_table(range(NUM_SEQUENCES)).select(TOKENS_SCHEMA.names))
    with pytest.raises(ValueError, match="unknown: \\['expert_ids'\\]"):
        write_table(tmp_path / "x", TOKENS_SCHEMA, [table], {})
    write_table(tmp_path / "y", TOKENS_SCHEMA, [table], {}, optional=OPTIONAL_FIELDS)
    with pytest.raises(AuditDirError, match="does not have the columns"):
        read_table(tmp_path / "y", TOKENS_SCHEMA)
    read = read_table(tmp_path / "y", TOKENS_SCHEMA, optional=OPTIONAL_FIELDS)[0]
    assert read["expert_ids"].equals(table["expert_ids"])
