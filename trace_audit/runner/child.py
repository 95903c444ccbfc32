"""What runs inside a rank's process."""

from __future__ import annotations

import glob
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from trace_audit.jobs import Done, Event, Job, Message, Rendezvous
from trace_audit.runner.failures import failure_of

Emit: TypeAlias = Callable[[Event], None]
Target: TypeAlias = Callable[[Job, Emit, Rendezvous | None], dict[str, Any]]
ServerTarget: TypeAlias = Callable[[Rendezvous, Emit], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Lead:
    """A rank that has the job: the only one, or rank 0. `target` is pickled by name."""

    job: Job
    rendezvous: Rendezvous | None
    target: Target

    @property
    def device(self) -> str:
        """`engine.device` as requested."""
        return self.job.config.engine.device

    def compute(self, emit: Emit) -> dict[str, Any]:
        """Do the job."""
        return self.target(self.job, emit, self.rendezvous)


@dataclass(frozen=True, kw_only=True)
class Serve:
    """A rank that computes beside rank 0, which has the job."""

    device: str
    rendezvous: Rendezvous
    target: ServerTarget

    def compute(self, emit: Emit) -> dict[str, Any]:
        """Compute until rank 0 is done. Stages and progress are rank 0's to tell."""

        def emit_messages(event: Event) -> None:
            if isinstance(event, Message):
                emit(event)

        return self.target(self.rendezvous, emit_messages)


Task: TypeAlias = Lead | Serve


def execute_audit(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Record or replay: what a rank with the job does unless told otherwise."""
    from trace_audit.audit import execute

    return execute(job, emit, rendezvous)


def serve_audit(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Compute beside rank 0: what a rank without the job does unless told otherwise."""
    from trace_audit.audit import serve

    return serve(rendezvous, emit)


def runs_on_cpu(device: str) -> bool:
    """Whether a run with this `engine.device` will compute on the CPU, told without torch."""
    if device != "auto":
        return device == "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return True
    return not glob.glob("/dev/nvidia[0-9]*") and shutil.which("nvidia-smi") is None


def child_main(task: Task, sender: Connection) -> None:
    """The process's main function: what it tells goes into `sender`, its ending last."""
    # First: Triton reads this when it is imported, and a target may import it at once.
    if runs_on_cpu(task.device):
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        # cuBLAS may choose its workspace, and with it the order of sums, anew on every start.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # torchao, where it is installed, says on every import which of its kernels are for others.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.setpgid(0, 0)
    # A terminal's Ctrl-C is the parent's to handle, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(task,), daemon=True).start()
    # Standard output is the command's data; what a library prints goes with the messages.
    os.dup2(sys.stderr.fileno(), 1)
    try:
        result = _compute(task, sender.send)
    except Exception as error:
        sender.send(failure_of(error))
        if task.rendezvous is not None:
            _leave_at_once()
    else:
        # The result stands, however long it takes to leave the others.
        sender.send(Done(result))
        _disconnect(task)
    sender.close()


def _compute(task: Task, emit: Emit) -> dict[str, Any]:
    if task.rendezvous is not None:
        from trace_audit.parallel.rendezvous import connect

        connect(task.rendezvous)
    return task.compute(emit)


def _disconnect(task: Task) -> None:
    if task.rendezvous is not None:
        from trace_audit.parallel.rendezvous import disconnect

        disconnect()


def _leave_at_once() -> None:
    """End with all that was started here, and without the interpreter's own ending.

    A broken process group's threads abort that, and leaving the group may wait for ranks that are
    gone. The others notice when this one's sockets close.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


def _end_with_parent(task: Task) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if task.rendezvous is not None and task.rendezvous.store.startswith("file:"):
        _remove_meeting_place(Path(unquote(urlsplit(task.rendezvous.store).path)))
    os.killpg(0, signal.SIGKILL)


def _remove_meeting_place(store: Path) -> None:
    """Do what the parent did not come to; every rank tries."""
    with suppress(OSError):
        store.unlink(missing_ok=True)
        store.parent.rmdir()
