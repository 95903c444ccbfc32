"""Logprob, rank, top ids, entropy, tail mass and hash of each row, from the untouched logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from trace_audit.kernels.partials import CHUNK, TokenCounts, VocabularyPartials
from trace_audit.kernels.row_sum import row_sum
from trace_audit.kernels.runtime import can_run_triton
from trace_audit.kernels.top_ids import top_ids as top_ids_kernel

NUM_TOP = 5
"""Best ids a run stores of its own."""
SUPPORT_TOP_K = 20
"""Best ids of the record run in the fixed support."""
SUPPORT_TAIL_DRAWS = 4
"""Ids drawn from the record run's tail in the fixed support."""


class StatisticsKernels(Protocol):
    """The two passes, as Triton kernels or as their references."""

    @property
    def vocabulary_partials(self) -> Callable[..., VocabularyPartials]:
        """See `trace_audit.kernels.token_stats.vocabulary_partials`."""

    @property
    def token_counts(self) -> Callable[..., TokenCounts]:
        """See `trace_audit.kernels.token_stats.token_counts`."""


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Statistics of B rows on the device; see `RequestOutput` for the meaning of each."""

    logprob: torch.Tensor
    rank: torch.Tensor
    tie_count: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor
    support_token_ids: torch.Tensor
    support_logprobs: torch.Tensor
    log_tail_mass: torch.Tensor
    logits_hash: torch.Tensor


_SUPPORT = SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS
_LAYOUT: tuple[tuple[str, int, torch.dtype], ...] = (
    ("token_ids", 1, torch.int32),
    ("logprob", 1, torch.float32),
    ("rank", 1, torch.int32),
    ("tie_count", 1, torch.int32),
    ("entropy", 1, torch.float32),
    ("logsumexp", 1, torch.float32),
    ("top_token_ids", NUM_TOP, torch.int32),
    ("top_logprobs", NUM_TOP, torch.float32),
    ("support_token_ids", _SUPPORT, torch.int32),
    ("support_logprobs", _SUPPORT, torch.float32),
    ("log_tail_mass", 1, torch.float32),
    ("logits_hash", 1, torch.int64),
)
"""Columns of packed rows: name, elements, dtype."""


def packed(statistics: TokenStatistics, tokens: torch.Tensor) -> torch.Tensor:
    """All statistics of B rows and their tokens, int64 [B], as one int32 [B, width], bit for bit.

    One tensor a step is one copy a step, where eleven would be eleven.
    """
    columns = []
    for name, num_elements, dtype in _LAYOUT:
        values = tokens if name == "token_ids" else getattr(statistics, name)
        columns.append(values.to(dtype).view(-1, num_elements).view(torch.int32))
    return torch.cat(columns, dim=1)


def unpacked(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns that `packed` made a matrix of, and the tokens as `token_ids`, by name."""
    columns = {}
    start = 0
    for name, num_elements, dtype in _LAYOUT:
        end = start + num_elements * dtype.itemsize // torch.int32.itemsize
        part = rows[:, start:end].clone(memory_format=torch.contiguous_format)  # aligned
        values = part.view(dtype)
        columns[name] = values[:, 0] if num_elements == 1 else values
        start = end
    return columns


def joined(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    """The rows of several, in their order; at least one."""
    names = [field.name for field in fields(TokenStatistics)]
    return TokenStatistics(**{n: torch.cat([getattr(part, n) for part in parts]) for n in names})


def odd_multipliers(vocabulary_size: int, device: torch.device) -> torch.Tensor:
    """The odd 64-bit factor of each id in `logits_hash`: int64 [vocabulary_size].

    splitmix64 of the id, its lowest bit set. An odd factor is invertible modulo 2^64, so any
    change of a single logit changes the hash.
    """
    # int64 arithmetic wraps modulo 2^64; the constants are splitmix64's as signed numbers.
    x = (torch.arange(vocabulary_size, dtype=torch.int64) + 1) * -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return ((x ^ _shift_right(x, 31)) | 1).to(device)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)


def log_normalizer(partials: VocabularyPartials) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum and logsumexp, both float32 [B]."""
    row_maximum = partials.maximum.amax(-1)
    weight = (partials.maximum - row_maximum[:, None]).exp()
    # A chunk with a NaN has maximum -inf and weight 0, and 0 * NaN keeps the row's sum NaN.
    return row_maximum, row_maximum + row_sum(weight * partials.sum_exp).log()


def entropy(partials: VocabularyPartials, row_maximum: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, float32 [B]: log Z - E[x - max], two terms of one sign."""
    shift = partials.maximum - row_maximum[:, None]
    weight = shift.exp()
    total = row_sum(weight * partials.sum_exp)
    shift = torch.where(shift == float("-inf"), 0.0, shift)
    mean = row_sum(weight * (partials.sum_exp_x + shift * partials.sum_exp)) / total
    return total.log() - mean


