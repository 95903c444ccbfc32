"""Synthetic audits: full-vocabulary logits turned into the columns that an engine would store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.diff import run_rows as located
from trace_audit.diff.align import AlignedPair, align
from trace_audit.diff.compare import Comparison
from trace_audit.diff.report_plan import plan_report
from trace_audit.diff.run_rows import RunRows
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import ReportSummary
from trace_audit.diff.trace_index import TraceIndex, trace_index
from trace_audit.storage.schema import (
    NUM_SUPPORT,
    SUPPORT_TAIL_DRAWS,
    SUPPORT_TOP_K,
    TOKENS_SCHEMA,
)
from trace_audit.storage.schema import NUM_TOP as NUM_BEST
from trace_audit.storage.trace import TraceSequence

PROMPT_LENGTH = 5

Logits = NDArray[np.float64]


class FakeVocabulary:
    """Token i is the text " w<i>", unless told otherwise."""

    def __init__(self, texts: Mapping[int, bytes] | None = None) -> None:
        self._texts = texts or {}

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts.get(token_id, f" w{token_id}".encode())


@dataclass(frozen=True)
class TableRows:
    """A run's rows in memory, as a :class:`trace_audit.diff.run_rows.TokenReader`."""

    table: pa.Table

    @property
    def num_rows(self) -> int:
        return len(self.table)

    @property
    def column_names(self) -> list[str]:
        return self.table.column_names

    def slices(self, ranges: Sequence[range], columns: Sequence[str]) -> Iterator[pa.Table]:
        for rows in ranges:
            yield self.table.slice(rows.start, len(rows)).select(columns)

    def pieces(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        yield self.table.select(columns)


@dataclass(frozen=True)
class SequenceList:
    """A trace in memory, as a :class:`trace_audit.diff.trace_index.TraceReader`."""

    trace: Sequence[TraceSequence]

    def tokens(self) -> Iterator[TraceSequence]:
        yield from self.trace

    def support(self, ranges: Sequence[range]) -> Iterator[NDArray[np.int32]]:
        for rows in ranges:
            yield np.concatenate([self.trace[i].support_token_ids for i in rows])

    def prompt(self, index: int) -> NDArray[np.int32]:
        return self.trace[index].prompt_token_ids


@dataclass
class FakeAudit:
    """Has the reading side of an audit directory, in memory."""

    sequences: list[TraceSequence]
    tables: dict[str, pa.Table]
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    sampling: dict[str, object] = field(default_factory=lambda: {"temperature": 0.0})
    path: Path = Path("audit")

    @property
    def info(self) -> Any:
        return SimpleNamespace(
            model="tiny",
            model_fingerprint="m" * 64,
            tokenizer_fingerprint=None,
            trace_sha256="t" * 64,
            prompts_sha256="p" * 64,
            vocabulary_size=60,
            tokenizer_size=58,
            sampling=self.sampling,
        )

    def damaged_run_names(self) -> list[str]:
        return []

    def open_trace(self) -> SequenceList:
        return SequenceList(self.sequences)

    def vocabulary(self) -> FakeVocabulary:
        return FakeVocabulary(self.texts)

    def run_names(self) -> list[str]:
        return list(self.tables)

    def run_info(self, name: str) -> dict[str, Any]:
        return self.infos.get(name, {})

    def open_tokens(self, name: str) -> TableRows:
        return TableRows(self.tables[name])


def compare_all(
    data: FakeAudit, baseline: str, candidates: Sequence[str], **options: Any
) -> tuple[ReportSummary, list[Comparison]]:
    """A report with all of its comparisons kept."""
    plan = plan_report(AuditSource(data), baseline, candidates, **options)  # type: ignore[arg-type]
    comparisons: list[Comparison] = []
    return plan.run(comparisons.append), comparisons


def log_softmax(logits: Logits) -> Logits:
    """[N, V] nats, float64."""
    return logits - logsumexp(logits)[:, None]


def logsumexp(logits: Logits) -> Logits:
    top = logits.max(axis=1)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):  # a row without any mass
        result: Logits = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return result


