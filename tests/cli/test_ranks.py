"""Ranks whose commands were started one by one: by hand, and by torchrun."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.small_audit import make_audit
from tests.processes import wait_until_dead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="waits on process descriptors")

ROOT = Path(__file__).parent.parent.parent
SECONDS = 90  # generous: two interpreters that import torch, on a machine that does other things

# The whole command line, with runs that need no model.
_SCRIPT = """
import os
import sys
from tests import rank_targets
from trace_audit.cli.main import run
from trace_audit.runner import channel, child, processes, service, supervision
if __name__ == "__main__":
    child.execute_audit = getattr(rank_targets, os.environ["TEST_LEAD"])
    child.serve_audit = getattr(rank_targets, os.environ["TEST_SERVE"])
    channel.JOIN_SECONDS = int(os.environ.get("TEST_JOIN_SECONDS", "300"))
    service._LEAST_PATIENCE_SECONDS = 2.0
    supervision.CAUSE_SECONDS = processes.GRACE_SECONDS = 1.0
    sys.exit(run(sys.argv[1:]))
"""


@dataclass(kw_only=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    output: str
    errors: str


class Cluster:
    """Commands of several ranks on one machine, and where they meet."""

    def __init__(self, directory: Path, stack: ExitStack, lead: str, serve: str) -> None:
        self.directory, self._stack = directory, stack
        self.script, self.port = directory / "script.py", free_port()
        self.script.write_text(_SCRIPT, encoding="utf-8")
        self.prompts = directory / "prompts.jsonl"
        self.prompts.write_text('{"prompt": "x"}\n', encoding="utf-8")
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("TRACE_")},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "TEST_LEAD": lead,
            "TEST_SERVE": serve,
        }

    def record(self, *more: str, ranks: int = 2) -> list[str]:
        """A `record` over so many ranks."""
        command = [sys.executable, str(self.script), "record", "demo"]
        command += ["--prompts", str(self.prompts), "-o", str(self.directory / "audit")]
        sets = ["engine.device=cpu", f"parallel.tensor_parallel_size={ranks}", *more]
        return command + [word for value in sets for word in ("--set", value)]

    def start(
        self, rank: int, command: list[str], world_size: int = 2, **more: str
    ) -> subprocess.Popen[str]:
        """Start a rank's command by hand."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        return self.popen(command, {**place, "MASTER_PORT": str(self.port), **more})

    def popen(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **environment},
            start_new_session=True,
        )
        self._stack.callback(_kill, process)
        return process


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def cluster(
    directory: Path, lead: str = "lead_total", serve: str = "serve_total"
) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(directory, stack, lead, serve)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[str]) -> Ended:
    output, errors = process.communicate(timeout=SECONDS)
    # torchrun's agents may tell of each other's end with a traceback of their own.
    assert "Traceback" not in errors or "torch.distributed.run" in process.args
    return Ended(code=process.returncode, output=output, errors=errors)


