"""A run of several ranks: each a process, one world, the first failure named, none left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import rank_targets
from tests.processes import wait_until_dead
from tests.test_runner import make_job
from trace_audit.config import override
from trace_audit.errors import (
    ConfigError,
    InvalidComparisonError,
    RunFailedError,
    TraceAuditError,
)
from trace_audit.jobs import Event, Message, Progress, RecordJob, Stage
from trace_audit.runner import ServerTarget, Target, processes, run_job, supervision

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="waits on process descriptors")


def world_job(ranks: int = 2, timeout_seconds: int = 120, device: str = "cpu") -> RecordJob:
    job = make_job(device)
    parallel = {
        "parallel.tensor_parallel_size": ranks,
        "parallel.backend": "process",
        "parallel.timeout_seconds": timeout_seconds,
    }
    return RecordJob(**{**vars(job), "config": override(job.config, parallel)})


class Run:
    """A run of fake ranks, with what it told and the processes that it told of."""

    def __init__(self, job: RecordJob, lead: Target, serve: ServerTarget) -> None:
        self.job, self.lead, self.serve = job, lead, serve
        self.events: list[Event] = []
        self.seconds = 0.0

    def result(self) -> dict[str, Any]:
        started = time.monotonic()
        try:
            return run_job(self.job, self.events.append, target=self.lead, server=self.serve)
        finally:
            self.seconds = time.monotonic() - started

    def error(self) -> TraceAuditError:
        with pytest.raises(TraceAuditError) as caught:
            self.result()
        return caught.value

    @property
    def pids(self) -> list[int]:
        texts = [event.text for event in self.events if isinstance(event, Message)]
        return [int(word) for text in texts for word in text.partition("pids ")[2].split()]

    def assert_nothing_is_left(self, num_ranks: int) -> None:
        assert len(self.pids) == 2 * num_ranks
        assert wait_until_dead(self.pids, seconds=1)
        assert living_of_groups(self.pids[::2]) == []


def living_of_groups(groups: list[int]) -> list[str]:
    """Processes of these process groups that have not ended, whoever is to reap them."""
    living = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            text = path.read_text()
            state, _, group = text.rpartition(")")[2].split()[:3]
            if int(group) in groups and state != "Z":
                living.append(text)
    return living


def test_ranks_meet_and_rank_0_tells_and_gives_the_result(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = Run(world_job(3), rank_targets.lead_total, rank_targets.serve_total)
    result = run.result()
    assert result["total"] == 111
    environment = {"TRITON_INTERPRET": "1", "CUBLAS_WORKSPACE_CONFIG": None}
    assert result["environment"] == environment
    rendezvous = result["rendezvous"]
    assert (rendezvous.rank, rendezvous.world_size) == (0, 3)
    assert (rendezvous.local_rank, rendezvous.local_world_size) == (0, 3)
    assert not Path(rendezvous.store.removeprefix("file://")).parent.exists()
    told = [event for event in run.events if "rank 1 of 3" not in str(event)]
    assert told == [Stage("adding"), Progress(1, 2), Message("watch out")]
    assert Message(f"rank 1 of 3: 111 {sorted(environment.items())}") in run.events
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("noise of a library") == 2


def test_the_environment_of_a_gpu_run_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run = Run(world_job(device="cuda"), rank_targets.lead_total, rank_targets.serve_total)
    environment = {"TRITON_INTERPRET": None, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert run.result()["environment"] == environment
    assert Message(f"rank 1 of 2: 11 {sorted(environment.items())}") in run.events


def test_one_rank_may_talk_to_itself() -> None:
    run = Run(world_job(1), rank_targets.lead_total, rank_targets.serve_total)
    assert run.result()["total"] == 1


def test_without_a_process_group_there_is_no_rendezvous() -> None:
    run = Run(make_job(), rank_targets.lead_without_torch, rank_targets.serve_total)
    result = run.result()
    assert result["rendezvous"] is None
    assert not result["torch_is_loaded"]


def test_two_worlds_at_once_do_not_meet() -> None:
    """Case 33: free ports and stores of their own."""
    job = world_job(2)
    runs = [Run(job, rank_targets.lead_total, rank_targets.serve_total) for _ in range(2)]
    results: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda r=run: results.append(r.result())) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result["total"] for result in results] == [11, 11]
    assert len({result["rendezvous"].store for result in results}) == 2


@pytest.mark.parametrize(
    ("serve", "expected", "message"),
    [
        (rank_targets.serve_and_break, RunFailedError, "rank 1 of 2: .*ZeroDivisionError: first"),
        (rank_targets.serve_and_leave, RunFailedError, "rank 1 of 2: .*exit code 0 and no result"),
        (rank_targets.serve_and_refuse, InvalidComparisonError, "rank 1 of 2: these do not comp"),
        (rank_targets.serve_and_die, RunFailedError, "rank 1 of 2: .*killed by SIGKILL"),
    ],
)
def test_the_rank_that_fails_is_named_and_all_end(
    serve: ServerTarget, expected: type[TraceAuditError], message: str
) -> None:
    run = Run(world_job(2), rank_targets.lead_and_wait, serve)
    error = run.error()
    assert type(error) is expected
    assert re.match(message, error.message)
    assert "\n" not in error.message
    assert run.seconds < 60
    run.assert_nothing_is_left(2)
    if serve is rank_targets.serve_and_refuse:
        assert error.hint == "take others"
        assert "in serve_and_refuse" in "".join(error.__notes__)


def test_rank_0s_own_error_is_not_masked_by_those_who_lost_it() -> None:
    run = Run(world_job(3), rank_targets.lead_wrongly, rank_targets.serve_and_wait)
    error = run.error()
    assert isinstance(error, ConfigError)
    assert error.message == "rank 0 of 3: the key is wrong"


def test_what_every_rank_says_is_not_one_ranks_error() -> None:
    run = Run(world_job(), rank_targets.lead_wrongly, rank_targets.serve_and_refuse_the_same)
    error = run.error()
    assert isinstance(error, ConfigError)
    assert error.message == "the key is wrong"


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(supervision, "CAUSE_SECONDS", 1.5)
    run = Run(world_job(3, 3), rank_targets.lead_and_wait, rank_targets.serve_and_stop)
    error = run.error()
    assert isinstance(error, RunFailedError)
    assert error.message == "rank 1 of 3 did not answer for 3 s"
    assert "timeout_seconds" in (error.hint or "")
    assert run.seconds < 60
    run.assert_nothing_is_left(3)


def test_a_complete_run_stands_though_another_rank_fails_then() -> None:
    run = Run(world_job(), rank_targets.lead_total, rank_targets.serve_and_fail_at_the_end)
    assert run.result()["total"] == 11
    assert Message("rank 1 of 2: after the run was complete: too late") in run.events


def test_a_rank_that_does_not_end_after_a_complete_run_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    run = Run(world_job(), rank_targets.lead_total, rank_targets.serve_and_linger)
    assert run.result()["total"] == 11
    assert "did not end by itself" in str(run.events)
    run.assert_nothing_is_left(1)


def test_an_interrupt_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    run = Run(world_job(), rank_targets.lead_deaf, rank_targets.serve_deaf)

    def on_event(event: Event) -> None:
        run.events.append(event)
        if len(run.pids) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(run.job, on_event, target=run.lead, server=run.serve)
    run.assert_nothing_is_left(2)


_PARENT = """
from tests import rank_targets, test_runner_ranks
from trace_audit.runner import run_job
if __name__ == "__main__":
    say = lambda event: print(event.text.partition("pids")[2], flush=True)
    job = test_runner_ranks.world_job()
    run_job(job, say, target=rank_targets.lead_deaf, server=rank_targets.serve_deaf)
"""


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT, encoding="utf-8")
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(2)]
        pids = [int(word) for line in lines for word in line.split()]
        assert len(pids) == 4
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
        assert wait_until_dead(pids, seconds=10)
