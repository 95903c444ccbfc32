"""The exact check: whole distributions at some positions of a record, exact KL of replays there.

Where the record keeps them is a hash of (seed, sequence index, step): of all scored positions
those of smallest hash, so they are spread over the trace by its lengths, whatever these turn out to
be, and neither shards nor batches nor an interruption can move them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.engine.draws import uniforms
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.engine.token_statistics import SUPPORT_TAIL_DRAWS
from trace_audit.errors import RunFailedError
from trace_audit.full_kl import full_kl
from trace_audit.storage.exact_files import (
    EXACT_KL_NAME,
    FULL_LOGPROBS_NAME,
    FullLogprobsFile,
    exact_kl_table,
    full_logprobs_table,
    logprob_rows,
    write_exact_kl,
    write_full_logprobs,
)
from trace_audit.storage.run_files import Attachments
from trace_audit.storage.schema import EXACT_KL_SCHEMA
from trace_audit.storage.shards import ShardWriter
from trace_audit.storage.tables import read_table

_POSITION_DRAW = SUPPORT_TAIL_DRAWS + 1  # after the draws of the tail and of sampling

Attach = Callable[[Path], object]


class ExactCheck(Protocol):
    """What a run does about the exact check; `run_shards` asks it once a shard."""

    def prepare(self, requests: Sequence[Request]) -> int:
        """Say in a shard's requests what is wanted of them; returns the most rows to keep."""

    def attach(self, outputs: Sequence[RequestOutput], sequence_indices: Sequence[int]) -> Attach:
        """What writes the shard's part beside its rows."""


class ExactRecorder:
    """Keeps the record run's whole distributions at some positions.

    A shard keeps those of its own positions that may still be among the chosen ones: at most
    `count`, and fewer and fewer from shard to shard.

    Args:
        count: positions wanted, at least 1.
        seed: of the record.
        masks: sequence index -> bool [T], false where a token is not scored.
        writer: of the record; shards that it has already are taken into account.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        masks: Mapping[int, NDArray[np.bool_]],
        writer: ShardWriter,
    ) -> None:
        self._count = count
        self._seed = seed
        self._masks = masks
        self._writer = writer
        self._smallest = np.empty(0)
        for number in sorted(writer.finished_shards):
            file = FullLogprobsFile(writer.attachment(number))
            self._observe(self._priorities(file.sequence_index, file.step))

    def prepare(self, requests: Sequence[Request]) -> int:
        """See `ExactCheck`."""
        known = len(self._smallest) == self._count
        bound = self._smallest[-1] if known else np.inf
        for request in requests:
            steps = np.arange(request.params.max_tokens)
            priority = self._priorities(np.full(len(steps), request.index), steps)
            priority[priority > bound] = np.inf
            mask = self._masks.get(request.index)
            if mask is not None:
                priority[~mask] = np.inf
            request.full_logprobs = priority
        return self._count

    def attach(self, outputs: Sequence[RequestOutput], sequence_indices: Sequence[int]) -> Attach:
        """See `ExactCheck`."""
        pairs = list(zip(outputs, sequence_indices, strict=True))
        for output, index in pairs:
            steps = output.full_logprob_steps
            self._observe(self._priorities(np.full(len(steps), index), steps))
        return partial(write_full_logprobs, tables=_full_tables(pairs), metadata={})

    def attachments(self, num_scored: int) -> tuple[int, Attachments]:
        """What the finished record keeps: the number of positions, and what writes their file.

        Args:
            num_scored: scored tokens of the trace.

        Raises:
            RunFailedError: the shards do not hold what must be kept.
        """
        files = [
            FullLogprobsFile(self._writer.attachment(number))
            for number in range(self._writer.num_shards)
        ]
        priorities = [self._priorities(file.sequence_index, file.step) for file in files]
        found = np.sort(np.concatenate(priorities))[: self._count]
        if len(found) != min(self._count, num_scored):
            raise RunFailedError(
                f"{len(found)} whole distributions were kept, not {min(self._count, num_scored)}",
                hint="this is a bug: please report it with the configuration",
            )

        def write(path: Path, metadata: Mapping[str, str]) -> None:
            write_full_logprobs(path, _chosen_tables(files, priorities, found[-1]), metadata)

        return len(found), {FULL_LOGPROBS_NAME: write}

    def _priorities(
        self, sequence_index: NDArray[np.integer], step: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        return position_priorities(self._seed, sequence_index, step)

    def _observe(self, priorities: NDArray[np.float64]) -> None:
        self._smallest = np.sort(np.concatenate([self._smallest, priorities]))[: self._count]


class ExactReplayer:
    """Scores a replay against the record's whole distributions.

    Args:
        reference: the record's.
    """

    def __init__(self, reference: FullLogprobsFile) -> None:
        self._reference = reference

    def prepare(self, requests: Sequence[Request]) -> int:
        """See `ExactCheck`."""
        total = 0
        for request in requests:
            steps = self._reference.step[self._reference.sequence_index == request.index]
            request.full_logprobs = np.full(request.params.max_tokens, np.inf)
            request.full_logprobs[steps] = 0.0
            total += len(steps)
        return total

    def attach(self, outputs: Sequence[RequestOutput], sequence_indices: Sequence[int]) -> Attach:
        """See `ExactCheck`."""
        ours = dict(zip(sequence_indices, outputs, strict=True))
        wanted = np.isin(self._reference.sequence_index, np.array(sequence_indices))
        tables = [EXACT_KL_SCHEMA.empty_table()]
        for rows, table in self._reference.read(wanted):
            index, step = self._reference.sequence_index[rows], self._reference.step[rows]
            reference = logprob_rows(table)
            scored = np.stack([_row(ours[i], s) for i, s in zip(index, step, strict=True)])
            tables.append(
                exact_kl_table(index, step, full_kl(reference, scored), full_kl(scored, reference))
            )
        return partial(write_exact_kl, tables=tables, metadata={})


def exact_kl_attachments(writer: ShardWriter) -> Attachments:
    """What the finished replay keeps: its shards' exact KL in one file."""

    def write(path: Path, metadata: Mapping[str, str]) -> None:
        shards = range(writer.num_shards)
        tables = [read_table(writer.attachment(n), EXACT_KL_SCHEMA)[0] for n in shards]
        write_exact_kl(path, tables, metadata)

    return {EXACT_KL_NAME: write}


def position_priorities(
    seed: int, sequence_index: NDArray[np.integer], step: NDArray[np.integer]
) -> NDArray[np.float64]:
    """What decides between positions, the smallest first: float64 [n] in [0, 1)."""
    seeds = np.full(len(step), seed, dtype=np.int64)
    return uniforms(seeds, sequence_index, step, _POSITION_DRAW + 1)[:, _POSITION_DRAW]


def _full_tables(pairs: Sequence[tuple[RequestOutput, int]]) -> Iterator[pa.Table]:
    for output, index in pairs:
        steps = output.full_logprob_steps
        if len(steps):
            indices = np.full(len(steps), index, dtype=np.int32)
            yield full_logprobs_table(indices, steps, output.full_logprobs)


def _chosen_tables(
    files: Sequence[FullLogprobsFile], priorities: Sequence[NDArray[np.float64]], largest: float
) -> Iterator[pa.Table]:
    for file, priority in zip(files, priorities, strict=True):
        for _, table in file.read(priority <= largest):
            yield table


def _row(output: RequestOutput, step: int) -> NDArray[np.float32]:
    at = int(np.searchsorted(output.full_logprob_steps, step))
    assert output.full_logprob_steps[at] == step
    row: NDArray[np.float32] = output.full_logprobs[at]
    return row
