"""What run.json says of a run that this engine computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trace_audit.acceptance import acceptance
from trace_audit.config import RunConfig, distribution_of
from trace_audit.ranks import OpenEngine
from trace_audit.run_setup import Setup, digest
from trace_audit.storage.shards import ShardWriter


def run_info(
    *,
    requested: RunConfig,
    setup: Setup,
    opened: OpenEngine,
    writer: ShardWriter,
    model: str,
    model_fingerprint: str,
    started: float,
    resumed_shards: int,
) -> dict[str, Any]:
    """The parts that record and replay share; ends the other ranks.

    Args:
        requested: the configuration as the user gave it.
        setup: what it was resolved to, and where it ran.
        opened: the engine, its work being done.
        writer: of the run; all its shards are finished.
        model: as the user named it.
        model_fingerprint: of its files.
        started: `time.perf_counter()` when the run began.
        resumed_shards: how many were finished by an earlier attempt.
    """
    seconds = writer.engine_seconds
    ranks = opened.finish()
    scored = distribution_of(setup.config.scoring).within(opened.loaded.vocabulary_size)
    return {
        "model": model,
        "model_fingerprint": model_fingerprint,
        "draft_model_fingerprint": None if setup.draft is None else setup.draft.fingerprint,
        "vocabulary_size": opened.loaded.vocabulary_size,
        "requested_config": requested.model_dump(),
        "resolved_config": setup.config.model_dump(),
        "environment": dict(setup.environment),
        "environment_fingerprint": _fingerprint(ranks["reports"]),
        "backends": opened.built.backends,
        "ranks": ranks,
        "num_kv_blocks": opened.built.num_kv_blocks,
        "logprobs": "raw" if scored.is_raw else "processed",
        "capabilities": {"statistics": "exact"},
        "routing": None if opened.loaded.routing is None else asdict(opened.loaded.routing),
        "acceptance": acceptance(writer.counters()),
        "resumed_shards": resumed_shards,
        "timing": {
            "load_seconds": opened.load_seconds,
            "engine_seconds": seconds,
            "wall_seconds": time.perf_counter() - started,
            "tokens_per_second": writer.finished_tokens / seconds if seconds else None,
        },
    }


def _fingerprint(reports: Sequence[Mapping[str, Any]]) -> str:
    """Of the environment that all ranks share; of all of them in order where they differ."""
    prints = [report["environment_fingerprint"] for report in reports]
    return str(prints[0]) if len(set(prints)) == 1 else digest({"ranks": prints})


def run_result(
    name: str, path: object, sequences: int, writer: ShardWriter, resumed: int
) -> dict[str, Any]:
    """What a finished run tells the command that asked for it."""
    tokens, seconds = writer.finished_tokens, writer.engine_seconds
    return {
        "run": name,
        "path": str(path),
        "sequences": sequences,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "resumed_shards": resumed,
    }
