"""What can be planted in a replay, and how a replay is run with it. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trace_audit.jobs import Event, Job, Rendezvous, ReplayJob

if TYPE_CHECKING:
    from trace_audit.engine.build import MakeRunner


@dataclass(frozen=True, kw_only=True)
class LogitNoise:
    """Gaussian noise on every logit of every position.

    Attributes:
        sigma: its standard deviation, nats.
        seed: of all of it.
    """

    sigma: float
    seed: int

    def of(
        self, sequence_index: int, position: int, vocabulary_size: int
    ) -> npt.NDArray[np.float32]:
        """The noise of one position, seeded by where it is: batch order cannot matter.

        Args:
            sequence_index: of the sequence in the trace.
            position: absolute, of the token that the logits are for.
            vocabulary_size: V, width of the logits.

        Returns:
            float32 [V], nats.
        """
        generator = np.random.default_rng([self.seed, sequence_index, position])
        return generator.standard_normal(vocabulary_size, dtype=np.float32) * np.float32(self.sigma)


@dataclass(frozen=True, kw_only=True)
class OneUnit:
    """One unit in the last place more in the smallest logit of one position.

    Attributes:
        sequence_index: of the sequence in the trace.
        position: absolute, of the token that the logits are for.
    """

    sequence_index: int
    position: int


@dataclass(frozen=True, kw_only=True)
class SwappedKeys:
    """The keys of two neighbouring pages of one layer change places once the second is full.

    The values stay: attention is a sum over tokens, and pairs of key and value in another order
    are no fault.

    Attributes:
        layer: index of the layer.
        page: the first of the two pages of every sequence.
    """

    layer: int
    page: int

    def first_position(self, block_size: int) -> int:
        """Absolute position of the first token whose logits can have seen it.

        The token at position p comes from the launch that writes position p - 1, and the last
        launch before the swap writes the second page's last slot.
        """
        return (self.page + 2) * block_size + 1


Fault: TypeAlias = LogitNoise | OneUnit | SwappedKeys


def replay_with(
    fault: Fault, job: Job, emit: Callable[[Event], None], rendezvous: Rendezvous | None
) -> dict[str, Any]:
    """Replay with a fault planted: what the run's process does in place of a healthy replay."""
    from trace_audit.selftest.runners import runner_of

    return replay_on(runner_of(fault), job, emit, rendezvous)


def replay_on(
    make_runner: MakeRunner,
    job: Job,
    emit: Callable[[Event], None],
    rendezvous: Rendezvous | None,
) -> dict[str, Any]:
    """Replay on another model runner than the engine's own; all else is a replay."""
    from functools import partial

    from trace_audit.ranks import open_engine
    from trace_audit.replaying import replay

    assert isinstance(job, ReplayJob)
    return replay(job, emit, rendezvous, opener=partial(open_engine, make_runner=make_runner))
