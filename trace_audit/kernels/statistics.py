"""The five steps from logits to statistics, and which code takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trace_audit.kernels import (
    chunk_masses,
    row_statistics,
    statistics_reference,
    token_stats,
    top_ids,
)
from trace_audit.kernels.partials import RowStatistics, TokenCounts, VocabularyPartials
from trace_audit.kernels.runtime import is_interpreted


@dataclass(frozen=True, kw_only=True)
class StatisticsKernels:
    """In the order in which they run; each is described where its kernel is.

    Attributes:
        vocabulary_partials: what does not depend on the token, a few numbers a chunk of ids.
        top_ids: the best ids.
        token_counts: how many logits are larger than, and equal to, the token's.
        chunk_masses: each chunk's mass without some ids.
        row_statistics: the numbers of a row from all these.
    """

    vocabulary_partials: Callable[[torch.Tensor, torch.Tensor], VocabularyPartials]
    top_ids: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    token_counts: Callable[[torch.Tensor, torch.Tensor], TokenCounts]
    chunk_masses: Callable[[torch.Tensor, VocabularyPartials, torch.Tensor], torch.Tensor]
    row_statistics: Callable[..., RowStatistics]


REFERENCE = StatisticsKernels(
    vocabulary_partials=statistics_reference.vocabulary_partials,
    top_ids=statistics_reference.top_ids,
    token_counts=statistics_reference.token_counts,
    chunk_masses=statistics_reference.chunk_masses,
    row_statistics=statistics_reference.row_statistics,
)
TRITON = StatisticsKernels(
    vocabulary_partials=token_stats.vocabulary_partials,
    top_ids=top_ids.top_ids,
    token_counts=token_stats.token_counts,
    chunk_masses=chunk_masses.chunk_masses,
    row_statistics=row_statistics.row_statistics,
)
# Interpreted, a kernel of one program a row costs far more than the reference.
INTERPRETED = replace(
    REFERENCE,
    vocabulary_partials=TRITON.vocabulary_partials,
    token_counts=TRITON.token_counts,
)


def statistics_kernels() -> StatisticsKernels:
    """The kernels, as far as they are worth it in a process that can run them."""
    return INTERPRETED if is_interpreted() else TRITON
