"""Readers hand out what was written, and nothing that does not match."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.storage.build import (
    LENGTHS,
    NUM_SEQUENCES,
    RUN_INFO,
    SHARDS,
    TOKEN_BYTES,
    VOCABULARY,
    make_audit,
    make_run,
    open_record,
    prompts,
    record_info,
    sequence_id,
    shard_table,
    write_shards,
)
from trace_audit.errors import AuditDirError, InvalidComparisonError, RunFailedError
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.files import file_entry, sealed
from trace_audit.storage.imported import ImportedSequence, imported_tokens
from trace_audit.storage.schema import FORMAT_VERSION, TOKENS_SCHEMA
from trace_audit.storage.shards import plan_shards
from trace_audit.storage.tables import write_table
from trace_audit.storage.trace import TOKEN_COLUMNS, TraceSequence, trace_digest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    audit = make_audit(tmp_path_factory.mktemp("made") / "audit")
    make_run(audit, "other")
    make_run(audit, "x")
    return audit.path


@pytest.fixture
def audit(made: Path, tmp_path: Path) -> AuditDir:
    shutil.copytree(made, tmp_path / "audit")
    return AuditDir.open(tmp_path / "audit")


def bits(column: pa.ChunkedArray) -> list[object]:
    """Values of a column, floats by their bits: NaN equals itself and 0.0 is not -0.0."""
    if pa.types.is_list(column.type):
        return [None if v is None else bits(pa.chunked_array([v])) for v in _values(column)]
    if pa.types.is_floating(column.type):
        return [None if v is None else np.float32(v).tobytes() for v in column.to_pylist()]
    values: list[object] = column.to_pylist()
    return values


def _values(column: pa.ChunkedArray) -> list[pa.Array | None]:
    return [value.values if value.is_valid else None for value in column]


def test_every_value_survives_nan_infinities_and_nulls_included(audit: AuditDir) -> None:
    expected = shard_table(range(NUM_SEQUENCES), seed=1)
    table = audit.read_tokens("x")
    assert table.schema.equals(TOKENS_SCHEMA)
    for name in TOKENS_SCHEMA.names:
        assert bits(table[name]) == bits(expected[name]), name
    assert np.isnan(table["logprob"][0].as_py())
    assert table["rank"].null_count == NUM_SEQUENCES


def test_the_file_is_what_the_format_says(audit: AuditDir) -> None:
    file = pq.ParquetFile(audit.path / "runs" / "x" / "tokens.parquet")
    assert file.metadata.metadata == {
        b"format_version": str(FORMAT_VERSION).encode(),
        b"trace_sha256": audit.info.trace_sha256.encode(),
    }
    assert file.num_row_groups == len(SHARDS)
    rows = [sum(LENGTHS[i] for i in shard) for shard in SHARDS]
    assert [file.metadata.row_group(i).num_rows for i in range(len(SHARDS))] == rows
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.schema_arrow.names == TOKENS_SCHEMA.names


def test_chunks_and_dictionaries_do_not_reach_the_file(tmp_path: Path) -> None:
    table = shard_table([0, 1, 2]).select(TOKENS_SCHEMA.names)
    chunked = pa.concat_tables([table.slice(i, 1) for i in range(table.num_rows)])
    phase = pa.array(table["phase"].to_pylist(), pa.string())
    codes = pa.array([["verify", "decode", "prefill"].index(p.as_py()) for p in phase], pa.int32())
    other = pa.DictionaryArray.from_arrays(codes, pa.array(["verify", "decode", "prefill"]))
    recoded = table.set_column(4, TOKENS_SCHEMA.field("phase"), other)
    for name, value in {"a": table, "b": chunked, "c": recoded}.items():
        write_table(tmp_path / name, TOKENS_SCHEMA, [value], {})
    files = [(tmp_path / name).read_bytes() for name in "abc"]
    assert files[0] == files[1] == files[2]


def test_the_trace_comes_back(audit: AuditDir) -> None:
    sequences = audit.read_trace()
    rows = shard_table(range(NUM_SEQUENCES))
    for i, (sequence, prompt) in enumerate(zip(sequences, prompts(), strict=True)):
        mine = rows.filter(pa.compute.equal(rows["sequence_index"], i))
        assert sequence.sequence_id == sequence_id(i)
        assert sequence.group_id == prompt.group_id
        assert sequence.source == prompt.source
        assert sequence.finish_reason == ("stop" if i % 2 else "length")
        assert sequence.prompt_token_ids.dtype == np.int32
        assert sequence.prompt_token_ids.tolist() == prompt.prompt_token_ids.tolist()
        assert sequence.output_token_ids.tolist() == mine["token_id"].to_pylist()
        assert sequence.support_token_ids.tolist() == mine["support_token_ids"].to_pylist()
        if prompt.score_mask is None:
            assert sequence.score_mask is None
        else:
            assert sequence.score_mask is not None
            assert sequence.score_mask.tolist() == prompt.score_mask.tolist()
    assert audit.info.num_output_tokens == sum(LENGTHS)
    assert trace_digest(sequences) == audit.info.trace_sha256


def test_the_tokens_of_the_trace_are_those_of_its_sequences(audit: AuditDir) -> None:
    found = list(audit.open_trace().tokens())
    for tokens, sequence in zip(found, audit.read_trace(), strict=True):
        for name in TOKEN_COLUMNS:
            np.testing.assert_array_equal(getattr(tokens, name), getattr(sequence, name))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "id": lambda s: s.update(sequence_id="other"),
    "group": lambda s: s.update(group_id="other"),
    "prompt": lambda s: s["prompt_token_ids"].__setitem__(0, 9),
    "output": lambda s: s["output_token_ids"].__setitem__(0, 9),
    "no mask": lambda s: s.update(score_mask=None),
    "mask": lambda s: s["score_mask"].__setitem__(0, False),
    "support": lambda s: s["support_token_ids"].__setitem__((1, 3), 9),
    "boundary": lambda s: s.update(
        prompt_token_ids=s["prompt_token_ids"][:-1],
        output_token_ids=s["output_token_ids"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_tells_every_part(change: str) -> None:
    def made() -> dict[str, Any]:
        return {
            "sequence_id": "a",
            "group_id": "a",
            "prompt_token_ids": np.arange(3, dtype=np.int32),
            "output_token_ids": np.arange(2, dtype=np.int32),
            "score_mask": np.array([True, True]),
            "finish_reason": "stop",
            "source": "greedy",
            "support_token_ids": np.zeros((2, 24), dtype=np.int32),
        }

    changed = made()
    CHANGES[change](changed)
    before, after = (trace_digest([TraceSequence(**s)]) for s in (made(), changed))
    assert before != after
    assert before == trace_digest([TraceSequence(**made())])


def test_the_vocabulary_comes_back(audit: AuditDir) -> None:
    vocabulary = audit.vocabulary()
    assert vocabulary.size == VOCABULARY
    assert [vocabulary.token_bytes(i) for i in range(VOCABULARY)] == TOKEN_BYTES
    assert [i for i in range(VOCABULARY) if vocabulary.is_special(i)] == [2]
    for outside in (-1, VOCABULARY):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            vocabulary.token_bytes(outside)


def test_runs_are_listed_record_first_and_only_when_complete(audit: AuditDir) -> None:
    (audit.path / "runs" / "aaa").mkdir()
    with audit.run_writer("unfinished", job_digest="d", num_shards=4, force=False) as writer:
        write_shards(writer, [0])
    assert audit.run_names() == ["record", "other", "x"]
    with pytest.raises(AuditDirError, match="no run 'unfinished'") as interrupted:
        audit.run_info("unfinished")
    assert interrupted.value.hint is not None
    assert "interrupted" in interrupted.value.hint
    with pytest.raises(AuditDirError, match="no run 'othr'") as typo:
        audit.read_tokens("othr")
    assert typo.value.hint == "Did you mean 'other'?"


def edit_json(path: Path, **changes: object) -> None:
    value = {**json.loads(path.read_text()), **changes}
    value.pop("sha256")
    path.write_text(json.dumps(sealed(value)))


def rewrite_tokens(audit: AuditDir, table: pa.Table, metadata: dict[str, str]) -> None:
    """Puts other rows in place of a run's, with a manifest that agrees with them."""
    path = audit.path / "runs" / "x" / "tokens.parquet"
    write_table(path, table.schema, [table], metadata)
    edit_json(path.with_name("run.json"), files={"tokens.parquet": file_entry(path)})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_in_every_file(audit: AuditDir) -> None:
    assert audit.verify() == []
    files = ["trace.parquet", "vocabulary.parquet", "runs/x/tokens.parquet"]
    for i, name in enumerate(files, start=1):
        flip(audit.path / name)
        problems = audit.verify()
        assert len(problems) == i
        assert sum(name in problem and "sha256" in problem for problem in problems) == 1