def pids_told(process: subprocess.Popen[str]) -> list[int]:
    """Read what a command says until it tells of its run's processes."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "pids " in line:
            return [int(word) for word in line.partition("pids ")[2].split()]
    raise AssertionError(said)


def test_rank_0_works_and_the_others_serve(tmp_path: Path) -> None:
    with cluster(tmp_path) as ranks:
        server = ranks.start(1, [sys.executable, str(ranks.script), "replay", "no", "--config=no"])
        leader = end(ranks.start(0, ranks.record()))
        served = end(server)
    assert (leader.code, served.code) == (0, 0)
    assert leader.output == "record\t1\t2\t3.0\tthere\n"
    assert served.output == ""
    assert "rank 1 of 2: warning: 11 " in served.errors
    assert "noise of a library" in served.errors


def test_runs_follow_each_other_and_so_do_commands(tmp_path: Path) -> None:
    make_audit(tmp_path / "given")
    config = tmp_path / "c.toml"
    config.write_text(
        'name = "c"\n[engine]\ndevice = "cpu"\n[parallel]\npipeline_parallel_size=2\n'
    )
    with cluster(tmp_path) as ranks:
        replay = [sys.executable, str(ranks.script), "replay", str(tmp_path / "given")]
        replay += ["--config", str(config), "--repeat", "2"]
        both = ["sh", "-c", f"{shlex.join(ranks.record())} && exec {shlex.join(replay)}"]
        served, leader = map(end, [ranks.start(rank, both) for rank in (1, 0)])
    assert (leader.code, served.code) == (0, 0), served.errors
    names = [line.split("\t")[0] for line in leader.output.splitlines()]
    assert names == ["record", "c", "c-repeat2"]
    assert served.output == ""
    assert served.errors.count("serving in run 1") == 2
    assert served.errors.count("serving in run 2") == 1


def test_under_torchrun(tmp_path: Path) -> None:
    with cluster(tmp_path) as ranks:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        torchrun += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        torchrun += ["--master-port", str(ranks.port)]
        started = [
            ranks.popen([*torchrun, "--node-rank", rank, *ranks.record()[1:]], {}) for rank in "01"
        ]
        leader, served = map(end, started)
    assert (leader.code, served.code) == (0, 0)
    assert leader.output == "record\t1\t2\t3.0\tthere\n"
    assert served.output == ""
    assert "rank 1 of 2: serving in run 1" in served.errors


def test_torchrun_with_two_ranks_on_a_machine(tmp_path: Path) -> None:
    with cluster(tmp_path) as ranks:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", "2"]
        done = end(ranks.popen([*torchrun, *ranks.record()[1:]], {}))
    assert done.code == 0
    assert done.output == "record\t1\t2\t3.0\tthere\n"


def test_a_configuration_for_other_ranks_ends_every_command(tmp_path: Path) -> None:
    message = "WORLD_SIZE is 2, and tensor_parallel_size x pipeline_parallel_size = 3"
    with cluster(tmp_path) as ranks:
        command = ranks.record(ranks=3)
        leader, served = map(end, [ranks.start(rank, command) for rank in (0, 1)])
    assert (leader.code, served.code) == (2, 2)
    assert message in leader.errors
    assert message in served.errors
    assert leader.output == served.output == ""


def test_another_ranks_error_is_rank_0s(tmp_path: Path) -> None:
    with cluster(tmp_path, "lead_and_wait", "serve_and_refuse") as ranks:
        leader, served = map(end, [ranks.start(rank, ranks.record()) for rank in (0, 1)])
    assert (leader.code, served.code) == (4, 4)
    assert "error: rank 1 of 2: these do not compare.\nhint: take others.\n" in leader.errors
    assert "error: rank 1 of 2: these do not compare.\n" in served.errors


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    with cluster(tmp_path, "lead_and_wait", "serve_and_wait_for_ever") as ranks:
        processes = [ranks.start(rank, ranks.record()) for rank in (0, 1)]
        pids = [pid for process in processes for pid in pids_told(process)]
        processes[1].kill()
        leader = end(processes[0])
        assert wait_until_dead(pids, seconds=10)
    assert leader.code == 70
    assert "the connection to rank 1 of 2 was lost" in leader.errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_0_that_is_gone_or_stuck_ends_the_others(
    tmp_path: Path, number: signal.Signals
) -> None:
    with cluster(tmp_path, "lead_and_wait", "serve_and_wait_for_ever") as ranks:
        command = ranks.record("parallel.timeout_seconds=3")
        processes = [ranks.start(rank, command) for rank in (0, 1)]
        pids = [pids_told(process) for process in processes]
        processes[0].send_signal(number)
        served = end(processes[1])
        assert wait_until_dead(pids[1], seconds=10)
        processes[0].kill()
        assert wait_until_dead(pids[0], seconds=10)
    assert served.code == 70
    said = "rank 0 of 2 is gone" if number == signal.SIGKILL else "did not answer for 3 s"
    assert said in served.errors


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_to_one_command_ends_all(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with cluster(tmp_path, "lead_and_wait", "serve_and_wait_for_ever") as ranks:
        processes = [ranks.start(rank, ranks.record()) for rank in (0, 1)]
        pids = [pid for process in processes for pid in pids_told(process)]
        first = number == signal.SIGINT
        processes[first].send_signal(number)
        ended = [end(process) for process in processes]
        assert wait_until_dead(pids, seconds=10)
    assert [command.code for command in ended] == ([70, code] if first else [code, 70])


def test_a_rank_that_waits_for_a_rank_0_that_never_comes(tmp_path: Path) -> None:
    with cluster(tmp_path) as ranks:
        served = end(ranks.start(1, ranks.record(), TEST_JOIN_SECONDS="1"))
        waiting = ranks.start(1, ranks.record())
        assert waiting.stderr is not None
        assert "waiting for rank 0" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        interrupted = end(waiting)
    assert served.code == 70
    assert "for 1 s" in served.errors
    assert interrupted.code == 130


def test_a_taken_port_is_the_users_to_change(tmp_path: Path) -> None:
    with cluster(tmp_path) as ranks, socket.socket() as other:
        other.bind(("", ranks.port))
        other.listen()
        leader = end(ranks.start(0, ranks.record()))
    assert leader.code == 2
    assert "MASTER_PORT" in leader.errors


def test_one_rank_of_one_needs_no_other(tmp_path: Path) -> None:
    with cluster(tmp_path) as ranks:
        command = ranks.record("parallel.backend=process", ranks=1)
        alone = end(ranks.start(0, command, world_size=1))
        refused = end(ranks.start(0, ranks.record(), world_size=1))
    assert alone.code == 0
    assert alone.output == "record\t1\t2\t3.0\tthere\n"
    assert refused.code == 2
    assert "WORLD_SIZE is 1" in refused.errors
