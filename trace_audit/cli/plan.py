"""Which runs a `replay` command means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trace_audit.cli.run_names import base_name, checked_name, free_name
from trace_audit.cli.unfinished import unfinished_runs
from trace_audit.config import RunConfig, load_config, override, parse_set
from trace_audit.errors import UsageError
from trace_audit.jobs import RepeatKind, ReplayJob
from trace_audit.storage.audit_dir import AuditDir

_REPEAT_NAMES: dict[RepeatKind, str] = {"rerun": "repeat", "batch": "batch"}
_NUM_SEEDS = 2**31  # values that a seed of the configuration can take


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a replay command.

    Attributes:
        name: the run's name in the audit.
        config: as requested.
        repeat_of: the run that this one repeats, None for a first one.
        repeat_kind: how it repeats it.
    """

    name: str
    config: RunConfig
    repeat_of: str | None
    repeat_kind: RepeatKind = "rerun"


def plan_runs(
    audit: AuditDir,
    config_paths: Sequence[Path],
    sets: Sequence[str],
    *,
    name: str | None,
    repeat: int,
    repeat_kinds: Sequence[RepeatKind] = ("rerun",),
    force: bool,
) -> list[PlannedRun]:
    """Every configuration with every combination of `--set`, `repeat` times each, named.

    Args:
        repeat: runs of a configuration; of several kinds, each has repeats of its own.
        repeat_kinds: what repeats change.

    Raises:
        ConfigError: a configuration, an override or a name is wrong.
        UsageError: `name` is given to several runs.
    """
    overrides = parse_set(sets)
    configs = [load_config(path) for path in config_paths]
    wanted = [(config, change) for config in configs for change in overrides]
    if name is not None and len(wanted) > 1:
        raise UsageError(
            f"--name {name} names one run, and {len(wanted)} were asked for",
            hint="leave out --name: runs are called by their configuration and what --set changed",
        )
    unfinished = unfinished_runs(audit)
    taken = {*audit.run_names(), *unfinished.running}
    runs: list[PlannedRun] = []
    for config, change in wanted:
        if name is not None:
            chosen = checked_name(name)
        else:
            base = base_name(config.name, change)
            chosen = free_name(base, taken=taken, interrupted=unfinished.interrupted, force=force)
        _check_distinct(chosen, runs)
        first = PlannedRun(name=chosen, config=override(config, change), repeat_of=None)
        runs += [first, *_repeats(first, repeat, repeat_kinds)]
        taken |= {run.name for run in runs}
    return runs


def replay_jobs(
    audit: AuditDir,
    runs: Sequence[PlannedRun],
    *,
    model: str | None,
    model_path: Path | None,
    only: tuple[str, ...],
    force: bool,
) -> list[ReplayJob]:
    """The job of every run; what is not planned is the same for all."""
    return [
        ReplayJob(
            audit=audit.path,
            config=run.config,
            run_name=run.name,
            model=model,
            model_path=model_path,
            only=only,
            repeat_of=run.repeat_of,
            repeat_kind=run.repeat_kind,
            force=force,
        )
        for run in runs
    ]


def check_sequences(audit: AuditDir, only: Sequence[str]) -> None:
    """Refuse ids that the trace does not have.

    Raises:
        UsageError: names the first such id and the nearest that exists.
    """
    if not only:
        return
    known = [sequence.sequence_id for sequence in audit.read_trace()]
    for sequence_id in only:
        if sequence_id not in known:
            near = difflib.get_close_matches(sequence_id, known, n=1)
            raise UsageError(
                f"--only {sequence_id!r} is no sequence of {audit.path}",
                hint=f"did you mean {near[0]!r}?" if near else f"the first one is {known[0]!r}",
            )


def _check_distinct(name: str, runs: Sequence[PlannedRun]) -> None:
    # Without --force the second would have got another name; with it, it would replace the first.
    if any(run.name == name for run in runs):
        raise UsageError(
            f"two of the runs asked for are called {name}",
            hint="give the configurations different names, or leave out --force",
        )


def check_shuffles(audit: AuditDir, runs: Sequence[PlannedRun], only: Sequence[str]) -> None:
    """Refuse repeats in another batch order where there is only one order.

    Raises:
        UsageError: names the first such run.
    """
    num_sequences = len(set(only)) or audit.info.num_sequences
    for run in runs:
        engine = run.config.engine
        shard_size = engine.shard_size or 8 * engine.max_num_seqs
        if run.repeat_kind == "batch" and min(num_sequences, shard_size) < 2:
            raise UsageError(
                f"{run.name} would repeat the order of {run.repeat_of}: its shards have one "
                "sequence each",
                hint="replay more sequences, raise shard_size, or use --repeat-kind rerun",
            )


def _repeats(first: PlannedRun, repeat: int, kinds: Sequence[RepeatKind]) -> list[PlannedRun]:
    return [
        replace(
            first,
            name=checked_name(f"{first.name}-{_REPEAT_NAMES[kind]}{number}"),
            config=first.config if kind == "rerun" else _shuffled(first.config, number - 1),
            repeat_of=first.name,
            repeat_kind=kind,
        )
        for kind in kinds
        for number in range(2, repeat + 1)
    ]


def _shuffled(config: RunConfig, by: int) -> RunConfig:
    """The same configuration with a batch order of its own."""
    seed = (config.engine.batch_order_seed + by) % _NUM_SEEDS
    return override(config, {"engine.batch_order_seed": seed})
