"""Runs a job in processes of its own, one a rank, and leaves none behind.

Interpreter, precision and thread settings are process-wide, so every run gets fresh spawned
processes. Each leads its own process group: what it starts ends with it. It ends when the process
that started it ends, however that happens, and that process learns from its pipe when it died.
"""

from __future__ import annotations

from trace_audit.runner.child import ServerTarget, Target, runs_on_cpu
from trace_audit.runner.failures import as_trace_audit_error
from trace_audit.runner.local import run_job

__all__ = ["ServerTarget", "Target", "as_trace_audit_error", "run_job", "runs_on_cpu"]