def test_a_truncated_or_missing_file(audit: AuditDir) -> None:
    path = audit.path / "runs" / "x" / "tokens.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AuditDirError, match="bytes, not the"):
        audit.read_tokens("x")
    path.unlink()
    with pytest.raises(AuditDirError, match="no such file"):
        audit.read_tokens("x")


def test_rows_of_another_trace(audit: AuditDir) -> None:
    table = audit.read_tokens("x")
    rewrite_tokens(audit, table, {"format_version": "1", "trace_sha256": "f" * 64})
    with pytest.raises(InvalidComparisonError, match="scored another trace"):
        audit.read_tokens("x")


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 0, 1]])
def test_rows_out_of_order_or_twice(audit: AuditDir, order: list[int]) -> None:
    table = audit.read_tokens("x").take(order)
    rewrite_tokens(audit, table, {"format_version": "1", "trace_sha256": audit.info.trace_sha256})
    with pytest.raises(AuditDirError, match="not in order"):
        audit.read_tokens("x")


def test_other_columns(audit: AuditDir) -> None:
    table = audit.read_tokens("x").drop_columns(["rank"])
    rewrite_tokens(audit, table, {"format_version": "1", "trace_sha256": audit.info.trace_sha256})
    with pytest.raises(AuditDirError, match="does not have the columns"):
        audit.read_tokens("x")


