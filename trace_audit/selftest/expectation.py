"""What Gaussian logit noise must do, told from the recorded distribution alone.

With recorded probabilities p and independent noise n of variance sigma^2 on every logit, the
candidate is proportional to p exp(n), and KL(record || candidate) is on average
sigma^2 / 2 (1 - sum p^2) plus terms in sigma^4. The noise is known, not only its variance, so the
same is also computed for the noise that was added to the recorded top ids; of the tail, whose ids
are not all stored, the expectation stays. That leaves little but the estimator's own error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.selftest.faults import LogitNoise
from trace_audit.storage.schema import SUPPORT_TOP_K
from trace_audit.storage.trace import TraceSequence

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the record run stored at the N positions that have a support.

    Attributes:
        rows: bool [M], which of all positions these are.
        sequence_index: int64 [N].
        position: int64 [N], absolute.
        support_token_ids: int64 [N, S], the record's best ids and draws from its tail.
        support_logprobs: float64 [N, S].
        tail: float64 [N], mass outside the best ids.
    """

    rows: BoolArray
    sequence_index: IntArray
    position: IntArray
    support_token_ids: IntArray
    support_logprobs: FloatArray
    tail: FloatArray

    @classmethod
    def of(cls, trace: list[TraceSequence], tokens: pa.Table) -> Recorded:
        """From a trace and the record run's tokens, both in (sequence, step) order."""
        ids = np.concatenate([s.support_token_ids for s in trace]).astype(np.int64)
        rows = np.asarray((ids >= 0).all(axis=1))
        logprobs = tokens["support_logprobs"].combine_chunks().flatten()
        support = logprobs.to_numpy(zero_copy_only=False).astype(np.float64)
        return cls(
            rows=rows,
            sequence_index=tokens["sequence_index"].to_numpy().astype(np.int64)[rows],
            position=tokens["position"].to_numpy().astype(np.int64)[rows],
            support_token_ids=ids[rows],
            support_logprobs=support.reshape(ids.shape)[rows],
            tail=np.exp(tokens["log_tail_mass"].to_numpy().astype(np.float64))[rows],
        )

    @property
    def top(self) -> FloatArray:
        """Probabilities of the best ids: float64 [N, K]."""
        return np.exp(self.support_logprobs[:, :SUPPORT_TOP_K])

    @property
    def tail_square(self) -> FloatArray:
        """Unbiased estimate of the sum of p^2 over the tail: float64 [N].

        A draw's probability is p over the tail's mass, so the mean of p over draws, times that
        mass, is the sum of p^2 in expectation.
        """
        drawn = np.exp(self.support_logprobs[:, SUPPORT_TOP_K:])
        square: FloatArray = self.tail * drawn.mean(axis=1)
        return square

    @property
    def margin(self) -> FloatArray:
        """Gap between the best two logprobs: float64 [N], nats."""
        margin: FloatArray = self.support_logprobs[:, 0] - self.support_logprobs[:, 1]
        return margin

    def noise(self, fault: LogitNoise, vocabulary_size: int) -> FloatArray:
        """What was added to the logits of the support ids: float64 [N, S]."""
        rows = zip(self.sequence_index, self.position, self.support_token_ids, strict=True)
        return np.stack([fault.of(int(i), int(p), vocabulary_size)[ids] for i, p, ids in rows])


def kl_on_average(recorded: Recorded, sigma: float) -> FloatArray:
    """sigma^2 / 2 (1 - sum p^2) at every position: float64 [N], nats."""
    square = (recorded.top**2).sum(axis=1) + recorded.tail_square
    kl: FloatArray = sigma**2 / 2 * (1 - square)
    return kl


def kl_of_noise(recorded: Recorded, noise: FloatArray, sigma: float) -> FloatArray:
    """KL of this noise on the best ids, and of any on the tail: float64 [N], nats.

    Args:
        noise: float64 [N, S], of the support ids.
        sigma: its standard deviation.
    """
    top, added = recorded.top, noise[:, :SUPPORT_TOP_K]
    mass = (top * np.exp(added)).sum(axis=1) + recorded.tail * math.exp(sigma**2 / 2)
    of_tail = sigma**2 / 2 * recorded.tail_square
    kl: FloatArray = np.log(mass) - (top * added).sum(axis=1) - of_tail
    return kl


@dataclass(frozen=True, kw_only=True)
class ExpectedFlips:
    """What this noise does to the best tokens, and what noise of its size does on average.

    Attributes:
        flips: bool [N], the best token changes.
        by_others: flips to another token than the second best, which no gap between the best two
            foretells.
        chance: float64 [N], of noise turning the best two round.
    """

    flips: BoolArray
    by_others: int
    chance: FloatArray

    @classmethod
    def of(cls, recorded: Recorded, noise: FloatArray, sigma: float) -> ExpectedFlips:
        """From noise float64 [N, S] of standard deviation `sigma` on the support ids."""
        best = np.argmax(recorded.support_logprobs + noise, axis=1)
        turned = recorded.support_logprobs[:, 1] + noise[:, 1] > (
            recorded.support_logprobs[:, 0] + noise[:, 0]
        )
        z = recorded.margin / (2 * sigma)
        return cls(
            flips=best != 0,
            by_others=int(((best != 0) & ~turned).sum()),
            chance=np.array([math.erfc(value) / 2 for value in z]),
        )

    @property
    def excess(self) -> float:
        """Flips over those that the gaps of the best two explain: 1, and what others add."""
        return 1 + self.by_others / float(self.chance.sum())

    @property
    def excess_error(self) -> float:
        """Standard error of that, as the count of independent flips has it."""
        variance = (self.chance * (1 - self.chance)).sum()
        return math.sqrt(variance) / float(self.chance.sum())


@dataclass(frozen=True, kw_only=True)
class Held:
    """A measured mean against the expected one.

    Attributes:
        error: standard error of the mean of their difference, position by position.
    """

    measured: float
    expected: float
    error: float

    @classmethod
    def of(cls, measured: FloatArray, expected: FloatArray) -> Held:
        """From both at N independent positions: float64 [N]."""
        error = float((measured - expected).std(ddof=1)) / math.sqrt(len(measured))
        return cls(measured=float(measured.mean()), expected=float(expected.mean()), error=error)

    def holds(self, num_errors: float) -> bool:
        """Whether they are at most so many standard errors apart."""
        return abs(self.measured - self.expected) <= num_errors * self.error