def chunk_masses(
    logits: torch.Tensor,
    partials: VocabularyPartials,
    row_maximum: torch.Tensor,
    excluded: torch.Tensor,
) -> torch.Tensor:
    """Sum of exp(x - row maximum) over each chunk's ids that are not excluded.

    Chunks that hold an excluded id are summed anew without it, so nothing cancels however small
    the rest is.

    Args:
        logits: [B, V].
        partials: of these logits.
        row_maximum: float32 [B].
        excluded: integer [B, K], each id at most once; -1 is no id.

    Returns:
        float32 [B, C].
    """
    num_rows, num_excluded = excluded.shape
    excluded = excluded.long()
    num_chunks = partials.maximum.shape[1]
    mass = partials.sum_exp * (partials.maximum - row_maximum[:, None]).exp()
    # -1 stands for an id of a chunk past the last, which is dropped at the end.
    chunk = torch.where(excluded >= 0, excluded // CHUNK, num_chunks)
    values = chunk_logits(logits, chunk.clamp(max=num_chunks - 1))
    weight = (values - row_maximum[:, None, None]).exp().flatten(1)
    # Several excluded ids can share a chunk: all of them are struck from its first copy.
    first = (chunk[:, :, None] == chunk[:, None, :]).int().argmax(-1)
    weight.scatter_(1, first * CHUNK + excluded % CHUNK, 0.0)
    rest = row_sum(weight.unflatten(1, (num_excluded, CHUNK))).gather(1, first)
    mass = torch.cat([mass, mass.new_zeros(num_rows, 1)], dim=1)
    return mass.scatter_(1, chunk, rest)[:, :-1]


def chunk_logits(logits: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Logits of whole chunks, float32 [B, K, CHUNK]; -inf past the vocabulary.

    Args:
        logits: [B, V].
        chunks: int64 [B, K].
    """
    num_rows, vocabulary_size = logits.shape
    if vocabulary_size % CHUNK == 0:
        # Whole rows of the chunked view: ten times as fast on a CPU as single elements.
        row = torch.arange(num_rows, device=logits.device)[:, None] * (vocabulary_size // CHUNK)
        return (
            logits.reshape(-1, CHUNK)[(row + chunks).flatten()].view(*chunks.shape, CHUNK).float()
        )
    ids = chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)
    values = logits.gather(1, ids.flatten(1).clamp(max=vocabulary_size - 1)).view(ids.shape)
    return torch.where(ids < vocabulary_size, values.float(), float("-inf"))


def top_ids(logits: torch.Tensor, maximum: torch.Tensor, k: int) -> torch.Tensor:
    """The k best ids of each row, best first, of equal logits the lowest id first.

    Args:
        logits: [B, V].
        maximum: float32 [B, C], chunk maxima of `VocabularyPartials`.
        k: ids wanted.

    Returns:
        int64 [B, k]; -1 where the vocabulary has fewer.
    """
    if logits.is_cuda and can_run_triton(logits.device):
        return top_ids_kernel(logits, maximum, k)
    vocabulary_size = logits.shape[1]
    num_wanted = min(k, vocabulary_size)
    chunks = _best(maximum, min(k, maximum.shape[1]))
    # Chunks are sorted so that candidates stand in order of id, and a lower position wins a tie.
    chunks = chunks.sort(-1).values
    values = chunk_logits(logits, chunks).flatten(1)
    ids = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    # An id past the vocabulary must lose against a logit of -inf too.
    values = torch.where(ids < vocabulary_size, values, float("nan"))
    best = ids.gather(1, _best(values, num_wanted))
    missing = torch.full((logits.shape[0], k - num_wanted), -1, device=logits.device)
    return torch.cat([best, missing], dim=1)


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest of float32 [B, N], lowest position first under ties; NaN last."""
    # Bits of a float, sign-folded, order like the float; + 0.0 makes -0 equal to 0.
    bits = (values + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = torch.where(values.isnan(), torch.iinfo(torch.int32).min, order).long()
    position = torch.arange(values.shape[1], device=values.device)
    keys = (order << 32) | (0xFFFFFFFF - position)
    return keys.topk(k, dim=1, sorted=True).indices


def logprobs_at(logits: torch.Tensor, logsumexp: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float32 [B, K] at ids [B, K]; NaN where the id is -1."""
    values = logits.gather(1, ids.long().clamp(min=0)).float() - logsumexp[:, None]
    return torch.where(ids >= 0, values, float("nan"))