def test_a_newer_format_is_refused_wherever_it_is_stated(audit: AuditDir) -> None:
    table, newer = audit.read_tokens("x"), FORMAT_VERSION + 1
    stated = {"format_version": str(newer), "trace_sha256": audit.info.trace_sha256}
    rewrite_tokens(audit, table, stated)
    with pytest.raises(AuditDirError, match=rf"tokens.parquet has format version {newer}"):
        audit.read_tokens("x")
    edit_json(audit.path / "runs" / "x" / "run.json", format_version=newer)
    with pytest.raises(AuditDirError, match=rf"run.json has format version {newer}"):
        audit.run_info("x")
    edit_json(audit.path / "audit.json", format_version=newer, a_new_key=1)
    said = rf"format version {newer}; .* reads up to {FORMAT_VERSION}"
    with pytest.raises(AuditDirError, match=said) as caught:
        AuditDir.open(audit.path)
    assert caught.value.hint is not None
    assert "newer trace-audit" in caught.value.hint


@pytest.mark.parametrize("version", [0, True, None, "x", 1.0])
def test_a_version_that_is_none(audit: AuditDir, version: object) -> None:
    edit_json(audit.path / "audit.json", format_version=version)
    with pytest.raises(AuditDirError, match="does not state its format version"):
        AuditDir.open(audit.path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_damaged_manifest(audit: AuditDir, text: str) -> None:
    (audit.path / "audit.json").write_text(text, encoding="latin-1")
    with pytest.raises(AuditDirError, match="damaged"):
        AuditDir.open(audit.path)


def test_a_manifest_that_lacks_a_key_or_has_another(audit: AuditDir) -> None:
    edit_json(audit.path / "audit.json", surprise=1)
    with pytest.raises(AuditDirError, match="keys missing or unknown: surprise"):
        AuditDir.open(audit.path)


def test_a_run_that_does_not_say_it_is_complete(audit: AuditDir) -> None:
    edit_json(audit.path / "runs" / "x" / "run.json", complete=False)
    with pytest.raises(AuditDirError, match="complete"):
        audit.read_tokens("x")


def test_a_trace_of_another_audit(audit: AuditDir, tmp_path: Path) -> None:
    edit_json(audit.path / "audit.json", trace_sha256="f" * 64)
    with pytest.raises(AuditDirError, match=r"not the trace that audit\.json names"):
        AuditDir.open(audit.path).read_trace()


def test_what_is_no_audit(tmp_path: Path) -> None:
    with pytest.raises(AuditDirError, match="There is no audit directory") as caught:
        AuditDir.open(tmp_path / "none")
    assert caught.value.hint is not None
    assert "record" in caught.value.hint
    with pytest.raises(AuditDirError, match=r"it has no audit.json"):
        AuditDir.open(tmp_path)
    (tmp_path / "audit.json").write_text('{"auditReportVersion": 2}')
    with pytest.raises(AuditDirError, match="was not written by trace-audit"):
        AuditDir.open(tmp_path)


def test_an_imported_run(tmp_path: Path) -> None:
    trace = prompts()[2]
    ids = shard_table([2])["token_id"].to_pylist()
    logprobs = [-0.1, -1e-30, 0.125, -200.0, -3.0]
    table = imported_tokens(
        [
            ImportedSequence(
                sequence_index=2,
                sequence_id=trace.sequence_id,
                prompt_length=len(trace.prompt_token_ids),
                token_ids=ids,
                logprobs=logprobs,
            )
        ]
    )
    with open_record(tmp_path / "a") as writer:
        write_shards(writer, range(len(SHARDS)))
        writer.add_imported_run(table, {"subset": [trace.sequence_id]})
        audit = writer.finish(
            record_info(),
            prompts(),
            token_bytes=TOKEN_BYTES,
            special=[False] * VOCABULARY,
            run_info=RUN_INFO,
        )
    assert audit.run_names() == ["record", "imported"]
    read = audit.read_tokens("imported")
    assert read["logprob"].to_pylist() == np.array(logprobs, np.float32).tolist()
    assert read["position"].to_pylist() == [5, 6, 7, 8, 9]
    present = {"sequence_index", "sequence_id", "step", "position", "token_id", "logprob"}
    assert {n for n in read.column_names if not read[n].null_count} == present
    assert {n for n in read.column_names if read[n].null_count == 5} == (
        set(read.column_names) - present
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("token_id", 63, "another token"),
        ("position", 9, "another token, position"),
        ("sequence_id", "else", "another token, position or id"),
        ("step", 40, "came back with 2 rows"),
    ],
)
def test_a_replay_that_is_not_the_trace_does_not_finish(
    audit: AuditDir, column: str, value: object, message: str
) -> None:
    table = shard_table(range(NUM_SEQUENCES))
    values = table[column].to_pylist()
    values[-1] = value
    index = table.schema.get_field_index(column)
    field = table.schema.field(column)
    table = table.set_column(index, field, pa.array(values, field.type))
    with audit.run_writer("bad", job_digest="d", num_shards=1, force=False) as writer:
        writer.write_shard(0, table, counters={}, finish_reasons=["stop"] * NUM_SEQUENCES)
        with pytest.raises(RunFailedError, match=message):
            writer.finish(RUN_INFO)
    assert "bad" not in audit.run_names()


