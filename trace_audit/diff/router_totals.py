"""Where the routers of a pair chose other experts, gathered a batch at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import NO_EXPERT
from trace_audit.diff.moments import Moments
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.routing import RunRouting

ExpertIds = NDArray[np.uint16]


class RouterTotals:
    """Choices of N tokens in L layers with a router.

    Attributes:
        routing: The routers of both runs.
        num_chosen: Experts that a router chooses.
        changed: Layers whose set of experts differs, of each token: uint16 [N].
        by_layer: Of each layer, whether it differs.
        replaced: Of each token, the share of the baseline's choices that the candidate's lack.
    """

    def __init__(self, routing: RunRouting, num_rows: int, num_groups: int) -> None:
        """Of no tokens yet."""
        self.routing = routing
        self.num_chosen = 0
        self.changed = np.zeros(num_rows, dtype=np.uint16)
        self.by_layer = [Moments(num_groups) for _ in routing.layers]
        self.replaced = Moments(num_groups)

    def add(self, rows: slice, a: ExpertIds, b: ExpertIds, group: NDArray[np.integer]) -> None:
        """Adds tokens.

        Args:
            rows: Where they are among the N.
            a, b: Ids of the baseline's and the candidate's experts: uint16 [n, L, k].
            group: int [n].
        """
        self.num_chosen = a.shape[2]
        # Ids are stored ascending, so equal sets are equal rows.
        differs = (a != b).any(axis=2)
        self.changed[rows] = differs.sum(axis=1)
        for moments, events in zip(self.by_layer, differs.T, strict=True):
            moments.add(events, group)
        lost = np.zeros(differs.shape)
        lost[differs] = num_lost(a[differs], b[differs])
        self.replaced.add(lost.sum(axis=1) / (a.shape[1] * a.shape[2]), group)


class RouterCollector:
    """Fills :class:`RouterTotals`."""

    def __init__(self, rows: PairRows) -> None:
        """Of no rows yet."""
        routing = pair_routing(rows)
        self._found: RouterTotals | str | None
        self._found = (
            routing
            if not isinstance(routing, RunRouting)
            else (RouterTotals(routing, len(rows), len(rows.group_ids)))
        )

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        if not isinstance(self._found, RouterTotals):
            return
        a, b = batch.baseline.expert_ids, batch.candidate.expert_ids
        assert a is not None
        assert b is not None
        layers = len(self._found.routing.layers)
        if a.shape != b.shape or a.shape[1] % layers:
            self._found = "the two runs' routers do not choose as many experts"
        elif (a == NO_EXPERT).any() or (b == NO_EXPERT).any():
            self._found = "a run has rows without expert choices"
        else:
            shape = (len(batch), layers, -1)
            self._found.add(batch.rows, a.reshape(shape), b.reshape(shape), batch.group)

    def result(self) -> RouterTotals | str | None:
        """Of all rows; why there is nothing, or None where neither model has routers."""
        return self._found


def pair_routing(rows: PairRows) -> RunRouting | str | None:
    """The routers of both runs; why they cannot be compared, or None where neither has any."""
    runs = (rows.baseline_run, rows.candidate_run)
    if all(run.routing is None for run in runs):
        return None
    for run in runs:
        if isinstance(run.routing, str):
            return f"run {run.name!r} stores no expert choices: {run.routing}"
        if run.routing is None or "expert_ids" not in run.columns:
            return f"run {run.name!r} stores no expert choices"
    if runs[0].routing != runs[1].routing:
        return "the two runs' models do not have the same routers"
    return runs[0].routing


def num_lost(a: ExpertIds, b: ExpertIds) -> NDArray[np.int64]:
    """How many of each row's ids the other set lacks: int64 [m].

    Args:
        a, b: uint16 [m, k], the ids of a row distinct.
    """
    lost: NDArray[np.int64] = (a[:, :, None] != b[:, None, :]).all(axis=2).sum(axis=1)
    return lost
