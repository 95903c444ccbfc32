"""Sample, overwrite by the trace, and score the forced token from the untouched logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.config import Distribution
from trace_audit.engine import token_statistics as stats
from trace_audit.engine.batch import LogitsRow
from trace_audit.engine.draws import draw_draft_first, draw_ids, uniforms
from trace_audit.engine.request_state import RequestState
from trace_audit.engine.scoring import processed
from trace_audit.engine.token_statistics import (
    SUPPORT_TAIL_DRAWS,
    SUPPORT_TOP_K,
    TokenStatistics,
)
from trace_audit.engine.trace_replay import TraceReplayState
from trace_audit.engine.verification import REJECTED, Verification
from trace_audit.kernels.partials import VocabularyPartials
from trace_audit.kernels.runtime import to_device
from trace_audit.kernels.statistics import StatisticsKernels

_SAMPLING_DRAW = SUPPORT_TAIL_DRAWS  # draw number after those of the tail
_PROCESSED_ROWS = 8  # copied to float32 at once

Rejection: TypeAlias = Literal["greedy", "probabilistic"]


@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """What the rows of a launch ask of the sampler.

    Attributes:
        temperatures: float32 [B] on the device; None: every row is greedy.
        uniforms: float64 [B, SUPPORT_TAIL_DRAWS + 1] on the device; None: nothing is drawn.
        support: int32 [B, SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS] on the device, given ids; None: no
            row has any.
        has_support: bool [B] on the device; None: every row has given ids, or none has.
    """

    temperatures: torch.Tensor | None
    uniforms: torch.Tensor | None
    support: torch.Tensor | None
    has_support: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[LogitsRow], device: torch.device) -> SamplingInputs:
        """Gather the rows' parameters at their steps."""
        requests = [row.request for row in rows]
        temperatures = np.array([r.params.temperature for r in requests], dtype=np.float32)
        given = np.array([r.support_token_ids is not None for r in requests])
        sampled = bool((temperatures > 0).any())
        draws = None
        if sampled or not given.all():
            draws = uniforms(
                [r.params.seed for r in requests],
                [r.index for r in requests],
                [max(0, row.step) for row in rows],
                SUPPORT_TAIL_DRAWS + 1,
            )
        mixed = bool(given.any()) and not given.all()
        return cls(
            temperatures=to_device(temperatures, device) if sampled else None,
            uniforms=None if draws is None else to_device(draws, device),
            support=to_device(_support_rows(rows), device) if given.any() else None,
            has_support=to_device(given, device) if mixed else None,
        )

    @property
    def num_top(self) -> int:
        """Best ids that the rows' statistics need: more where a support is made of them."""
        return stats.NUM_TOP if self.uniforms is None else SUPPORT_TOP_K

    def rows(self, some: slice) -> SamplingInputs:
        """The parameters of some rows."""
        columns = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: c[some] for name, c in columns if c is not None})


