"""`diff report` on an audit of many rows: seconds, CPU seconds and peak resident memory.

Usage: python -m benchmarks.report_scale DIR [--sequences 10000] [--tokens 1000] [--runs 3]

Makes an audit of two runs in DIR/audit unless it is there already: a float32 record and a bfloat16
candidate, every column filled, logits with noise of bfloat16's size and rounded to it. Then runs
`trace-audit diff report` in fresh processes and prints a line each; DIR/report_scale.json has all
numbers. Files that were just read come from the system's cache, so the disk is not measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.storage.audit_dir import AuditInfo
from trace_audit.storage.files import file_entry, sealed, write_json
from trace_audit.storage.run_files import build_run
from trace_audit.storage.schema import (
    FORMAT_VERSION,
    NUM_SUPPORT,
    NUM_TOP,
    SUPPORT_TOP_K,
    TOKENS_SCHEMA,
    TRACE_SCHEMA,
    VOCABULARY_SCHEMA,
)
from trace_audit.storage.tables import write_table
from trace_audit.storage.trace import TraceSequence, trace_digest, trace_table
from trace_audit.storage.vocabulary import vocabulary_table

VOCABULARY = 151_936
PROMPT_TOKENS = 128
SHARD_SEQUENCES = 256
INTERVAL = VOCABULARY // NUM_SUPPORT
TOP_LOGIT = 20.0
NOISE = 0.03

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Logits of a shard's rows at the ids that matter, before and after noise.

    Attributes:
        first: Index of its first sequence.
        ids: int32 [N, 24], distinct in a row: 20 best of the record, then 4 of its tail.
        record, candidate: float32 [N, 24] logits.
        tail: float32 [N], logsumexp of what is outside the 20 best; the same in both runs.
    """

    first: int
    ids: Ids
    record: Floats
    candidate: Floats
    tail: Floats


def make_shard(first: int, rows: int) -> Shard:
    """Rows that are sure of their best token as often as a language model is."""
    generator = np.random.default_rng(first)

    def exponential(*shape: int) -> Floats:
        return generator.standard_exponential(shape, dtype=np.float32)

    steps = exponential(rows, SUPPORT_TOP_K) * np.float32(0.4)
    steps[:, 0] = 0
    steps[:, 1] = exponential(rows) * 2.5
    top = np.float32(TOP_LOGIT) + 2 * exponential(rows)[:, None] - np.cumsum(steps, axis=1)
    draws = top[:, -1:] - exponential(rows, NUM_SUPPORT - SUPPORT_TOP_K)
    logits = np.concatenate([top, draws], axis=1).astype(np.float32)
    noise = generator.standard_normal(logits.shape, dtype=np.float32) * np.float32(NOISE)
    # Each in an interval of its own, so that no id is twice in a row.
    ids = np.arange(NUM_SUPPORT) * INTERVAL + generator.integers(0, INTERVAL, logits.shape)
    ids += generator.integers(0, VOCABULARY, (rows, 1))
    return Shard(
        first=first,
        ids=(ids % VOCABULARY).astype(np.int32),
        record=logits,
        candidate=bfloat16(logits + noise),
        tail=top[:, -1] + np.float32(1.5),
    )


