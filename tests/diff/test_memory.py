"""What a comparison holds: scalars of each token, and a batch of everything else."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from tests.diff.synthetic import FakeAudit, model_audit
from trace_audit.diff import align, batches, flips, pair_rows
from trace_audit.diff.compare import compare
from trace_audit.diff.source import AuditSource

LENGTH = 64
# Two runs' float64 support and its ids alone are 480 bytes a token; docs/architecture.md counts
# what is kept. The rest is what an average over all tokens makes and drops.
KEPT_BYTES, PEAK_BYTES = 52, 150


def audit(sequences: int) -> FakeAudit:
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2.5, (sequences * LENGTH, 40))
    noisy = record + generator.normal(0, 0.1, record.shape)
    # As many groups whatever the tokens: draws of groups take memory of their own.
    groups = [f"g{i % 8}" for i in range(sequences)]
    return model_audit({"record": record, "noisy": noisy}, length=LENGTH, groups=groups)


def peak(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that are still held when the work is done, and at most."""
    gc.collect()
    tracemalloc.start()
    held = work()
    found = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    return found


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_TOKENS", 4 * LENGTH)
    monkeypatch.setattr(pair_rows, "PIECE", 4 * LENGTH)
    monkeypatch.setattr(flips, "CHUNK", 4 * LENGTH)
    # A number of rows that does not grow with the trace.
    monkeypatch.setattr(align, "_SPREAD_ROWS", 64)


@pytest.mark.usefixtures("small_batches")
def test_memory_grows_by_scalars_of_a_token() -> None:
    tokens, kept, most, whole = [], [], [], []
    for sequences in (64, 320):
        source = AuditSource(audit(sequences))  # type: ignore[arg-type]
        rows = source.pair_rows("record", "noisy")
        tokens.append(sequences * LENGTH)
        for values, found in zip((kept, most), peak(lambda r=rows: align.reduced(r)), strict=True):  # type: ignore[misc]
            values.append(found)
        whole.append(peak(lambda s=source: compare(s, "record", "noisy"))[1])  # type: ignore[misc]
    added = tokens[1] - tokens[0]
    assert (kept[1] - kept[0]) / added < KEPT_BYTES
    # Batches do not add up: the peak grows as what is kept does.
    assert (most[1] - most[0]) / added < 1.1 * KEPT_BYTES
    assert (whole[1] - whole[0]) / added < PEAK_BYTES


@pytest.mark.usefixtures("small_batches")
def test_no_more_than_a_batch_and_the_next_have_their_support_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: set[int] = set()
    most = made = 0
    original = batches.AlignedBatch

    def counted(**values: object) -> batches.AlignedBatch:
        nonlocal most, made
        batch = original(**values)  # type: ignore[arg-type]
        support = batch.candidate.support_logprobs
        assert support is not None
        made += 1
        alive.add(made)
        weakref.finalize(support, alive.discard, made)
        most = max(most, len(alive))
        return batch

    monkeypatch.setattr(batches, "AlignedBatch", counted)
    source = AuditSource(audit(80))  # type: ignore[arg-type]
    align.reduced(source.pair_rows("record", "noisy"))
    assert made == 20
    # One is worked on, one is read ahead, and one may wait to be dropped.
    assert most <= 3
