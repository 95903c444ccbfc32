"""What a replay would do, told without loading the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_audit.cli.plan import PlannedRun
from trace_audit.cli.table import format_table
from trace_audit.config import EngineConfig, ParallelConfig
from trace_audit.config.kv_formats import KV_FORMATS, KVFormat
from trace_audit.storage.audit_dir import AuditDir


def describe_runs(
    audit: AuditDir, runs: Sequence[PlannedRun], *, model_directory: Path, only: Sequence[str]
) -> str:
    """A table of the runs: sequences, output tokens, ranks, and a rank's bytes of KV cache.

    The KV cache is the one the configuration wants; a run takes less where memory is short. It is
    that of the rank with the most layers. Emulated ranks keep all their caches on one device. A
    draft model's own cache is not counted.
    """
    sequences = [s for s in audit.read_trace() if not only or s.sequence_id in only]
    lengths = [len(s.prompt_token_ids) + len(s.output_token_ids) for s in sequences]
    tokens = sum(len(s.output_token_ids) for s in sequences)
    rows = []
    for run in runs:
        engine, parallel = run.config.engine, run.config.parallel
        kv_cache_dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
        per_token = kv_bytes_per_token(model_directory, parallel, KV_FORMATS[kv_cache_dtype])
        kv_bytes = "n/a" if per_token is None else per_token * _kv_tokens(engine, max(lengths))
        rows.append((run.name, len(sequences), tokens, parallel.world_size, kv_bytes))
    return format_table(("run", "sequences", "tokens", "ranks", "kv_bytes_per_rank"), rows)


def kv_bytes_per_token(
    model_directory: Path, parallel: ParallelConfig, stored: KVFormat
) -> int | None:
    """Bytes of the keys and values a token leaves in all layers of a rank together.

    Layers are shared out over stages, of which the largest counts, and KV heads over
    tensor-parallel ranks; where there are more ranks than KV heads, each rank has one.

    Returns:
        None where the model's config.json is not there or does not say it in the usual keys.
    """
    try:
        text = (model_directory / "config.json").read_text(encoding="utf-8")
    except OSError:
        return None
    config: dict[str, Any] = json.loads(text)
    config = config.get("text_config", config)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    width = config.get("head_dim")
    if width is None and heads and config.get("hidden_size"):
        width = config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if not layers or not kv_heads or not width or "kv_lora_rank" in config:
        return None
    stage_layers = -(-layers // parallel.pipeline_parallel_size)
    rank_kv_heads = -(-kv_heads // parallel.tensor_parallel_size)
    return int(2 * stage_layers * rank_kv_heads * stored.bytes_of(width))


def _kv_tokens(engine: EngineConfig, max_length: int) -> int:
    """Cache slots: the blocks asked for, or every sequence slot at full length."""
    max_length = max(max_length, engine.max_model_len)
    per_sequence = -(-max_length // engine.block_size)
    blocks = engine.num_kv_blocks or engine.num_slots * per_sequence
    return blocks * engine.block_size