def test_a_truncated_replay_does_not_finish(audit: AuditDir) -> None:
    rows = shard_table(range(NUM_SEQUENCES)).slice(0, sum(LENGTHS) - 1)
    with audit.run_writer("short", job_digest="d", num_shards=1, force=False) as writer:
        writer.write_shard(0, rows, counters={}, finish_reasons=["stop"] * NUM_SEQUENCES)
        with pytest.raises(RunFailedError, match="came back with 1 rows; its trace has 2 tokens"):
            writer.finish(RUN_INFO)


def test_a_token_that_is_not_scored_may_be_absent(audit: AuditDir) -> None:
    rows = shard_table([2])
    rows = rows.filter(pa.compute.not_equal(rows["step"], 1))
    with audit.run_writer("sub", job_digest="d", num_shards=1, force=False) as writer:
        writer.write_shard(0, rows, counters={}, finish_reasons=["stop"])
        writer.finish({"subset": [sequence_id(2)]})
    assert audit.read_tokens("sub").num_rows == 4


def test_a_subset_is_declared(audit: AuditDir) -> None:
    for name, info in {"whole": {}, "sub": {"subset": [sequence_id(1)]}}.items():
        with audit.run_writer(name, job_digest="d", num_shards=1, force=False) as writer:
            writer.write_shard(0, shard_table([1]), counters={}, finish_reasons=["stop"])
            if name == "whole":
                with pytest.raises(RunFailedError, match="rows of 1 sequences, 7 were"):
                    writer.finish(info)
            else:
                writer.finish(info)
    assert audit.run_info("sub")["subset"] == [sequence_id(1)]


def test_rows_that_are_not_the_prompts_do_not_become_a_trace(tmp_path: Path) -> None:
    with open_record(tmp_path / "a") as writer:
        write_shards(writer, range(len(SHARDS)))
        arguments: dict[str, Any] = {
            "token_bytes": TOKEN_BYTES,
            "special": [False] * VOCABULARY,
            "run_info": RUN_INFO,
        }
        swapped = [prompts()[1], prompts()[0], *prompts()[2:]]
        with pytest.raises(RunFailedError, match="not those of its prompt"):
            writer.finish(record_info(), swapped, **arguments)
        with pytest.raises(RunFailedError, match="does not continue the trace"):
            writer.finish(record_info(), prompts()[:-1], **arguments)
        with pytest.raises(ValueError, match="a row an id"):
            writer.finish(record_info(), prompts(), **{**arguments, "special": [True]})
    with pytest.raises(AuditDirError, match="interrupted"):
        AuditDir.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("sequences", "size", "expected"),
    [
        (7, 2, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (4, 2, [(0, 2), (2, 4)]),
        (1, 99, [(0, 1)]),
    ],
)
def test_shards_are_fixed_groups(
    sequences: int, size: int, expected: list[tuple[int, int]]
) -> None:
    assert [(s.start, s.stop) for s in plan_shards(sequences, size)] == expected
