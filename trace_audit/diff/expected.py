"""Which pairs of runs must be bit-equal, and whether they are.

Some keys of a configuration say where or when something is computed, not what. Two runs that
differ in nothing else must store the same bits; if they do not, something is broken, and no size of
the difference makes it drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.config_differences import (
    BEFORE_THE_KEY,
    DRAFTING_KEYS,
    drafting_key_counts,
    resolved_differences,
)
from trace_audit.diff.identity import run_identity
from trace_audit.diff.runs import Expectation, RunIdentity
from trace_audit.diff.structure import first_place

BoolArray = NDArray[np.bool_]

_NAMED_ORDERS = ("rank_order", "ring", "tree")
# Parts of a run that compute numbers, by their names in run.json.
_NUMERIC_BACKENDS = (
    "attention",
    "linear",
    "experts",
    "compile",
    "layers",
    "token_statistics",
    "trace_replay",
)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run's identity and the rest of its run.json."""

    identity: RunIdentity
    info: Mapping[str, Any]

    def value(self, key: str) -> object:
        """A resolved configuration value."""
        return self.identity.resolved.get(key, BEFORE_THE_KEY.get(key))

    @property
    def drafts(self) -> bool:
        """Whether its launches verified drafts, of which there are fewer where room is short."""
        return self.value("speculative.method") != "none"

    @property
    def fixed(self) -> bool:
        """Whether its launches had shapes that depend on no neighbour."""
        decodes = self.value("engine.path") == "decode"
        return self.value("engine.fixed_batch") is True and decodes and not self.drafts

    @property
    def squeezed(self) -> bool:
        """Whether preemption changed a bit; true where run.json does not count it."""
        preemptions = (self.info.get("counters") or {}).get("preemptions")
        if preemptions == 0:
            return False
        # With launches of a fixed shape a preempted neighbour is an empty row, and swapped blocks
        # come back with the bits they left with.
        swapped = self.value("engine.preemption") == "swap"
        return preemptions is None or not (self.fixed and swapped)

    @property
    def feels_room(self) -> bool:
        """Whether another number of KV blocks can have changed a bit."""
        return self.squeezed or self.drafts


_Rule = Callable[[_Run, _Run], str | None]


