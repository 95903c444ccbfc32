"""Mean |delta| by kind of token, summed up a batch at a time."""

from __future__ import annotations

import numpy as np

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.moments import LabelledMoments
from trace_audit.diff.pair_rows import PairRows

SLICE_EDGES = (0.5, 0.9, 0.99, 0.999)
# Most tokens of a trace are predicted with confidence, so the upper end is cut finer.
BUCKET_EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)


class LabelMeans:
    """|delta| of the finite rows by what the runs say of a token.

    Attributes:
        phase: By index into ``PHASES`` of the candidate; None if it does not say.
        launch: By k, 2^(k-1) < tokens of the candidate's launch <= 2^k; None if it does not say.
        confidence: By the bin of ``SLICE_EDGES`` that the baseline's probability of its own best
            token is in; None if it does not have one.
        buckets: The same by ``BUCKET_EDGES``.
    """

    def __init__(self, rows: PairRows) -> None:
        """Of no rows yet."""
        groups, columns = len(rows.group_ids), rows.candidate_run.columns
        launch = {"launch_tokens", "launch_requests", "chunk_start"}
        best = "top_logprobs" in rows.baseline_run.columns
        self.phase = LabelledMoments(groups) if "phase" in columns else None
        self.launch = LabelledMoments(groups) if columns >= launch else None
        self.confidence = LabelledMoments(groups) if best else None
        self.buckets = LabelledMoments(groups) if best else None

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        finite = batch.finite
        size, group = np.abs(batch.delta[finite]), batch.group[finite]
        if self.phase is not None and batch.candidate.phase is not None:
            self.phase.add(batch.candidate.phase[finite], size, group)
        if self.launch is not None and batch.candidate.launch is not None:
            tokens = batch.candidate.launch[finite, 0]
            power = np.where(np.isnan(tokens), -1, np.ceil(np.log2(np.maximum(tokens, 1))))
            self.launch.add(power.astype(np.int64), size, group)
        top = batch.baseline.top_logprobs
        if self.confidence is None or self.buckets is None or top is None or not top.shape[1]:
            return
        best = top[finite, 0].astype(np.float64)
        confidence = np.exp(best)
        found = np.searchsorted(SLICE_EDGES, confidence, side="right")
        self.confidence.add(np.where(np.isnan(best), -1, found), size, group)
        found = np.searchsorted(BUCKET_EDGES[1:-1], confidence, side="right")
        self.buckets.add(np.where(np.isfinite(best), found, -1), size, group)
