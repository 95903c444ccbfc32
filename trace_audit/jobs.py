"""What a run is asked to do, and what it tells while doing it.

Jobs and events cross a process boundary: everything in them can be pickled, and nothing here needs
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trace_audit.config import RunConfig
from trace_audit.errors import TraceAuditError

RepeatKind: TypeAlias = Literal["rerun", "batch"]
"""The same schedule in another process; another order and other neighbours."""


@dataclass(frozen=True, kw_only=True)
class RecordJob:
    """Record a trace.

    Attributes:
        model: a model directory, a hub id, or `demo`, as the user gave it.
        prompts_path: the prompts file.
        output: the audit directory to make.
        config: as requested; the run resolves it.
        max_tokens: the most tokens generated for a prompt.
        temperature: 0 is greedy.
        seed: of sampling and of the support's tail draws.
        ignore_eos: generate past the end-of-sequence token.
        stop_token_ids: ids that end a sequence, besides the model's own.
        stop_strings: texts that end a sequence.
        exact_positions: positions whose whole distribution is kept; 0: none.
        force: replace what is in the way.
    """

    model: str
    prompts_path: Path
    output: Path
    config: RunConfig
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    exact_positions: int
    force: bool


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """Replay a recorded trace under a configuration.

    Attributes:
        audit: the audit directory.
        config: as requested; the run resolves it.
        run_name: the run's name in the audit.
        model: another checkpoint to replay on, None for the recorded one.
        model_path: where the recorded model is now, None for where it was.
        only: ids of the sequences to replay, empty for all.
        repeat_of: the run that this one repeats to measure a noise floor.
        repeat_kind: how it repeats it; no matter where it repeats none.
        force: replace a run of this name.
    """

    audit: Path
    config: RunConfig
    run_name: str
    model: str | None
    model_path: Path | None
    only: tuple[str, ...]
    repeat_of: str | None
    force: bool
    repeat_kind: RepeatKind = "rerun"


Job: TypeAlias = RecordJob | ReplayJob


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How one rank finds the others.

    Attributes:
        rank: of all ranks; rank 0 leads.
        world_size: how many ranks there are.
        local_rank: of the ranks on this machine; it picks the device.
        local_world_size: how many ranks are on this machine.
        store: where the ranks meet: `file:///PATH`, or `tcp://HOST:PORT` that another process
            serves.
        key: prefixes every key of this run in the store.
        timeout_seconds: how long a rank waits for another.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: str
    key: str
    timeout_seconds: int


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a host of this name."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True)
class Stage:
    """What the run is doing now, as a short phrase: `loading the model`."""

    text: str


@dataclass(frozen=True)
class Progress:
    """Output tokens finished so far, those of resumed shards included."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Message:
    """Something the user should know, as a full sentence."""

    text: str


@dataclass(frozen=True)
class Done:
    """The run is complete; `result` says what it made."""

    result: dict[str, Any]


FailureKind: TypeAlias = Literal["typed", "unexpected", "connection", "timeout"]
"""Raised on purpose; not foreseen; another rank was lost; another rank did not answer."""


@dataclass(frozen=True)
class Failed:
    """The run ended with an error; `traceback` is for `--debug` only."""

    error: TraceAuditError
    traceback: str
    kind: FailureKind


Event: TypeAlias = Stage | Progress | Message | Done | Failed
