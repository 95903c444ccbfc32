"""Synthetic summaries: what a renderer must be able to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trace_audit.diff.bands import with_bands
from trace_audit.diff.catalog import CATALOG, absent, metric
from trace_audit.diff.estimators import Estimate
from trace_audit.diff.summary import (
    Difference,
    Expectation,
    FlipSummary,
    Influence,
    Interval,
    InvalidPair,
    KLCoverage,
    PairSummary,
    Place,
    PositionBucket,
    ReportSummary,
    RunIdentity,
    TokenDiff,
    TopToken,
    TraceIdentity,
)

HOSTILE = "[bold]x[/bold] | <script>`*_"
"""Neutral for a terminal, but full of every renderer's own markup."""


def identity(name: str, **engine: object) -> RunIdentity:
    resolved = {"engine.dtype": "float32", "engine.attention_backend": "eager"}
    resolved |= {f"engine.{key}": str(value) for key, value in engine.items()}
    return RunIdentity(
        name=name,
        model="demo",
        model_fingerprint="a1b2c3d4e5f6a7b8",
        environment_fingerprint="0f" * 32,
        environment={"python": "3.11"},
        requested={"engine.attention_backend": "auto"},
        resolved=resolved,
        backends={"attention": resolved["engine.attention_backend"]},
        subset=None,
        engine_seconds=2.5,
        tokens_per_second=410.0,
    )


def token(**changed: Any) -> TokenDiff:
    values: dict[str, Any] = {
        "place": Place(sequence_id="s1", step=3, position=45),
        "token_id": 17,
        "text": " fox",
        "before": "The quick brown",
        "after": " jumps over",
        "baseline_logprob": -0.25,
        "candidate_logprob": -1.5,
        "delta": -1.25,
        "baseline_rank": 1,
        "candidate_rank": 2,
        "change": "hard flip",
        "margin": 0.75,
        "candidate_margin": -0.5,
        "kl": 0.125,
        "baseline_top": (TopToken(token_id=17, text=" fox", logprob=-0.25),),
        "candidate_top": (TopToken(token_id=18, text=" dog", logprob=-1.0),),
        "phase": "decode",
        "launch": (8, 8, 0),
    }
    return TokenDiff(**{**values, **changed})


def metrics() -> tuple[Any, ...]:
    estimate = Estimate(
        value=0.0123,
        interval=Interval(low=0.011, high=0.0137, method="t"),
        effective_n=900.0,
        detectable=0.002,
    )
    skipped = {"kl.k1", "kl.k3"}
    found = [
        absent(name, "the trace is greedy") if name in skipped else metric(name, estimate)
        for name in CATALOG
    ]
    return with_bands(found, identity("record"), identity("bf16", dtype="bfloat16"))


def pair(name: str = "bf16-sdpa", **changed: Any) -> PairSummary:
    values: dict[str, Any] = {
        "baseline": identity("record"),
        "candidate": identity(name, dtype="bfloat16", attention_backend="sdpa"),
        "config_differences": (
            Difference(key="engine.attention_backend", baseline="eager", candidate="sdpa"),
            Difference(key="engine.dtype", baseline="float32", candidate="bfloat16"),
        ),
        "environment_differences": (),
        "warnings": ("2 config keys differ, so a difference cannot be laid to one of them",),
        "sequences": 8,
        "groups": 8,
        "tokens": 1024,
        "unscored": 0,
        "bitwise": False,
        "unequal_rows": 1000,
        "non_finite": 0,
        "effective_n": 800.0,
        "design_effect": 1.28,
        "influence": Influence(group_id="s1", share=0.25, token_share=0.125),
        "metrics": metrics(),
        "kl_coverage": KLCoverage(
            used=1024, no_support=0, non_finite=0, infinite=0, heavy_tail_share=0.0
        ),
        "flips": FlipSummary(
            known=1024,
            flips=3,
            hard=1,
            tie_changes=2,
            expected=2.5,
            scale=0.02,
            threshold=0.06,
            examples=(token(),),
        ),
        "first_difference": Place(sequence_id="s0", step=0, position=42),
        "first_flip": Place(sequence_id="s1", step=3, position=45),
        "first_non_finite": None,
        "buckets": tuple(
            PositionBucket(start=s, end=e, tokens=10, mean_abs_delta=m, interval=None)
            for s, e, m in ((42, 60, 0.0), (60, 97, 0.0), (97, 130, 0.01), (130, 170, 0.04))
        ),
        "worst": (token(), token(delta=0.5, change="none")),
    }
    return PairSummary(**{**values, **changed})


def bitwise(name: str = "same") -> PairSummary:
    return replace(
        pair(name),
        bitwise=True,
        metrics=(),
        warnings=(),
        config_differences=(),
        unequal_rows=0,
        worst=(),
        buckets=(),
        first_difference=None,
        first_flip=None,
        influence=None,
    )


def expected(**changed: Any) -> Expectation:
    """Two pipeline stages against one."""
    key = Difference(key="parallel.pipeline_parallel_size", baseline=1, candidate=2)
    values: dict[str, Any] = {"keys": (key,), "reason": "stages add nothing up"}
    return Expectation(**{**values, **changed})


def fault(name: str = "pp2") -> PairSummary:
    broken = expected(differing_rows=3, differing_columns=("logprob", "logits_hash"))
    return pair(name, expected=broken, unequal_rows=3)


def hostile_pair() -> PairSummary:
    bad = token(
        text=HOSTILE,
        before=HOSTILE,
        after=HOSTILE,
        place=Place(sequence_id=HOSTILE, step=0, position=9),
        baseline_top=(TopToken(token_id=1, text=HOSTILE, logprob=-0.1),),
    )
    return replace(
        pair(HOSTILE), worst=(bad,), flips=replace(pair().flips, examples=(bad,)), warnings=()
    )


def report(*pairs: PairSummary, invalid: tuple[InvalidPair, ...] = ()) -> ReportSummary:
    return ReportSummary(
        format_version=1,
        trace=TraceIdentity(
            path="audit",
            model="demo",
            model_fingerprint="a1b2c3d4e5f6a7b8",
            tokenizer_fingerprint=None,
            trace_sha256="beef" * 16,
            prompts_sha256="cafe" * 16,
            sources=("greedy",),
            sequences=8,
            output_tokens=1024,
            vocabulary_size=49152,
            tokenizer_size=49149,
        ),
        baseline="record",
        pairs=pairs or (pair(),),
        invalid=invalid,
        next_commands=(("trace-audit diff show audit --candidate bf16-sdpa", "the worst tokens"),),
    )