def best_ids(logits: Logits, count: int) -> NDArray[np.int64]:
    """Best first, the lowest id first among equals: [N, count]."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :count]


def draw_support(
    logits: Logits, generator: np.random.Generator, draws: int = SUPPORT_TAIL_DRAWS
) -> NDArray[np.int64]:
    """Top ids, then independent draws from the tail: [N, 20 + draws]."""
    probabilities = np.exp(log_softmax(logits))
    top = best_ids(logits, SUPPORT_TOP_K)
    np.put_along_axis(probabilities, top, 0.0, axis=1)
    cumulative = np.cumsum(probabilities, axis=1)
    u = generator.random((len(logits), draws)) * cumulative[:, -1:]
    drawn = (cumulative[:, None, :] <= u[:, :, None]).sum(axis=2)
    return np.concatenate([top, drawn], axis=1)


def statistics(
    logits: Logits, tokens: NDArray[np.int64], support: NDArray[np.int64]
) -> dict[str, Any]:
    """The nullable columns of tokens.parquet, computed plainly from [N, V] logits."""
    logprobs = log_softmax(logits)
    chosen = np.take_along_axis(logits, tokens[:, None], axis=1)
    best = best_ids(logits, NUM_BEST)
    tail = logprobs.copy()
    np.put_along_axis(tail, support[:, :SUPPORT_TOP_K], -np.inf, axis=1)
    bits = logits.astype(np.float32).view(np.int32).astype(np.int64)
    # A token of probability zero adds nothing: 0 * -inf would be NaN.
    weighted = np.where(np.isneginf(logprobs), 0.0, np.exp(logprobs) * np.maximum(logprobs, -1e9))
    odd = 2 * np.arange(logits.shape[1], dtype=np.int64) + 1
    return {
        "logprob": np.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0],
        "rank": 1 + (logits > chosen).sum(axis=1),
        "tie_count": (logits == chosen).sum(axis=1) - 1,
        "top_token_ids": best.tolist(),
        "top_logprobs": np.take_along_axis(logprobs, best, axis=1).tolist(),
        "entropy": -weighted.sum(axis=1),
        "logsumexp": logsumexp(logits),
        "support_logprobs": np.take_along_axis(logprobs, support, axis=1).tolist(),
        "log_tail_mass": logsumexp(tail),
        "logits_hash": (bits * odd).sum(axis=1),
    }


def run_table(
    sequences: Sequence[TraceSequence], columns: Mapping[str, Any], **changed: Any
) -> pa.Table:
    """A tokens.parquet of every token; columns not given are null."""
    lengths = [len(s.output_token_ids) for s in sequences]
    index = np.repeat(np.arange(len(sequences)), lengths).astype(np.int64)
    step = np.concatenate([np.arange(length) for length in lengths])
    prompts = np.array([len(s.prompt_token_ids) for s in sequences])
    keys: dict[str, Any] = {
        "sequence_index": index,
        "sequence_id": [sequences[i].sequence_id for i in index.tolist()],
        "step": step,
        "position": prompts[index] + step,
        "token_id": np.concatenate([s.output_token_ids for s in sequences]),
    }
    values = {**keys, **columns, **changed}
    arrays = []
    for column in TOKENS_SCHEMA:
        value = values.get(column.name)
        if value is None:
            arrays.append(pa.nulls(len(index), column.type))
        elif isinstance(value, np.ndarray) and column.type == pa.float32():
            arrays.append(pa.array(value.astype(np.float32), column.type))
        else:
            arrays.append(pa.array(value, column.type))
    return pa.table(arrays, schema=TOKENS_SCHEMA)


def make_sequences(
    tokens: NDArray[np.int64],
    support: NDArray[np.int64] | None = None,
    *,
    source: str = "greedy",
    groups: Sequence[str] | None = None,
    masks: Mapping[int, NDArray[np.bool_]] | None = None,
) -> list[TraceSequence]:
    """Sequences s0, s1, ... from tokens [S, T] and support [S, T, 24] (default: none)."""
    count, length = tokens.shape
    if support is None:
        support = np.full((count, length, NUM_SUPPORT), -1)
    return [
        TraceSequence(
            sequence_id=f"s{i}",
            group_id=f"s{i}" if groups is None else groups[i],
            prompt_token_ids=np.arange(PROMPT_LENGTH, dtype=np.int32),
            output_token_ids=tokens[i].astype(np.int32),
            score_mask=(masks or {}).get(i),
            finish_reason="length",
            source=source,
            support_token_ids=support[i].astype(np.int32),
        )
        for i in range(count)
    ]


def logprob_pair(baseline: Any, candidate: Any, **options: Any) -> AlignedPair:
    """Two runs that have nothing but logprobs [S, T]."""
    a, b = np.atleast_2d(baseline), np.atleast_2d(candidate)
    sequences = make_sequences(np.zeros(a.shape, dtype=np.int64), **options)
    trace = index_of(sequences)
    return align(
        trace,
        run_rows(trace, "record", run_table(sequences, {"logprob": a.ravel()})),
        run_rows(trace, "b", run_table(sequences, {"logprob": b.ravel()})),
    )


def index_of(sequences: Sequence[TraceSequence], **options: Any) -> TraceIndex:
    return trace_index(SequenceList(sequences), **options)


def run_rows(trace: TraceIndex, name: str, table: pa.Table, **options: Any) -> RunRows:
    """A run of a table, located in the trace."""
    return located.run_rows(trace, name, TableRows(table), **options)


def model_audit(
    runs: Mapping[str, Logits], *, length: int, seed: int = 0, **options: Any
) -> FakeAudit:
    """An audit of a greedy trace from full logits [S * length, V] per run; needs "record"."""
    record = runs["record"]
    count = len(record) // length
    support = draw_support(record, np.random.default_rng(seed))
    tokens = best_ids(record, 1)[:, 0]
    sequences = make_sequences(
        tokens.reshape(count, length), support.reshape(count, length, -1), **options
    )
    tables = {
        name: run_table(sequences, statistics(logits, tokens, support))
        for name, logits in runs.items()
    }
    infos = {name: run_info(name) for name in runs}
    return FakeAudit(sequences=sequences, tables=tables, infos=infos)


def run_info(name: str, **engine: object) -> dict[str, Any]:
    """A run.json of a float32 eager run, with changed engine keys."""
    config = {"dtype": "float32", "lm_head_dtype": "float32", "attention_backend": "eager"}
    resolved = {**config, **engine}
    return {
        "model": "tiny",
        "model_fingerprint": "m" * 64,
        "environment_fingerprint": "e" * 64,
        "environment": {"versions": {"torch": "2.13.0"}},
        "requested_config": {"name": name, "engine": dict(resolved)},
        "resolved_config": {"name": name, "engine": resolved},
        "backends": {"attention": str(resolved["attention_backend"])},
        "timing": {"engine_seconds": 1.5, "tokens_per_second": 1000.0},
    }