def expectation(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Expectation | None:
    """Why two runs must be bit-equal, told without their rows; None where a bit may change.

    Runs of one configuration are none of these: what they differ by is the noise of a rerun, which
    is measured as a floor and not called a fault.

    Args:
        baseline: The baseline's run.json.
        candidate: The candidate's run.json.
    """
    a, b = (_Run(identity=run_identity("", info), info=info) for info in (baseline, candidate))
    if not _same_origin(a, b) or not _same_schedule(a, b):
        return None
    keys = resolved_differences(a.identity, b.identity)
    reasons = [_RULES[key.key](a, b) if key.key in _RULES else None for key in keys]
    if _other_company(a, b):
        reasons.append(_by_itself(a, b))
    if not reasons or None in reasons:
        return None
    distinct = dict.fromkeys(reason for reason in reasons if reason is not None)
    return Expectation(keys=keys, reason="; ".join(distinct))


def checked(expected: Expectation | None, pair: AlignedPair) -> Expectation | None:
    """The expectation with what the rows say: void where launches differ, else the rows that do."""
    if expected is None:
        return None
    found = pair.differences
    assert found is not None
    return replace(
        expected,
        void=_moved(pair, found.moved) if found.moved.any() else None,
        differing_rows=found.rows,
        differing_columns=found.columns,
    )


def _same_origin(a: _Run, b: _Run) -> bool:
    """Same weights, same machine and libraries, same parts; what is unknown is not the same."""
    for name in ("model_fingerprint", "environment_fingerprint", "resolved"):
        values = [getattr(run.identity, name) for run in (a, b)]
        if not all(values) or (name != "resolved" and values[0] != values[1]):
            return False
    sides = (a.identity.backends, b.identity.backends)
    shared = sides[0].keys() & sides[1].keys() & set(_NUMERIC_BACKENDS)
    return all(sides[0][part] == sides[1][part] for part in shared)


def _same_schedule(a: _Run, b: _Run) -> bool:
    """Same sequences in the same order or none that matters, and room that was not felt."""
    if _other_company(a, b) and _by_itself(a, b) is None:
        return False
    # The cache is fitted to the memory that was free, which the configuration does not say.
    blocks = [run.info.get("num_kv_blocks") for run in (a, b)]
    return blocks[0] == blocks[1] or not (a.feels_room or b.feels_room)


def _other_company(a: _Run, b: _Run) -> bool:
    """Whether a sequence had other neighbours for a reason that is no key."""
    batch = any(run.info.get("repeat_kind", "rerun") not in (None, "rerun") for run in (a, b))
    return a.identity.subset != b.identity.subset or batch


def _by_itself(a: _Run, b: _Run) -> str | None:
    alone = all(run.fixed and not run.squeezed for run in (a, b))
    return "with fixed_batch no sequence depends on the others" if alone else None


def _pipeline(a: _Run, b: _Run) -> str | None:
    size = _tensor_parallel(a, b)
    native = "native" in (a.value("parallel.reduction"), b.value("parallel.reduction"))
    # NCCL may order the sums of three or more by how their devices are connected, and the devices
    # of a second stage are others.
    if native and a.value("engine.device") == "cuda" and (size is None or size > 2):
        return None
    return "pipeline stages hand states on and add nothing up"


def _sums(a: _Run, b: _Run) -> str | None:
    """Whether the ranks' partial sums are added up alike."""
    size = _tensor_parallel(a, b)
    if size is None:
        return None
    if size == 1:
        return "one tensor-parallel rank adds nothing up"
    if size == 2:
        # a + b has one order, and addition commutes. Its float32 sum, rounded once to the model's
        # dtype, is the model-dtype sum: rounding twice is harmless where the wider format has at
        # least 2 p + 2 bits of precision (Figueroa, "When is double rounding innocuous?", 1995).
        # float32 has 24; bfloat16 (p = 8) needs 18, float16 (p = 11) needs 24. Overflow agrees:
        # float16 sums fit into float32, and bfloat16 has float32's range.
        return "of two ranks a + b has one order and one rounding"
    orders = [
        (run.value("parallel.reduction"), run.value("parallel.reduction_dtype")) for run in (a, b)
    ]
    if orders[0] == orders[1] and orders[0][0] in _NAMED_ORDERS:
        return f"both add up in the order {orders[0][0]}"
    return None


def _kv_storage(a: _Run, b: _Run) -> str | None:
    """Whether both caches give back every number as the model computed it."""
    exact = all(
        run.value("engine.kv_cache_dtype") in ("float32", "auto", run.value("engine.dtype"))
        for run in (a, b)
    )
    # A compiled kernel is another one for another cache; torch's operations get the same numbers.
    torchs = all(run.value("engine.attention_backend") in ("eager", "sdpa") for run in (a, b))
    return "both KV caches hold the model's numbers as they are" if exact and torchs else None


def _room(a: _Run, b: _Run) -> str | None:
    return None if a.feels_room or b.feels_room else "preemption changed no bit"


def _preemption(a: _Run, b: _Run) -> str | None:
    return None if a.squeezed or b.squeezed else "preemption changed no bit"


def _no_numerics(a: _Run, b: _Run) -> str | None:
    return "room and waiting are no numerics"


def _scoring(a: _Run, b: _Run) -> str | None:
    scored = [run.identity.distribution for run in (a, b)]
    return "both score the same distribution" if scored[0] == scored[1] else None


def _drafting(key: str) -> _Rule:
    def rule(a: _Run, b: _Run) -> str | None:
        counted = any(drafting_key_counts(run.identity, key) for run in (a, b))
        return None if counted else "these keys of drafting had no effect"

    return rule


def _tensor_parallel(a: _Run, b: _Run) -> int | None:
    """The tensor-parallel size that both have, None where they differ."""
    sizes = [run.value("parallel.tensor_parallel_size") for run in (a, b)]
    return sizes[0] if isinstance(sizes[0], int) and sizes[0] == sizes[1] else None


# Keys that cannot change a bit, each with what it depends on. `name` and `engine.max_model_len`
# are no difference to begin with.
_RULES: Mapping[str, _Rule] = {
    "parallel.pipeline_parallel_size": _pipeline,
    "parallel.backend": _sums,
    "parallel.reduction": _sums,
    "parallel.reduction_dtype": _sums,
    "engine.kv_cache_dtype": _kv_storage,
    "parallel.timeout_seconds": _no_numerics,
    "engine.gpu_memory_utilization": _no_numerics,
    "engine.enforce_eager": _no_numerics,
    "scoring.mode": _scoring,
    "scoring.temperature": _scoring,
    "scoring.top_k": _scoring,
    "scoring.top_p": _scoring,
    "engine.num_kv_blocks": _room,
    "engine.preemption": _preemption,
    **{key: _drafting(key) for key in DRAFTING_KEYS},
    "engine.batch_order_seed": _by_itself,
    "engine.shard_size": _by_itself,
}


def _moved(pair: AlignedPair, moved: BoolArray) -> str:
    where = first_place(pair, moved)
    assert where is not None
    return (
        f"{int(moved.sum()):,} of {len(pair):,} rows come from launches of another shape, the "
        f"first at position {where.position} (sequence {where.sequence_id}, step {where.step})"
    )