def bfloat16(values: Floats) -> Floats:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def tokens_table(shard: Shard, logits: Floats, tokens: int) -> pa.Table:
    """The rows of a run in `TOKENS_SCHEMA`; the forced token is the record's best."""
    rows = len(logits)
    top, chosen = logits[:, :SUPPORT_TOP_K], logits[:, :1]
    total = np.log(np.exp(top - chosen).sum(axis=1) + np.exp(shard.tail - chosen[:, 0]))
    logsumexp = (total + chosen[:, 0]).astype(np.float32)
    logprobs = logits - logsumexp[:, None]
    best = np.argsort(-top, axis=1, kind="stable")[:, :NUM_TOP]
    sequence = shard.first + np.repeat(np.arange(rows // tokens, dtype=np.int32), tokens)
    step = np.tile(np.arange(tokens, dtype=np.int32), rows // tokens)
    ones = np.ones(rows, dtype=np.int32)
    columns = {
        "sequence_index": sequence,
        "sequence_id": dictionary(sequence - shard.first, shard.first, rows // tokens),
        "step": step,
        "position": PROMPT_TOKENS + step,
        "phase": pa.DictionaryArray.from_arrays(
            pa.array((step > 0).astype(np.int32)), pa.array(["prefill", "decode"])
        ),
        "token_id": shard.ids[:, 0],
        "logprob": logprobs[:, 0],
        "rank": 1 + (top > chosen).sum(axis=1, dtype=np.int32),
        "tie_count": (top == chosen).sum(axis=1, dtype=np.int32) - 1,
        "top_token_ids": lists(np.take_along_axis(shard.ids, best, axis=1)),
        "top_logprobs": lists(np.take_along_axis(logprobs, best, axis=1)),
        "entropy": -(np.exp(logprobs[:, :5]) * logprobs[:, :5]).sum(axis=1),
        "logsumexp": logsumexp,
        "support_logprobs": lists(logprobs),
        "log_tail_mass": shard.tail - logsumexp,
        "logits_hash": (logits.view(np.int32).astype(np.int64) * 2_654_435_761).sum(axis=1),
        "launch_tokens": np.where(step == 0, PROMPT_TOKENS, 32).astype(np.int32),
        "launch_requests": 32 * ones,
        "chunk_start": 0 * ones,
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column) for column in columns.values()
    ]
    return pa.table(dict(zip(columns, arrays, strict=True))).cast(TOKENS_SCHEMA)


def dictionary(rows: Ids, first: int, count: int) -> pa.Array:
    """Sequence ids as strings."""
    names = pa.array([f"prompt-{first + i:06d}" for i in range(count)])
    return pa.DictionaryArray.from_arrays(pa.array(rows), names).cast(pa.string())


def lists(values: NDArray[Any]) -> pa.ListArray:
    """A list a row, all of one width."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))


def sequences(shard: Shard, tokens: int) -> Iterator[TraceSequence]:
    """The trace's part of a shard."""
    for i in range(len(shard.ids) // tokens):
        rows = slice(i * tokens, (i + 1) * tokens)
        name = f"prompt-{shard.first + i:06d}"
        yield TraceSequence(
            sequence_id=name,
            group_id=name,
            prompt_token_ids=np.arange(PROMPT_TOKENS, dtype=np.int32),
            output_token_ids=shard.ids[rows, 0],
            score_mask=None,
            finish_reason="length",
            source="greedy",
            support_token_ids=shard.ids[rows],
        )


def make_audit(path: Path, count: int, tokens: int) -> None:
    """Writes the audit a shard at a time, and audit.json last."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    starts = range(0, count, SHARD_SEQUENCES)

    def shards() -> Iterator[Shard]:
        for first in starts:
            yield make_shard(first, min(SHARD_SEQUENCES, count - first) * tokens)

    # The recorder writes the trace as one table too.
    trace = [sequence for shard in shards() for sequence in sequences(shard, tokens)]
    digest = trace_digest(trace)
    metadata = {"format_version": str(FORMAT_VERSION)}
    write_table(path / "trace.parquet", TRACE_SCHEMA, [trace_table(trace)], metadata)
    del trace
    vocabulary = vocabulary_table([b" w%d" % i for i in range(VOCABULARY)], [False] * VOCABULARY)
    write_table(path / "vocabulary.parquet", VOCABULARY_SCHEMA, [vocabulary], metadata)
    for name, dtype in (("record", "float32"), ("bf16", "bfloat16")):
        side = "record" if name == "record" else "candidate"
        build_run(
            path / "runs" / name,
            name,
            (tokens_table(shard, getattr(shard, side), tokens) for shard in shards()),
            trace_sha256=digest,
            run_info=run_info(name, dtype),
            counters={"tokens": count * tokens},
        )
    info = AuditInfo(
        format_version=FORMAT_VERSION,
        model="synthetic",
        model_path="nowhere",
        model_revision=None,
        model_fingerprint="f" * 64,
        tokenizer_fingerprint=None,
        prompts_sha256="0" * 64,
        vocabulary_size=VOCABULARY,
        tokenizer_size=None,
        trace_sha256=digest,
        num_sequences=count,
        num_output_tokens=count * tokens,
        seed=0,
        sampling={"temperature": 0.0},
        files={n: file_entry(path / n) for n in ("trace.parquet", "vocabulary.parquet")},
    )
    write_json(path / "audit.json", sealed(info.to_json()))


def run_info(name: str, dtype: str) -> dict[str, Any]:
    """What run.json says besides what the writer adds."""
    engine = {"dtype": dtype, "lm_head_dtype": dtype, "attention_backend": "sdpa", "device": "cpu"}
    config = {"name": name, "engine": engine}
    return {
        "model_fingerprint": "f" * 64,
        "environment_fingerprint": "e" * 64,
        "requested_config": config,
        "resolved_config": config,
        "timing": {"engine_seconds": 1.0, "tokens_per_second": 1.0},
    }


def measure(command: list[str]) -> dict[str, float]:
    """Runs a command in a fresh process that is the only child of another one.

    Returns:
        Wall seconds, user and system CPU seconds, and peak resident bytes of the command.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return {
        "wall_seconds": time.perf_counter() - start,
        "user_seconds": usage.ru_utime,
        "system_seconds": usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def main() -> None:
    """Makes the audit, runs the report, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000, help="output tokens a sequence")
    parser.add_argument("--runs", type=int, default=3, help="reports that are measured")
    parser.add_argument("options", nargs="*", help="more arguments of `diff report`, after --")
    arguments = parser.parse_args()
    audit = arguments.directory / "audit"
    if not (audit / "audit.json").exists():
        start = time.perf_counter()
        # In a process of its own: a child's peak counts the memory of the parent it is forked from.
        maker = multiprocessing.get_context("spawn").Process(
            target=make_audit, args=(audit, arguments.sequences, arguments.tokens)
        )
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit(f"making the audit ended with status {maker.exitcode}")
        print(f"made {audit} in {time.perf_counter() - start:.0f} s")
    stored = json.loads((audit / "audit.json").read_text())
    rows = stored["num_output_tokens"]
    output = ["--output", str(arguments.directory / "report.txt")]
    command = [sys.executable, "-m", "trace_audit", "diff", "report", str(audit), *output]
    measured = []
    for _ in range(arguments.runs):
        measured.append(measure([*command, *arguments.options]))
        print("  ".join(f"{key} {value:,.1f}" for key, value in measured[-1].items()), flush=True)
    document = {
        "rows": rows,
        "bytes": sum(path.stat().st_size for path in audit.rglob("*.parquet")),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__}
        | {"pyarrow": pa.__version__},
        "options": arguments.options,
        "runs": measured,
    }
    path = arguments.directory / "report_scale.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{rows:,} rows a run; wrote {path}")


if __name__ == "__main__":
    main()
