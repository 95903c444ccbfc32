"""What the runner's tests run in the child. Imported there by name, so it must stay light."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from trace_audit.errors import ConfigError
from trace_audit.jobs import Event, Job, Message, Progress, Rendezvous, Stage

Emit = Callable[[Event], None]


def tell(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Emit one event of every kind, then give what the child sees of itself."""
    emit(Stage("loading"))
    emit(Progress(1, 2))
    emit(Message("watch out"))
    return {
        "job": job,
        "pid": os.getpid(),
        "triton_interpret": os.environ.get("TRITON_INTERPRET"),
        "torch_is_loaded": "torch" in sys.modules,
    }


def refuse(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Raise a typed error."""
    raise ConfigError("the key is wrong", hint="use another")


def break_down(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Raise an error that nobody planned."""
    raise ZeroDivisionError("first line\nsecond line")


def fill_the_disk(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Raise what writing to a full disk raises."""
    raise OSError(errno.ENOSPC, "No space left on device", "audit/shard-0.parquet")


def die(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Be killed, as by the system's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def leave(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """End without a word."""
    os._exit(3)


def print_noise(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Write to standard output, from Python and from a process of its own."""
    print("noise from python", flush=True)
    subprocess.run(["echo", "noise from elsewhere"], check=True)
    return {}


def hang(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Tell the ids of this process and of one that it started, then wait for ever."""
    helper = subprocess.Popen(["sleep", "600"])
    emit(Stage(f"{os.getpid()} {helper.pid}"))
    helper.wait()
    raise AssertionError


def hang_deaf(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """As `hang`, and ignore requests to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hang(job, emit, rendezvous)


def finish_slowly(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Give a result, then keep the process alive."""
    import threading

    threading.Thread(target=threading.Event().wait).start()
    return {"done": True}
