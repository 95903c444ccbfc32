"""Runs one after the other: lines for finished ones, and what a failure does to the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trace_audit.cli.execute import execute_all
from trace_audit.config import default_record_config
from trace_audit.errors import ConfigError, RunFailedError, TraceAuditError
from trace_audit.jobs import Event, Job, ReplayJob, Stage

Outcome = TraceAuditError | BaseException | None


def make_job(name: str) -> ReplayJob:
    return ReplayJob(
        audit=Path("audit"),
        config=default_record_config(),
        run_name=name,
        model=None,
        model_path=None,
        only=(),
        repeat_of=None,
        force=False,
    )


class Runs:
    """Stands in for real runs: each ends as told, and what was started is kept."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes = outcomes
        self.started: list[str] = []

    def __call__(self, job: Job, on_event: Callable[[Event], None]) -> dict[str, Any]:
        assert isinstance(job, ReplayJob)
        self.started.append(job.run_name)
        on_event(Stage("working"))
        outcome = self.outcomes[job.run_name]
        if outcome is not None:
            raise outcome
        return {
            "run": job.run_name,
            "sequences": 2,
            "tokens": 5,
            "tokens_per_second": 12.345,
            "path": f"audit/runs/{job.run_name}",
            "resumed_shards": 1 if job.run_name == "resumed" else 0,
        }

    def execute(self, *, keep_going: bool = False) -> int:
        jobs = [make_job(name) for name in self.outcomes]
        return execute_all(jobs, keep_going=keep_going, debug=False, run=self)


def test_a_line_a_finished_run_and_nothing_else_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Runs(a=None, b=None).execute() == 0
    captured = capsys.readouterr()
    assert captured.out == "a\t2\t5\t12.3\taudit/runs/a\nb\t2\t5\t12.3\taudit/runs/b\n"
    assert captured.err == "a: working\nb: working\n"


def test_a_resumed_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Runs(resumed=None).execute()
    assert "resumed: went on from 1 finished shard\n" in capsys.readouterr().err


def test_a_failure_stops_the_rest() -> None:
    runs = Runs(a=None, b=ConfigError("wrong"), c=None)
    with pytest.raises(ConfigError):
        runs.execute()
    assert runs.started == ["a", "b"]


def test_keep_going_runs_the_rest_and_exits_with_the_worst(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = Runs(a=ConfigError("wrong", hint="mend it"), b=RunFailedError("gone"), c=None)
    assert runs.execute(keep_going=True) == 70
    assert runs.started == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert [line.split("\t")[0] for line in captured.out.splitlines()] == ["c"]
    assert "a failed:\nerror: wrong.\nhint: mend it.\n" in captured.err
    assert "b failed:\nerror: gone.\n" in captured.err


@pytest.mark.parametrize("keep_going", [False, True])
def test_an_interrupt_stops_everything_and_says_how_to_go_on(
    keep_going: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(a=KeyboardInterrupt(), b=None)
    with pytest.raises(KeyboardInterrupt):
        runs.execute(keep_going=keep_going)
    assert runs.started == ["a"]
    assert "a: unfinished" in capsys.readouterr().err
