"""Counter-based draws: a draw depends on what it is for, never on batch order or a generator."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.kernels.partials import CHUNK

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One splitmix64 step."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(
    seeds: npt.ArrayLike, indices: npt.ArrayLike, steps: npt.ArrayLike, num_draws: int
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) hashed from (seed, sequence index, step, draw number).

    Args:
        seeds, indices, steps: integers [n].
        num_draws: draws a row.

    Returns:
        float64 [n, num_draws], multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.int64).astype(np.uint64))
        state = _mix(state ^ np.asarray(indices, dtype=np.int64).astype(np.uint64))
        state = _mix(state ^ np.asarray(steps, dtype=np.int64).astype(np.uint64))
        bits = _mix(state[:, None] ^ np.arange(num_draws, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_ids(
    logits: torch.Tensor,
    row_maximum: torch.Tensor,
    chunk_mass: torch.Tensor,
    excluded: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw ids in proportion to exp(logit), by inverse CDF in vocabulary order, with replacement.

    Args:
        logits: [B, V].
        row_maximum: float32 [B].
        chunk_mass: float32 [B, C], sum of exp(x - row maximum) over each chunk's drawable ids.
        excluded: int64 [B, K], ids never drawn; -1 is no id.
        uniform: float64 [B, J] in [0, 1).

    Returns:
        int64 [B, J]; -1 where the row has no mass to draw from, or no finite one.
    """
    prefix = prefix_sum(chunk_mass.double())
    total = prefix[:, -1:]
    drawable = (total > 0) & total.isfinite()
    target = uniform * torch.where(drawable, total, 1.0)
    chunk = torch.searchsorted(prefix, target, right=True).clamp(max=prefix.shape[1] - 1)
    before = torch.where(chunk > 0, prefix.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    ids = chunk[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)
    weight = _weights(logits, row_maximum, excluded, ids)
    within = prefix_sum(weight)
    # The chunk's float32 mass can exceed this float64 sum by rounding: fall back to its last id.
    past = within > (target - before)[..., None]
    last = CHUNK - 1 - (weight > 0).flip(-1).int().argmax(-1)
    offset = torch.where(past.any(-1), past.int().argmax(-1), last)
    return torch.where(drawable, chunk * CHUNK + offset, -1)


def draw_draft_first(
    logits: torch.Tensor,
    row_maximum: torch.Tensor,
    chunk_mass: torch.Tensor,
    drafts: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw an id in proportion to exp(logit), by inverse CDF in vocabulary order, the draft first.

    The draft is drawn with its own probability, and any other id with its own: the rule of
    speculative sampling (accept with min(1, p / q), else draw from what p has over q) for a q that
    is all on the draft, with one uniform for both.

    Args:
        logits: [B, V].
        row_maximum: float32 [B].
        chunk_mass: float32 [B, C], sum of exp(x - row maximum) over each chunk without the draft.
        drafts: int64 [B], -1 for none.
        uniform: float64 [B, 1] in [0, 1).

    Returns:
        int64 [B]; -1 where `draw_ids` has it, and the draft is not drawn.
    """
    given = drafts[:, None]
    logit = logits.gather(1, given.clamp(min=0)).double()
    weight = torch.where(given >= 0, (logit - row_maximum.double()[:, None]).exp(), 0.0)
    share = weight / (weight + prefix_sum(chunk_mass.double())[:, -1:])
    # What is left of the uniform is uniform again; rounding must not make it 1.
    rest = ((uniform - share) / (1 - share)).clamp(0.0, 1.0 - 2.0**-53)
    others = draw_ids(logits, row_maximum, chunk_mass, given, rest)
    return torch.where(uniform < share, given, others)[:, 0]


def _weights(
    logits: torch.Tensor, row_maximum: torch.Tensor, excluded: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """exp(logit - maximum) at ids [B, J, CHUNK], 0 past the vocabulary and where excluded."""
    vocabulary_size = logits.shape[1]
    flat = ids.flatten(1).clamp(max=vocabulary_size - 1)
    values = logits.gather(1, flat).view(ids.shape).double()
    weight = (values - row_maximum.double()[:, None, None]).exp()
    barred = (ids[..., None] == excluded[:, None, None, :]).any(-1) | (ids >= vocabulary_size)
    return torch.where(barred, 0.0, weight)


def prefix_sum(x: torch.Tensor) -> torch.Tensor:
    """Inclusive prefix sum of float64 over the last dimension, in a fixed order on any device.

    torch.cumsum of floats is not deterministic on CUDA.
    """
    step = 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] + x[..., :-step]], dim=-1)
        step *= 2
    return x
