"""Named sets of gates: each bound with where its number comes from.

Absolute bounds depend on the model; `trace-audit gate learn` makes a profile of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.diff.verdict import Gate

PROFILE_FLOOR_FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Gates that belong together.

    Attributes:
        purpose: What kind of change it judges.
        sampled_only: Its gates have no meaning on a greedy trace.
        model_fingerprint: Of the model that the bounds were learned on; None if they were not.
        runs: The good runs that they were learned from.
        baseline: The run to compare with where it exists and none is named.
    """

    name: str
    purpose: str
    gates: tuple[Gate, ...]
    sampled_only: bool = False
    model_fingerprint: str | None = None
    runs: tuple[str, ...] = ()
    baseline: str = "record"


def _gate(metric: str, bound: float, source: str, *, fp8_bound: float | None = None) -> Gate:
    return Gate(
        metric=metric,
        bound=bound,
        fp8_bound=fp8_bound,
        floor_factor=PROFILE_FLOOR_FACTOR,
        source=source,
    )


def _watch(metric: str, bound: float, source: str) -> Gate:
    return Gate(
        metric=metric,
        bound=bound,
        floor_factor=PROFILE_FLOOR_FACTOR,
        watch=True,
        source=source,
    )


_PROFILES = (
    Profile(
        name="bitwise",
        purpose="nothing may change: deterministic kernels, batch invariance",
        # No floor: a configuration that does not repeat itself is not bitwise.
        gates=(Gate(metric="rows.unequal", bound=0.0, source="a census: every row is looked at"),),
    ),
    Profile(
        name="kernel",
        purpose="same dtype: backend, tensor parallelism, batch size, CUDA graphs",
        gates=(
            _gate(
                "kl.excess",
                1.25,
                "demo model: a healthy bf16 sdpa scores 0.98, split sums 1.11",
            ),
            _watch("kl.mean", 3e-3, "twice what healthy bf16 kernels score (1.5e-3, 1.7e-3)"),
            _watch("flip.hard", 1e-3, "noise of the run's own size flips no wide margin"),
            _watch("tme", 1.05, "NeMo-RL's limit of token_mult_prob_error"),
        ),
    ),
    Profile(
        name="kv8",
        purpose="KV cache in 8 bits",
        gates=(
            _gate("kl.excess", 1.5, "a start: learn your own with `gate learn`"),
            _watch("kl.mean", 3e-3, "llama.cpp q8_0 for K and V: 9.8e-4"),
        ),
    ),
    Profile(
        name="w8",
        purpose="weights in 8 bits",
        gates=(_gate("kl.mean", 5e-3, "llama.cpp q8_0 1.4e-3; NeMo fp8 1.4e-3 to 3.1e-3"),),
    ),
    Profile(
        name="w4",
        purpose="weights in 4 bits",
        gates=(
            _gate("kl.mean", 5e-2, "q4_K_M 0.031, AWQ 0.024, NVFP4 0.035 to 0.068"),
            _gate("top1.disagreement", 0.11, "the same quantizations"),
        ),
    ),
    Profile(
        name="rl",
        purpose="rollout against trainer, on the rollout's own tokens",
        gates=(
            _gate("kl.k3", 1e-3, "NeMo-RL, SkyRL and slime tests: bf16, fp8", fp8_bound=4e-3),
            _gate("abs.mean", 0.05, "NeMo-RL, SkyRL and slime tests"),
        ),
        sampled_only=True,
        baseline="imported",
    ),
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in _PROFILES}
