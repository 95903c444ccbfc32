"""Statistics kept on the device while requests run, and brought back in bulk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.engine.batch import LogitsRow
from trace_audit.engine.full_logprobs import FullLogprobs
from trace_audit.engine.model_runner import StepOutput
from trace_audit.engine.request import PHASES, Request, RequestOutput
from trace_audit.engine.token_statistics import unpacked

ExpertIds: TypeAlias = npt.NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Where one committed token came from."""

    request_id: str
    position: int
    launch_tokens: int
    launch_requests: int
    chunk_start: int
    phase: int


class OutputBuffer:
    """Collects committed rows step by step; `collect` is the only place that waits."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._steps: list[torch.Tensor] = []
        self._expert_ids: list[torch.Tensor] = []
        self._full = FullLogprobs(0)
        self._vocabulary_size = 0

    def start(self, max_full_logprobs: int) -> None:
        """Begin a run that keeps at most so many whole distributions."""
        self._full = FullLogprobs(max_full_logprobs)

    def add(self, output: StepOutput) -> None:
        """Keep the committed rows of a launch."""
        batch = output.batch
        if not output.committed:
            return
        if output.expert_ids is not None:  # on every rank, of its own layers
            self._expert_ids.append(output.expert_ids[output.committed_rows])
        if output.statistics is None:
            return
        assert output.logits is not None
        self._vocabulary_size = output.logits.shape[1]
        for index in output.committed:
            row = batch.rows[index]
            self._rows.append(
                _Row(
                    request_id=row.request.request_id,
                    position=row.position + 1,
                    launch_tokens=batch.num_tokens,
                    launch_requests=batch.num_requests,
                    chunk_start=row.scheduled.chunk_start,
                    phase=PHASES.index(row.scheduled.phase),
                )
            )
            if row.request.full_logprobs is not None:
                self._add_full(row, output.logits[index], output.statistics[index])
        every_row = len(output.committed) == len(output.tokens)
        self._steps.append(
            output.statistics if every_row else output.statistics[output.committed_rows]
        )

    def _add_full(self, row: LogitsRow, logits: torch.Tensor, statistics: torch.Tensor) -> None:
        """Keep a row's whole distribution if it is wanted at the row's step."""
        assert row.request.full_logprobs is not None
        priority = float(row.request.full_logprobs[row.step])
        if self._full.wants(priority):
            logsumexp = unpacked(statistics[None])["logsumexp"][0]
            self._full.keep(row.request.request_id, row.step, priority, logits, logsumexp)

    def collect_expert_ids(self) -> ExpertIds | None:
        """Bring what this rank's routers chose to the host, and empty that part of the buffer.

        Returns:
            uint16 [N, L, k] of the N committed rows in order, which are the same on every rank;
            None where this rank has no router.
        """
        if not self._expert_ids:
            return None
        found = torch.cat(self._expert_ids).cpu().numpy().astype(np.uint16)
        self._expert_ids = []
        return found

    def collect(
        self, requests: list[Request], expert_ids: ExpertIds | None = None
    ) -> list[RequestOutput]:
        """Bring everything to the host, one output a request, and empty the buffer.

        Args:
            requests: all that ran.
            expert_ids: of the committed rows, uint16 [N, L, k] of all layers; None without any.
        """
        rows = torch.cat(self._steps).cpu()
        columns = {name: column.numpy() for name, column in unpacked(rows).items()}
        if expert_ids is None:
            expert_ids = np.zeros((len(self._rows), 0, 0), dtype=np.uint16)
        columns["expert_ids"] = expert_ids
        rows_of: dict[str, list[int]] = {r.request_id: [] for r in requests}
        for i, row in enumerate(self._rows):
            rows_of[row.request_id].append(i)
        outputs = [self._output(r, columns, np.array(rows_of[r.request_id])) for r in requests]
        self._rows, self._steps = [], []
        return outputs

    def _output(
        self,
        request: Request,
        columns: dict[str, npt.NDArray[np.generic]],
        index: npt.NDArray[np.int64],
    ) -> RequestOutput:
        rows = [self._rows[i] for i in index]

        def ints(name: str) -> npt.NDArray[np.int32]:
            return np.array([getattr(row, name) for row in rows], dtype=np.int32)

        assert request.finish_reason is not None
        full_steps, full_rows = self._full.collect(request.request_id, self._vocabulary_size)
        values = {name: column[index] for name, column in columns.items()}
        return RequestOutput(
            request_id=request.request_id,
            finish_reason=request.finish_reason,
            position=ints("position"),
            launch_tokens=ints("launch_tokens"),
            launch_requests=ints("launch_requests"),
            chunk_start=ints("chunk_start"),
            phase=ints("phase").astype(np.int8),
            full_logprob_steps=full_steps,
            full_logprobs=full_rows,
            **values,  # type: ignore[arg-type]
        )
