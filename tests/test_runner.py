"""A run's own process: what it tells, how it fails, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests import runner_targets
from tests.processes import wait_until_dead
from trace_audit.config import default_record_config, override
from trace_audit.errors import ConfigError, RunFailedError
from trace_audit.jobs import Event, Job, Message, Progress, RecordJob, ReplayJob, Stage
from trace_audit.runner import Target, processes, run_job, runs_on_cpu

needs_pidfd = pytest.mark.skipif(sys.platform != "linux", reason="waits on process descriptors")


def make_job(device: str = "cpu") -> RecordJob:
    return RecordJob(
        model="demo",
        prompts_path=Path("prompts.jsonl"),
        output=Path("audit"),
        config=override(default_record_config(), {"engine.device": device}),
        max_tokens=4,
        temperature=0.0,
        seed=0,
        ignore_eos=True,
        stop_token_ids=(2,),
        stop_strings=("end",),
        exact_positions=0,
        force=False,
    )


def test_events_arrive_in_order_and_the_result_comes_back() -> None:
    events: list[Event] = []
    result = run_job(make_job(), events.append, target=runner_targets.tell)
    assert events == [Stage("loading"), Progress(1, 2), Message("watch out")]
    assert result["job"] == make_job()


def test_a_replay_job_arrives_as_it_was() -> None:
    job: Job = ReplayJob(
        audit=Path("audit"),
        config=default_record_config(),
        run_name="x",
        model=None,
        model_path=Path("moved"),
        only=("a",),
        repeat_of="y",
        force=True,
    )
    assert run_job(job, lambda event: None, target=runner_targets.tell)["job"] == job


def test_every_run_is_a_process_of_its_own_without_torch_until_it_asks() -> None:
    first = run_job(make_job(), lambda event: None, target=runner_targets.tell)
    second = run_job(make_job(), lambda event: None, target=runner_targets.tell)
    assert first["pid"] != second["pid"]
    assert not first["torch_is_loaded"]


@pytest.mark.parametrize(("device", "expected"), [("cpu", "1"), ("cuda", None)])
def test_triton_is_interpreted_only_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: str | None
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = run_job(make_job(device), lambda event: None, target=runner_targets.tell)
    assert result["triton_interpret"] == expected


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_hidden_devices_mean_a_cpu(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runs_on_cpu("auto")
    assert not runs_on_cpu("cuda")


@pytest.mark.parametrize(("nodes", "expected"), [([], True), (["/dev/nvidia3"], False)])
def test_a_device_node_means_a_gpu(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], expected: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: nodes)
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert runs_on_cpu("auto") is expected


def test_a_typed_error_keeps_its_type_hint_and_traceback() -> None:
    with pytest.raises(ConfigError, match="the key is wrong") as caught:
        run_job(make_job(), lambda event: None, target=runner_targets.refuse)
    assert caught.value.hint == "use another"
    assert "in refuse" in "".join(traceback.format_exception(caught.value))


def test_an_unplanned_error_is_one_sentence() -> None:
    with pytest.raises(RunFailedError) as caught:
        run_job(make_job(), lambda event: None, target=runner_targets.break_down)
    assert "ZeroDivisionError: first line" in caught.value.message
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message


def test_a_full_disk_is_said_in_words() -> None:
    with pytest.raises(RunFailedError, match=r"the disk is full.*shard-0") as caught:
        run_job(make_job(), lambda event: None, target=runner_targets.fill_the_disk)
    assert caught.value.hint is not None


def test_a_killed_run_names_the_signal() -> None:
    with pytest.raises(RunFailedError, match="killed by SIGKILL") as caught:
        run_job(make_job(), lambda event: None, target=runner_targets.die)
    assert "memory" in (caught.value.hint or "")


def test_a_run_that_ends_without_a_result_fails() -> None:
    with pytest.raises(RunFailedError, match="exit code 3"):
        run_job(make_job(), lambda event: None, target=runner_targets.leave)


def test_what_a_library_prints_does_not_reach_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_job(make_job(), lambda event: None, target=runner_targets.print_noise)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "noise from python" in captured.err
    assert "noise from elsewhere" in captured.err


def test_a_process_that_lingers_after_its_result_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    assert run_job(make_job(), lambda event: None, target=runner_targets.finish_slowly)["done"]


@needs_pidfd
@pytest.mark.parametrize("target", [runner_targets.hang, runner_targets.hang_deaf])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, BrokenPipeError])
def test_an_interrupt_ends_the_run_and_what_it_started(
    monkeypatch: pytest.MonkeyPatch, target: Target, interrupt: type[BaseException]
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    pids: list[int] = []

    def on_event(event: Event) -> None:
        assert isinstance(event, Stage)
        pids.extend(map(int, event.text.split()))
        raise interrupt

    with pytest.raises(interrupt):
        run_job(make_job(), on_event, target=target)
    assert len(pids) == 2
    assert wait_until_dead(pids, seconds=0.5)


_PARENT = """
import signal
import sys
from tests import runner_targets, test_runner
from trace_audit.runner import run_job
if __name__ == "__main__":
    # Under nohup it would be born deaf to this one.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    say = lambda event: print(event.text, flush=True)
    run_job(test_runner.make_job(), say, target=runner_targets.hang_deaf)
"""


@needs_pidfd
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_a_killed_parent(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT, encoding="utf-8")
    root = Path(__file__).parent.parent
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        assert parent.wait(timeout=10) == -number
        assert wait_until_dead(pids, seconds=10)
