"""What a run tells while it goes on: a live line on a terminal, sparse lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trace_audit.cli.messages import printable, say
from trace_audit.jobs import Event, Message, Progress, Stage

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

PLAIN_INTERVAL_SECONDS = 10.0


class Rate:
    """Tokens a second since the first progress, which may count resumed work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a measurement."""
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def describe(self, progress: Progress) -> str:
        """`512/1024 tokens, 210.3 tokens/s, 0:00:02 left`."""
        now = self._clock()
        if self._first is None:
            self._first = (now, progress.done_tokens)
        text = f"{progress.done_tokens}/{progress.total_tokens} tokens"
        seconds, tokens = now - self._first[0], progress.done_tokens - self._first[1]
        if seconds <= 0 or tokens <= 0:
            return text
        left = (progress.total_tokens - progress.done_tokens) * seconds / tokens
        return f"{text}, {tokens / seconds:.1f} tokens/s, {_duration(left)} left"


@contextmanager
def progress_of(run_name: str) -> Iterator[Callable[[Event], None]]:
    """Show a run's events on standard error.

    Yields:
        What to call with every event.
    """
    if sys.stderr.isatty() and os.environ.get("TERM") not in (None, "dumb"):
        with _live(run_name) as on_event:
            yield on_event
    else:
        yield plain_lines(run_name)


def plain_lines(
    run_name: str, clock: Callable[[], float] = time.monotonic
) -> Callable[[Event], None]:
    """A line a stage and a message, and one every few seconds of progress."""
    rate = Rate(clock)
    last, last_done = clock(), -1

    def on_event(event: Event) -> None:
        nonlocal last, last_done
        if isinstance(event, Stage):
            say(f"{run_name}: {event.text}")
        elif isinstance(event, Message):
            say(f"{run_name}: warning: {event.text}")
        elif isinstance(event, Progress):
            text = rate.describe(event)
            is_last = event.done_tokens == event.total_tokens
            is_due = is_last or clock() - last >= PLAIN_INTERVAL_SECONDS
            if is_due and event.done_tokens != last_done:
                last, last_done = clock(), event.done_tokens
                say(f"{run_name}: {text}")

    return on_event


@contextmanager
def _live(run_name: str) -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress

    # markup=False: names and texts are shown as they are, brackets included.
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    console = Console(stderr=True, highlight=False)
    with RichProgress(*columns, console=console, transient=True) as live:
        yield _live_updates(live, run_name)


def _live_updates(live: RichProgress, run_name: str) -> Callable[[Event], None]:
    rate = Rate()
    task = live.add_task(printable(run_name), total=None, detail="")

    def on_event(event: Event) -> None:
        if isinstance(event, Stage):
            live.update(task, detail=printable(event.text))
        elif isinstance(event, Message):
            text = printable(f"{run_name}: warning: {event.text}")
            live.console.print(text, markup=False, soft_wrap=True)
        elif isinstance(event, Progress):
            live.update(
                task,
                completed=event.done_tokens,
                total=event.total_tokens,
                detail=rate.describe(event),
            )

    return on_event


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
