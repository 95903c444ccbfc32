"""The configuration of a run: validation, overrides, cross products, resolution.

A configuration is a frozen object read from TOML. `resolve` returns a new one in which every
automatic value is decided for a machine and a trace; both are stored with a run.
"""

from __future__ import annotations

from trace_audit.config.model import (
    MAX_NAME_LENGTH,
    MIN_TEMPERATURE,
    RUN_NAME_RULE,
    EngineConfig,
    ParallelConfig,
    RunConfig,
    ScoringConfig,
    SpeculativeConfig,
    default_record_config,
    is_run_name,
)
from trace_audit.config.overrides import flat, keys, override, parse_set
from trace_audit.config.resolve import Hardware, resolve
from trace_audit.config.scoring import Distribution, distribution_of
from trace_audit.config.validate import load_config

__all__ = [
    "MAX_NAME_LENGTH",
    "MIN_TEMPERATURE",
    "RUN_NAME_RULE",
    "Distribution",
    "EngineConfig",
    "Hardware",
    "ParallelConfig",
    "RunConfig",
    "ScoringConfig",
    "SpeculativeConfig",
    "default_record_config",
    "distribution_of",
    "flat",
    "is_run_name",
    "keys",
    "load_config",
    "override",
    "parse_set",
    "resolve",
]
