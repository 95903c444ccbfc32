"""In which order the sequences of a shard enter the engine.

Another order gives a sequence other neighbours and launches of other shapes, which can move its
numbers. The order is a pure function of seed and shard, so a shuffled run repeats bit for bit.
"""

from __future__ import annotations

import numpy as np

from trace_audit.engine.draws import uniforms


def batch_order(seed: int, shard: int, size: int) -> list[int]:
    """Positions in the shard, in the order in which they enter the engine.

    Hashed rather than drawn from a generator, whose stream a library is free to change.

    Args:
        seed: 0 is trace order; any other never is, where there are two sequences or more.
        shard: the shard's number.
        size: its sequences.

    Returns:
        A permutation of 0 to size - 1.
    """
    trace_order = list(range(size))
    if seed == 0:
        return trace_order
    keys = uniforms([seed] * size, [shard] * size, trace_order, 1)[:, 0]
    order = [int(position) for position in np.argsort(keys, kind="stable")]
    # A small shard can be shuffled into itself, and a repeat that changed nothing measures nothing.
    return order if order != trace_order else trace_order[::-1]
