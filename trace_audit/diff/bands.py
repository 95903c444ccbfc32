"""What is normal: sizes that healthy changes of a kind were measured to have.

Absolute sizes depend on the model. A band is there to tell the usual from the unusual at a glance;
to gate on it, learn bounds of one's own (`trace-audit gate learn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from trace_audit.diff.metric import Band, Metric
from trace_audit.diff.runs import RunIdentity

_SMOLLM2 = "SmolLM2-135M, docs/results/smollm2-135m-cpu-h200.md"
_SPLIT_SMOLLM2 = "SmolLM2-135M split over 3 ranks, docs/results/tensor-and-pipeline-parallel.md"


@dataclass(frozen=True, kw_only=True)
class BandSet:
    """The bands of one kind of change.

    Attributes:
        change: The kind, in words.
        applies: Whether baseline and candidate differ in this kind.
        bands: From a metric's name to its smallest and largest healthy value and their source.
    """

    change: str
    applies: Callable[[RunIdentity, RunIdentity], bool]
    bands: dict[str, tuple[float, float, str]]


def with_bands(
    metrics: Iterable[Metric], baseline: RunIdentity, candidate: RunIdentity
) -> tuple[Metric, ...]:
    """The metrics, each with what is normal for the change between the two runs, where known."""
    found = next((kind for kind in BANDS if kind.applies(baseline, candidate)), None)
    if found is None:
        return tuple(metrics)
    return tuple(_with_band(metric, found) for metric in metrics)


def _with_band(metric: Metric, kind: BandSet) -> Metric:
    if metric.name not in kind.bands:
        return metric
    low, high, source = kind.bands[metric.name]
    return replace(metric, band=Band(low=low, high=high, change=kind.change, source=source))


def _between(key: str, before: tuple[str, ...], after: tuple[str, ...]) -> Callable[..., bool]:
    """Whether a key goes from some values to others."""

    def applies(baseline: RunIdentity, candidate: RunIdentity) -> bool:
        sides = [run.resolved.get(key) for run in (baseline, candidate)]
        return sides[0] in before and sides[1] in after

    return applies


def _stays(dtype: str) -> Callable[..., bool]:
    return _between("engine.dtype", (dtype,), (dtype,))


# The coarsest change first: beside it a finer one cannot be seen.
BANDS = (
    BandSet(
        change="weights in 4 bits",
        applies=_between(
            "engine.quantization", ("none", "int8_weight_only", "fp8"), ("int4_weight_only",)
        ),
        bands={
            "kl.mean": (0.024, 0.068, "AWQ 0.024, llama.cpp q4_K_M 0.031, NVFP4 0.035 to 0.068"),
            "top1.disagreement": (0.0, 0.11, "the same quantizations, as reported"),
        },
    ),
    BandSet(
        change="weights in 8 bits",
        applies=_between("engine.quantization", ("none",), ("int8_weight_only", "fp8")),
        bands={"kl.mean": (1.4e-3, 3.1e-3, "llama.cpp q8_0 0.0014; NeMo-RL fp8 0.0014 to 0.0031")},
    ),
    BandSet(
        change="KV cache in 8 bits",
        applies=_between(
            "engine.kv_cache_dtype",
            ("auto", "float32", "bfloat16", "float16"),
            ("int8", "fp8_e4m3", "fp8_e5m2"),
        ),
        bands={"kl.mean": (9.8e-4, 9.8e-4, "llama.cpp q8_0 for K and V")},
    ),
    BandSet(
        change="bfloat16 against float32",
        applies=_between("engine.dtype", ("float32",), ("bfloat16",)),
        bands={
            "abs.mean": (0.0183, 0.0202, _SMOLLM2),
            "kl.mean": (8.84e-4, 9.59e-4, _SMOLLM2),
        },
    ),
    BandSet(
        change="float16 against float32",
        applies=_between("engine.dtype", ("float32",), ("float16",)),
        bands={
            "abs.mean": (2.37e-3, 2.48e-3, _SMOLLM2),
            "kl.mean": (1.43e-5, 1.49e-5, _SMOLLM2),
        },
    ),
    BandSet(
        change="float32 on another backend or device",
        applies=_stays("float32"),
        bands={
            "abs.mean": (1.48e-6, 3.44e-6, _SMOLLM2),
            "kl.mean": (5.83e-12, 2.55e-11, _SMOLLM2),
        },
    ),
    BandSet(
        change="bfloat16 with sums in another order",
        applies=_stays("bfloat16"),
        bands={
            "abs.mean": (0.0252, 0.0257, _SPLIT_SMOLLM2),
            "kl.mean": (1.56e-3, 1.69e-3, _SPLIT_SMOLLM2),
        },
    ),
)
"""Kinds of change with what was measured; the first that applies is shown."""
