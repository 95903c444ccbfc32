"""Of several ranks' endings, the one that was the cause."""

from __future__ import annotations

import signal

import pytest

from trace_audit.errors import ConfigError, RunFailedError, TraceAuditError
from trace_audit.jobs import Done, Failed
from trace_audit.runner.failures import Died, Ending, cause, failure_of

KILLED = Died(-signal.SIGKILL)
ABORTED = Died(-signal.SIGABRT)
REFUSED = Failed(ConfigError("wrong"), "", "typed")
BROKEN = Failed(RunFailedError("a bug"), "", "unexpected")
CUT = Failed(RunFailedError("closed"), "", "connection")
TIMED_OUT = Failed(RunFailedError("waited"), "", "timeout")


def said(*endings: Ending | None) -> str:
    """The cause's message, given how each rank ended; None: it did not."""
    known = {rank: ending for rank, ending in enumerate(endings) if ending is not None}
    return cause(known, world_size=len(endings), timeout_seconds=5).message


@pytest.mark.parametrize(
    ("endings", "message"),
    [
        ((REFUSED, KILLED), "rank 1 of 2: the run's process was killed by SIGKILL"),
        ((BROKEN, REFUSED), "rank 1 of 2: wrong"),
        ((CUT, BROKEN), "rank 1 of 2: a bug"),
        ((ABORTED, BROKEN), "rank 1 of 2: a bug"),
        ((CUT, ABORTED), "rank 1 of 2: the run's process was killed by SIGABRT"),
        ((CUT, Died(0)), "rank 1 of 2: the run's process ended with exit code 0 and no result"),
        ((CUT, TIMED_OUT), "rank 1 of 2: waited"),
        ((Done({}), BROKEN), "rank 1 of 2: a bug"),
        ((TIMED_OUT, None), "rank 1 of 2 did not answer for 5 s"),
        ((CUT, TIMED_OUT, None, None), "ranks 2, 3 of 4 did not answer for 5 s"),
        ((CUT, None), "the connection to rank 1 of 2 was lost"),
        ((CUT, CUT), "closed"),
        ((REFUSED, REFUSED, CUT), "rank 0 of 3: wrong"),
        ((REFUSED, REFUSED), "wrong"),
        ((REFUSED,), "wrong"),
        ((KILLED,), "the run's process was killed by SIGKILL"),
    ],
)
def test_the_cause_is_told_from_what_followed(endings: tuple[Ending, ...], message: str) -> None:
    assert said(*endings) == message


def test_an_abort_may_be_because_of_another_rank() -> None:
    several = cause({0: ABORTED}, world_size=2, timeout_seconds=5)
    alone = cause({0: ABORTED}, world_size=1, timeout_seconds=5)
    assert "NCCL" in (several.hint or "")
    assert alone.hint is None


def _raised(error: Exception, source: Exception | None = None) -> Failed:
    try:
        raise error from source
    except Exception as caught:
        return failure_of(caught)


GLOO_CLOSED = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2944."
GLOO_TIMED_OUT = "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), "typed"),
        (ValueError("gloo timed out"), "unexpected"),
        (RuntimeError("a shape"), "unexpected"),
        (RuntimeError(GLOO_CLOSED), "connection"),
        (RuntimeError(GLOO_TIMED_OUT), "timeout"),
        (RuntimeError("Wait timeout"), "timeout"),
    ],
)
def test_errors_of_communication_are_known_by_their_words(error: Exception, kind: str) -> None:
    assert _raised(error).kind == kind


def test_torchs_own_errors_of_communication_are_known_by_their_type() -> None:
    import torch.distributed as dist

    failure = _raised(dist.DistNetworkError("Failed to recv, got 0 bytes."))
    assert failure.kind == "connection"
    assert _raised(dist.DistStoreError("wait timeout after 3000ms")).kind == "timeout"
    message = "NCCL error in: x.cpp:1\nLast error:\nDuplicate GPU detected"
    failure = _raised(dist.DistBackendError(message))
    assert failure.error.message.endswith(
        "NCCL error in: x.cpp:1 Last error: Duplicate GPU detected"
    )


def test_a_typed_error_raised_from_one_of_communication_is_one() -> None:
    typed: TraceAuditError = RunFailedError("could not send")
    assert _raised(typed, RuntimeError(GLOO_CLOSED)).kind == "connection"