class Sampler:
    """The last stage of a step.

    Args:
        vocabulary_size: width of the logits.
        device: their device.
        kernels: the steps from logits to statistics.
        trace_replay: None where `enable_trace_replay` is false.
        scored: the distribution that statistics are of. Tokens are chosen from the untouched
            logits whatever it is.
        rejection: which drafts of a free request stay: those that would have been sampled anyway,
            or each with its probability. At temperature 0 both are the argmax.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        device: torch.device,
        kernels: StatisticsKernels,
        trace_replay: TraceReplayState | None,
        scored: Distribution,
        rejection: Rejection = "greedy",
    ) -> None:
        self._multipliers = stats.odd_multipliers(vocabulary_size, device)
        self._kernels = kernels
        self._trace_replay = trace_replay
        self._scored = scored.within(vocabulary_size)
        self._rejection = rejection

    def __call__(
        self,
        logits: torch.Tensor,
        inputs: SamplingInputs,
        idx_mapping: torch.Tensor,
        state: RequestState,
        *,
        forced: torch.Tensor | None = None,
        verification: Verification | None = None,
    ) -> tuple[torch.Tensor, TokenStatistics]:
        """One step's tokens and their statistics.

        Args:
            logits: [B, V]; never written to.
            inputs: the rows' parameters.
            idx_mapping: int32 [B], batch row -> request slot.
            state: the request rows.
            forced: int64 [B], tokens to score; None: they are sampled.
            verification: of the launch's drafts, None without any.

        Returns:
            int64 [B] tokens, the trace's where a row replays one, `REJECTED` where a draft before
            it is; the statistics of those tokens.
        """
        partials = self._kernels.vocabulary_partials(logits, self._multipliers)
        num_top = inputs.num_top if self._scored.is_raw else 1
        top = self._kernels.top_ids(logits, partials.maximum, num_top)
        greedy = top[:, 0].long()
        kept = None
        if forced is not None:
            sampled = forced
        elif verification is not None:
            drafts = verification.next_drafts if self._rejection == "probabilistic" else None
            sampled = self._sample(logits, greedy, inputs, drafts)
            kept = verification.verify(sampled, self._trace_replay, state)
        else:
            sampled = self._sample(logits, greedy, inputs)
            if self._trace_replay is not None:
                self._trace_replay.apply_trace(sampled, idx_mapping, state)
        statistics = self._statistics(logits, partials, top, sampled, inputs)
        return (sampled if kept is None else torch.where(kept, sampled, REJECTED)), statistics

    def _statistics(
        self,
        logits: torch.Tensor,
        partials: VocabularyPartials,
        top: torch.Tensor,
        tokens: torch.Tensor,
        inputs: SamplingInputs,
    ) -> TokenStatistics:
        """Of the distribution that is scored; the hash is of the untouched logits always."""
        if self._scored.is_raw:
            return self._score(logits, partials, top, tokens, inputs)
        statistics = self._score_processed(logits, tokens, inputs)
        return replace(statistics, logits_hash=partials.bits.sum(-1))

    def _sample(
        self,
        logits: torch.Tensor,
        greedy: torch.Tensor,
        inputs: SamplingInputs,
        drafts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if inputs.temperatures is None:
            return greedy
        assert inputs.uniforms is not None
        hot = inputs.temperatures > 0
        scaled = logits.float() / torch.where(hot, inputs.temperatures, 1.0)[:, None]
        partials = self._kernels.vocabulary_partials(scaled, self._multipliers)
        maximum = partials.maximum.amax(-1)
        drafts = torch.full_like(greedy, -1) if drafts is None else drafts
        mass = self._kernels.chunk_masses(scaled, partials, drafts[:, None])
        uniform = inputs.uniforms[:, _SAMPLING_DRAW:]
        drawn = draw_draft_first(scaled, maximum, mass, drafts, uniform)
        return torch.where(hot & (drawn >= 0), drawn, greedy)

    def _score_processed(
        self, logits: torch.Tensor, tokens: torch.Tensor, inputs: SamplingInputs
    ) -> TokenStatistics:
        """Statistics of the processed logits, a few rows at a time: no float32 copy of them all."""
        parts = []
        for start in range(0, len(logits), _PROCESSED_ROWS):
            rows = slice(start, start + _PROCESSED_ROWS)
            own = processed(logits[rows], self._scored)
            partials = self._kernels.vocabulary_partials(own, self._multipliers)
            top = self._kernels.top_ids(own, partials.maximum, inputs.num_top)
            parts.append(self._score(own, partials, top, tokens[rows], inputs.rows(rows)))
        return stats.joined(parts)

    def _score(
        self,
        logits: torch.Tensor,
        partials: VocabularyPartials,
        top: torch.Tensor,
        tokens: torch.Tensor,
        inputs: SamplingInputs,
    ) -> TokenStatistics:
        kernels, support = self._kernels, inputs.support
        excluded = top if support is None else support[:, :SUPPORT_TOP_K]
        if inputs.has_support is not None:
            excluded = torch.where(inputs.has_support[:, None], excluded, top)
        tail = kernels.chunk_masses(logits, partials, excluded)
        if support is None or inputs.has_support is not None:
            own = _own_support(logits, partials, tail, excluded, inputs)
            support = (
                own
                if support is None or inputs.has_support is None
                else torch.where(inputs.has_support[:, None], support, own)
            )
        top = top[:, : stats.NUM_TOP]
        counts = kernels.token_counts(logits, tokens)
        rows = kernels.row_statistics(logits, partials, counts, tail, tokens, top, support)
        return TokenStatistics(**vars(rows), top_token_ids=top, support_token_ids=support)


def _own_support(
    logits: torch.Tensor,
    partials: VocabularyPartials,
    tail: torch.Tensor,
    best: torch.Tensor,
    inputs: SamplingInputs,
) -> torch.Tensor:
    """Support made of the row's best ids int32 [B, SUPPORT_TOP_K] and draws from its tail.

    Returns:
        int32 [B, SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS]; all -1 where the row is not finite.
    """
    assert inputs.uniforms is not None
    maximum = partials.maximum.amax(-1)
    uniform = inputs.uniforms[:, :SUPPORT_TAIL_DRAWS]
    drawn = draw_ids(logits, maximum, tail, best.long(), uniform)
    own = torch.cat([best, drawn.int()], dim=1)
    finite = maximum.isfinite() & partials.sum_exp.isfinite().all(-1)
    return torch.where(finite[:, None], own, -1)


def _support_rows(rows: Sequence[LogitsRow]) -> npt.NDArray[np.int32]:
    """Each row's given support at its step; -1 for a row without."""
    support = np.full((len(rows), SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        if row.request.support_token_ids is not None:
            support[index] = row.request.support_token_ids[max(0, row.step)]
    return support
