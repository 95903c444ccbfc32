"""Small audits with every kind of value in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.record_writer import RecordInfo, RecordWriter, TracePrompt, start_record
from trace_audit.storage.schema import NUM_SUPPORT, NUM_TOP, SHARD_SCHEMA
from trace_audit.storage.shards import ShardWriter, plan_shards

NUM_SEQUENCES = 7
SHARD_SIZE = 2
VOCABULARY = 64
SHARDS = plan_shards(NUM_SEQUENCES, SHARD_SIZE)
LENGTHS = [3, 1, 5, 2, 4, 6, 2]
RUN_INFO: dict[str, Any] = {"model": "tiny", "timing": {"engine_seconds": 1.5}}
TOKEN_BYTES = [b"\xf0\x9f"] + [f" t{i}".encode() for i in range(1, VOCABULARY)]
SPECIAL = [i == 2 for i in range(VOCABULARY)]
COUNTERS = {"tokens": 10, "steps": 3}


def sequence_id(index: int) -> str:
    return f"seq {index} é"


def prompts() -> list[TracePrompt]:
    return [
        TracePrompt(
            sequence_id=sequence_id(i),
            group_id=f"group {i // 2}",
            prompt_token_ids=np.arange(3 + i, dtype=np.int32),
            score_mask=np.array([True, False, True, True, True]) if i == 2 else None,
            source="imported" if i == 2 else "greedy",
        )
        for i in range(NUM_SEQUENCES)
    ]


def shard_table(indices: Iterable[int], seed: int = 0) -> pa.Table:
    """A shard's rows; NaN, infinities and nulls are among them."""
    return pa.concat_tables([_sequence_table(index, seed) for index in indices])


def _sequence_table(index: int, seed: int) -> pa.Table:
    length = LENGTHS[index]
    tokens = np.random.default_rng(index).integers(0, VOCABULARY, length)
    rng = np.random.default_rng([seed, index])
    floats = rng.normal(size=(length, 4)).astype(np.float32)
    floats[0, :3] = [np.nan, np.inf, -np.inf]
    support = rng.normal(size=(length, NUM_SUPPORT)).tolist()
    support[0][:4] = [None, float("nan"), float("-inf"), float("inf")]
    support_ids = np.random.default_rng(index + 100).integers(0, VOCABULARY, (length, NUM_SUPPORT))
    support_ids[0, 0] = -1
    nullable = [None if step == 0 else int(step) for step in range(length)]
    columns: dict[str, Any] = {
        "sequence_index": [index] * length,
        "sequence_id": [sequence_id(index)] * length,
        "step": range(length),
        "position": [3 + index + step for step in range(length)],
        "phase": ["prefill"] + ["decode"] * (length - 1),
        "token_id": tokens,
        "logprob": floats[:, 0],
        "rank": nullable,
        "tie_count": nullable,
        "top_token_ids": rng.integers(0, VOCABULARY, (length, NUM_TOP)).tolist(),
        "top_logprobs": rng.normal(size=(length, NUM_TOP)).tolist(),
        "entropy": floats[:, 1],
        "logsumexp": floats[:, 2],
        "support_logprobs": support,
        "log_tail_mass": floats[:, 3],
        "logits_hash": rng.integers(-(2**63), 2**63, length, dtype=np.int64),
        "launch_tokens": rng.integers(1, 99, length),
        "launch_requests": rng.integers(1, 99, length),
        "chunk_start": rng.integers(0, 99, length),
        "support_token_ids": support_ids.tolist(),
    }
    arrays = [pa.array(columns[field.name], type=field.type) for field in SHARD_SCHEMA]
    return pa.table(arrays, schema=SHARD_SCHEMA)


def write_shards(writer: ShardWriter, indices: Iterable[int], seed: int = 0) -> None:
    for index in indices:
        sequences = SHARDS[index]
        writer.write_shard(
            index,
            shard_table(sequences, seed),
            counters=COUNTERS,
            finish_reasons=["stop" if i % 2 else "length" for i in sequences],
            engine_seconds=0.25,
        )


def missing(writer: ShardWriter) -> list[int]:
    return sorted(set(range(len(SHARDS))) - writer.finished_shards)


def record_info(model: str = "tiny") -> RecordInfo:
    return RecordInfo(
        model=model,
        model_path="/models/tiny",
        model_revision=None,
        model_fingerprint="m" * 64,
        tokenizer_fingerprint=None,
        prompts_sha256="p" * 64,
        vocabulary_size=VOCABULARY,
        tokenizer_size=None,
        seed=0,
        sampling={"temperature": 0.0, "max_tokens": 8},
    )


def open_record(path: Path, digest: str = "a", force: bool = False) -> RecordWriter:
    return start_record(path, job_digest=digest, num_shards=len(SHARDS), force=force)


def finish_record(writer: RecordWriter, model: str = "tiny") -> AuditDir:
    return writer.finish(
        record_info(model), prompts(), token_bytes=TOKEN_BYTES, special=SPECIAL, run_info=RUN_INFO
    )


def make_audit(path: Path, *, digest: str = "a", force: bool = False, seed: int = 0) -> AuditDir:
    with open_record(path, digest, force) as writer:
        write_shards(writer, missing(writer), seed)
        return finish_record(writer)


def make_run(audit: AuditDir, name: str, *, force: bool = False, seed: int = 1) -> Path:
    digest = f"seed {seed}"
    with audit.run_writer(name, job_digest=digest, num_shards=len(SHARDS), force=force) as writer:
        write_shards(writer, missing(writer), seed)
        return writer.finish(RUN_INFO)


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory, with its bytes."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
