"""A real audit of two sequences, written without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.record_writer import RecordInfo, TracePrompt, start_record
from trace_audit.storage.schema import NUM_SUPPORT, NUM_TOP, SHARD_SCHEMA

PROMPTS = {"alpha": [1, 2], "beta": [3]}
OUTPUTS = {"alpha": [4, 5, 6], "beta": [7, 8]}
VOCABULARY_SIZE = 30


def make_audit(path: Path, *, model_path: str = "nowhere") -> AuditDir:
    """Record two sequences, `alpha` and `beta`."""
    info = RecordInfo(
        model="tiny",
        model_path=model_path,
        model_revision=None,
        model_fingerprint="f" * 64,
        tokenizer_fingerprint=None,
        prompts_sha256="0" * 64,
        vocabulary_size=VOCABULARY_SIZE,
        tokenizer_size=None,
        seed=0,
        sampling={"temperature": 0.0},
    )
    prompts = [
        TracePrompt(
            sequence_id=name,
            group_id=name,
            prompt_token_ids=np.array(ids, dtype=np.int32),
            source="greedy",
        )
        for name, ids in PROMPTS.items()
    ]
    with start_record(path, job_digest="job", num_shards=1, force=False) as writer:
        write_rows(writer)
        return writer.finish(
            info,
            prompts,
            token_bytes=[bytes([65 + i]) for i in range(VOCABULARY_SIZE)],
            special=[False] * VOCABULARY_SIZE,
            run_info=run_info("float32", "eager"),
        )


def add_run(audit: AuditDir, name: str, **more: Any) -> None:
    """Add a complete run."""
    with audit.run_writer(name, job_digest="job", num_shards=1, force=False) as writer:
        write_rows(writer)
        writer.finish({**run_info("bfloat16", "sdpa"), **more})


def interrupt_run(audit: AuditDir, name: str) -> None:
    """Leave a run with one of its two shards finished."""
    with audit.run_writer(name, job_digest="job", num_shards=2, force=False) as writer:
        write_rows(writer)


def write_rows(writer: Any) -> None:
    """Write the only shard, both sequences in it."""
    writer.write_shard(
        0,
        _rows(),
        counters={"sequences": 2, "tokens": 5},
        finish_reasons=["length", "length"],
        engine_seconds=0.5,
    )


def run_info(dtype: str, backend: str) -> dict[str, Any]:
    """What run.json says besides what the writer adds."""
    engine = {"dtype": dtype, "attention_backend": backend, "device": "cpu"}
    return {
        "resolved_config": {"name": "x", "engine": engine},
        "timing": {"tokens_per_second": 10.0, "engine_seconds": 0.5},
    }


def _rows() -> pa.Table:
    rows = [
        {
            "sequence_index": index,
            "sequence_id": name,
            "step": step,
            "position": len(PROMPTS[name]) + step,
            "phase": "decode" if step else "prefill",
            "token_id": token,
            "logprob": -0.5,
            "rank": 1,
            "tie_count": 0,
            "top_token_ids": [token, 20, 21, 22, 23],
            "top_logprobs": [-0.5, -2.0, -3.0, -4.0, -5.0],
            "entropy": 1.0,
            "logsumexp": 2.0,
            "support_logprobs": [-0.5] * NUM_SUPPORT,
            "log_tail_mass": -3.0,
            "logits_hash": 7,
            "launch_tokens": 2,
            "launch_requests": 2,
            "chunk_start": 0,
            "support_token_ids": list(range(NUM_SUPPORT)),
        }
        for index, (name, tokens) in enumerate(OUTPUTS.items())
        for step, token in enumerate(tokens)
    ]
    assert len(rows[0]["top_token_ids"]) == NUM_TOP  # type: ignore[arg-type]
    return pa.Table.from_pylist(rows, schema=SHARD_SCHEMA)
