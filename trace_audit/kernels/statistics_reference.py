"""Statistics of logits in plain torch: the same signatures as the kernels, written to be read."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from trace_audit.kernels.partials import (
    CHUNK,
    RowStatistics,
    TokenCounts,
    VocabularyPartials,
    num_chunks,
)
from trace_audit.kernels.row_sum import row_sum

_ROWS_AT_ONCE = 8


def vocabulary_partials(logits: torch.Tensor, multipliers: torch.Tensor) -> VocabularyPartials:
    """See `trace_audit.kernels.token_stats.vocabulary_partials`."""
    factors = _chunked(multipliers[None], 0)
    # A few rows at a time stay in cache: a quarter of the time of all rows at once.
    parts = [_vocabulary_rows(rows, factors) for rows in logits.split(_ROWS_AT_ONCE)]
    return VocabularyPartials(
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )


def _vocabulary_rows(logits: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
    x = _chunked(logits.float(), float("-inf"))
    maximum = x.amax(-1)
    maximum = torch.where(maximum.isnan(), float("-inf"), maximum)
    shift = x - torch.where(maximum == float("-inf"), 0.0, maximum)[..., None]
    e = shift.exp()
    # exp(-inf) * -inf would be NaN; exp(-200) is 0 in float32, and so is what it adds.
    weighted = e * shift.clamp_(min=-200.0)
    bits = x.view(torch.int32).long().mul_(factors)
    return {
        "maximum": maximum,
        "sum_exp": e.sum(-1),
        "sum_exp_x": weighted.sum(-1),
        "bits": bits.sum(-1),
    }


def token_counts(logits: torch.Tensor, tokens: torch.Tensor) -> TokenCounts:
    """See `trace_audit.kernels.token_stats.token_counts`."""
    # NaN compares false, so the padding is never counted.
    x = _chunked(logits.float(), float("nan"))
    y = logits.gather(1, tokens[:, None]).float()[..., None]
    # Comparisons into floats: their sums are exact, and far faster than sums of booleans.
    hits = torch.empty_like(x)
    num_greater = torch.gt(x, y, out=hits).sum(-1).int()
    num_equal = torch.eq(x, y, out=hits).sum(-1).int()
    return TokenCounts(num_greater=num_greater, num_equal=num_equal)


def _chunked(values: torch.Tensor, fill: float) -> torch.Tensor:
    """[B, V] -> [B, C, CHUNK], the last chunk filled up."""
    missing = num_chunks(values.shape[1]) * CHUNK - values.shape[1]
    if missing:
        values = pad(values, (0, missing), value=fill)
    chunks: torch.Tensor = values.unflatten(1, (-1, CHUNK))
    return chunks


def top_ids(logits: torch.Tensor, maximum: torch.Tensor, k: int) -> torch.Tensor:
    """See `trace_audit.kernels.top_ids.top_ids`."""
    vocabulary_size = logits.shape[1]
    num_wanted = min(k, vocabulary_size)
    chunks = _best(maximum, min(k, maximum.shape[1]))
    # Chunks are sorted so that candidates stand in order of id, and a lower position wins a tie.
    chunks = chunks.sort(-1).values
    values = _chunk_logits(logits, chunks).flatten(1)
    ids = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    # An id past the vocabulary must lose against a logit of -inf too.
    values = torch.where(ids < vocabulary_size, values, float("nan"))
    best = ids.gather(1, _best(values, num_wanted))
    missing = torch.full((logits.shape[0], k - num_wanted), -1, device=logits.device)
    return torch.cat([best, missing], dim=1).int()


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest of float32 [B, N], lowest position first under ties; NaN last."""
    # Bits of a float, sign-folded, order like the float; + 0.0 makes -0 equal to 0.
    bits = (values + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = torch.where(values.isnan(), torch.iinfo(torch.int32).min, order).long()
    position = torch.arange(values.shape[1], device=values.device)
    keys = (order << 32) | (0xFFFFFFFF - position)
    return keys.topk(k, dim=1, sorted=True).indices


def chunk_masses(
    logits: torch.Tensor, partials: VocabularyPartials, excluded: torch.Tensor
) -> torch.Tensor:
    """See `trace_audit.kernels.chunk_masses.chunk_masses`."""
    num_rows, num_excluded = excluded.shape
    excluded = excluded.long()
    chunks = partials.maximum.shape[1]
    row_maximum = partials.maximum.amax(-1)
    mass = partials.sum_exp * (partials.maximum - row_maximum[:, None]).exp()
    # -1 stands for an id of a chunk past the last, which is dropped at the end.
    chunk = torch.where(excluded >= 0, excluded // CHUNK, chunks)
    values = _chunk_logits(logits, chunk.clamp(max=chunks - 1))
    weight = (values - row_maximum[:, None, None]).exp().flatten(1)
    # Several excluded ids can share a chunk: all of them are struck from its first copy.
    first = (chunk[:, :, None] == chunk[:, None, :]).int().argmax(-1)
    weight.scatter_(1, first * CHUNK + excluded % CHUNK, 0.0)
    rest = row_sum(weight.unflatten(1, (num_excluded, CHUNK))).gather(1, first)
    mass = torch.cat([mass, mass.new_zeros(num_rows, 1)], dim=1)
    return mass.scatter_(1, chunk, rest)[:, :-1]


def _chunk_logits(logits: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Logits of whole chunks int64 [B, K], float32 [B, K, CHUNK]; -inf past the vocabulary."""
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


def row_statistics(
    logits: torch.Tensor,
    partials: VocabularyPartials,
    counts: TokenCounts,
    tail: torch.Tensor,
    tokens: torch.Tensor,
    top: torch.Tensor,
    support: torch.Tensor,
) -> RowStatistics:
    """See `trace_audit.kernels.row_statistics.row_statistics`."""
    row_maximum = partials.maximum.amax(-1)
    shift = partials.maximum - row_maximum[:, None]
    weight = shift.exp()
    # A chunk with a NaN has maximum -inf and weight 0, and 0 * NaN keeps the row's sum NaN.
    total = row_sum(weight * partials.sum_exp)
    logsumexp = row_maximum + total.log()
    # log Z - E[x - max]: two terms of one sign.
    shift = torch.where(shift == float("-inf"), 0.0, shift)
    mean = row_sum(weight * (partials.sum_exp_x + shift * partials.sum_exp)) / total
    finite = logsumexp.isfinite()
    rank = counts.num_greater.sum(-1, dtype=torch.int32) + 1
    ties = counts.num_equal.sum(-1, dtype=torch.int32) - 1
    return RowStatistics(
        logprob=_logprobs_at(logits, logsumexp, tokens[:, None])[:, 0],
        rank=torch.where(finite, rank, 0),
        tie_count=torch.where(finite, ties, 0),
        entropy=total.log() - mean,
        logsumexp=logsumexp,
        top_logprobs=_logprobs_at(logits, logsumexp, top),
        support_logprobs=_logprobs_at(logits, logsumexp, support),
        log_tail_mass=row_sum(tail).log() + (row_maximum - logsumexp),
        logits_hash=partials.bits.sum(-1),
    )


def _logprobs_at(logits: torch.Tensor, logsumexp: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float32 [B, K] at ids [B, K]; NaN where the id is -1."""
    values = logits.gather(1, ids.long().clamp(min=0)).float() - logsumexp[:, None]
    return torch.where(ids >= 0, values, float("nan"))
