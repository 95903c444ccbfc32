"""A record's whole distributions: the room they take is told and checked before any is kept."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trace_audit.config import distribution_of
from trace_audit.engine.kv_memory import available_memory
from trace_audit.engine.request import Request
from trace_audit.errors import UsageError
from trace_audit.exact_positions import ExactRecorder
from trace_audit.jobs import Message, RecordJob, Stage
from trace_audit.shard_loop import Emit
from trace_audit.storage.run_files import Attachments
from trace_audit.storage.shards import ShardWriter

Masks = Mapping[int, NDArray[np.bool_]]

_MEMORY_SHARE = 0.5  # of the free memory, for the rows that a shard keeps


def check_exact_scoring(job: RecordJob) -> None:
    """Refuse whole distributions beside statistics of other ones; asked before a model is loaded.

    Raises:
        UsageError: statistics are of processed logits.
    """
    if job.exact_positions and not distribution_of(job.config.scoring).is_raw:
        raise UsageError(
            "--exact-positions keeps the model's own distributions, and scoring.mode is processed",
            hint='record with scoring.mode = "raw", or without --exact-positions',
        )


def start_exact(
    job: RecordJob,
    requests: Sequence[Request],
    masks: Masks,
    writer: ShardWriter,
    vocabulary_size: int,
    emit: Emit,
) -> ExactRecorder | None:
    """What keeps whole distributions, if any are wanted; the user is told how much it is.

    Args:
        job: what was asked for.
        requests: of the whole record.
        masks: sequence index -> bool [T], false where a token is not scored.
        writer: of the record.
        vocabulary_size: ids a distribution.
        emit: told.

    Raises:
        UsageError: there is no room for them.
    """
    if not job.exact_positions:
        return None
    said = check_exact_size(
        job.exact_positions,
        vocabulary_size=vocabulary_size,
        most_tokens=sum(r.params.max_tokens for r in requests) - _num_masked(masks),
        num_shards=writer.num_shards,
        output=job.output,
    )
    emit(Stage(said))
    return ExactRecorder(job.exact_positions, seed=job.seed, masks=masks, writer=writer)


def finish_exact(
    exact: ExactRecorder | None, job: RecordJob, masks: Masks, writer: ShardWriter, emit: Emit
) -> tuple[int, Attachments]:
    """How many whole distributions the finished record keeps, and what writes them."""
    if exact is None:
        return 0, {}
    count, attachments = exact.attachments(writer.finished_tokens - _num_masked(masks))
    if count < job.exact_positions:
        emit(
            Message(
                f"The trace has {count:,} scored tokens, fewer than --exact-positions "
                f"{job.exact_positions:,}: whole distributions are kept at all of them."
            )
        )
    return count, attachments


def check_exact_size(
    count: int, *, vocabulary_size: int, most_tokens: int, num_shards: int, output: Path
) -> str:
    """Refuse what neither memory nor disk would hold; says how much it is.

    Args:
        count: positions wanted.
        vocabulary_size: ids a position.
        most_tokens: the most scored tokens that the trace can have.
        num_shards: of the record.
        output: the audit directory.

    Returns:
        A phrase for the user.

    Raises:
        UsageError: there is no room for it.
    """
    rows = min(count, most_tokens)
    row_bytes = 4 * vocabulary_size
    # A shard keeps what may still be chosen: all in all count (1 + ln shards), and then the rest.
    copies = 2 + math.log(num_shards)
    limits = {
        "memory": available_memory() * _MEMORY_SHARE,
        "disk space": shutil.disk_usage(_existing(output)).free / copies,
    }
    what, room = min(limits.items(), key=lambda item: item[1])
    if rows * row_bytes > room:
        raise UsageError(
            f"--exact-positions {count} keeps {rows:,} x {vocabulary_size:,} x 4 bytes = "
            f"{_size(rows * row_bytes)}, and the {what} holds {_size(room)}",
            hint=f"give --exact-positions {int(room) // row_bytes} or fewer; 512 are plenty",
        )
    return (
        f"keeping whole distributions at up to {rows:,} positions: {rows:,} x "
        f"{vocabulary_size:,} x 4 bytes = {_size(rows * row_bytes)}"
    )


def _num_masked(masks: Masks) -> int:
    return sum(int((~mask).sum()) for mask in masks.values())


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"
