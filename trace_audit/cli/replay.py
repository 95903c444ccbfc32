"""`trace-audit replay`: score the recorded tokens under other configurations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trace_audit.errors import UsageError

if TYPE_CHECKING:
    from trace_audit.jobs import RepeatKind


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--config",
    "config_paths",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="TOML",
    help="A configuration to replay under; repeatable, a run each.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=V1,V2",
    help="Change a key of every configuration; several values make a run each.",
)
@click.option("--name", metavar="NAME", help="The run's name, where there is one run.")
@click.option("--model", metavar="OTHER", help="Replay on another checkpoint of the vocabulary.")
@click.option(
    "--model-path",
    type=click.Path(path_type=Path),
    metavar="MOVED",
    help="Where the recorded model is now.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Run every configuration N times, to see whether it repeats.",
)
@click.option(
    "--repeat-kind",
    "repeat_kinds",
    type=click.Choice(["rerun", "batch"]),
    multiple=True,
    metavar="KIND",
    help="What repeats change: rerun (nothing) or batch (the batch order); repeatable.  "
    "[default: rerun]",
)
@click.option("--only", multiple=True, metavar="ID", help="Replay this sequence; repeatable.")
@click.option("--keep-going", is_flag=True, help="Go on with the next run after a failed one.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the runs, their tokens and a rank's KV bytes; stop. Keys that contradict each "
    "other are refused; what the machine or the model refuses is found when a run starts.",
)
@click.option("--force", is_flag=True, help="Replace runs of the same name.")
@click.pass_context
def replay(
    context: click.Context,
    directory: Path,
    config_paths: tuple[Path, ...],
    sets: tuple[str, ...],
    name: str | None,
    model: str | None,
    model_path: Path | None,
    repeat: int,
    repeat_kinds: tuple[RepeatKind, ...],
    only: tuple[str, ...],
    keep_going: bool,
    dry_run: bool,
    force: bool,
) -> int:
    """Replay a trace under other configurations.

    DIRECTORY is an audit. A run is called --name, else its configuration's name with what --set
    gave appended, else that with -2, -3. Prints one line a finished run: run, sequences, tokens,
    tokens/s and path, split by tabs.
    """
    from trace_audit.cli.dry_run import describe_runs
    from trace_audit.cli.execute import execute_all
    from trace_audit.cli.plan import check_sequences, check_shuffles, plan_runs, replay_jobs
    from trace_audit.cli.ranks import RunJob, as_rank
    from trace_audit.config.resolve import check_keys
    from trace_audit.storage.audit_dir import AuditDir

    def work(run: RunJob) -> int:
        _check_models(model, model_path)
        audit = AuditDir.open(directory)
        check_sequences(audit, only)
        kinds = _checked_kinds(repeat_kinds, repeat)
        runs = plan_runs(
            audit, config_paths, sets, name=name, repeat=repeat, repeat_kinds=kinds, force=force
        )
        check_shuffles(audit, runs, only)
        for planned in runs:
            check_keys(planned.config)
        if dry_run:
            where = Path(model or model_path or audit.info.model_path)
            click.echo(describe_runs(audit, runs, model_directory=where, only=only), nl=False)
            return 0
        jobs = replay_jobs(audit, runs, model=model, model_path=model_path, only=only, force=force)
        debug = context.find_root().params["debug"]
        return execute_all(jobs, keep_going=keep_going, debug=debug, run=run)

    return as_rank(work)


def _check_models(model: str | None, model_path: Path | None) -> None:
    if model == "":
        raise UsageError("--model is empty", hint="name a model, or leave the option out")
    if model is not None and model_path is not None:
        raise UsageError(
            "--model and --model-path exclude each other",
            hint="--model is another model; --model-path is where the recorded one moved",
        )


def _checked_kinds(kinds: tuple[RepeatKind, ...], repeat: int) -> tuple[RepeatKind, ...]:
    if kinds and repeat == 1:
        raise UsageError("--repeat-kind has no effect without --repeat", hint="add --repeat 2")
    return tuple(dict.fromkeys(kinds)) or ("rerun",)
