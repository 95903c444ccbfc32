"""One audit with healthy and faulty runs, made and judged as a user would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

from trace_audit.config import EngineConfig, RunConfig
from trace_audit.errors import InputError
from trace_audit.jobs import Job, RecordJob, ReplayJob
from trace_audit.runner import Target
from trace_audit.selftest.answer import Answer
from trace_audit.selftest.faults import Fault, replay_with
from trace_audit.selftest.prompts import PROMPTS
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.trace import TraceSequence

MAX_TOKENS = 80
_AFTER = 16  # tokens that every sequence has after a swap of pages: an onset takes as many


RunJob: TypeAlias = Callable[[Job, Target | None], object]
"""Runs a job in a process of its own; the target is None for a healthy run."""

Ask: TypeAlias = Callable[[Sequence[str]], Answer]
"""Runs `diff report` with these arguments."""


class Bench:
    """Makes the runs of one audit, and asks what the tool says of them.

    Args:
        directory: for the prompts and the audit.
        model: as `record` takes it.
        engine: of every run, but for what a run is to change.
        run: runs a job.
        ask: runs a report.
    """

    def __init__(
        self, directory: Path, *, model: str, engine: EngineConfig, run: RunJob, ask: Ask
    ) -> None:
        self.path = directory / "audit"
        self._prompts = directory / "prompts.jsonl"
        self._model = model
        self._engine = engine
        self._run = run
        self._ask = ask

    def record(self) -> None:
        """Record the trace that all runs score."""
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        self._prompts.write_text("".join(lines), encoding="utf-8")
        job = RecordJob(
            model=self._model,
            prompts_path=self._prompts,
            output=self.path,
            config=RunConfig(name="record", engine=self._engine),
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            stop_token_ids=(),
            stop_strings=(),
            exact_positions=0,
            force=False,
        )
        self._run(job, None)

    def replay(
        self,
        name: str,
        fault: Fault | None = None,
        *,
        only: tuple[str, ...] = (),
        **changes: object,
    ) -> None:
        """Replay the trace under the record's configuration.

        Args:
            name: of the run.
            fault: planted in it; None: the run is healthy.
            only: ids of the sequences to replay, empty for all.
            changes: keys of `[engine]` that differ from the record's.
        """
        engine = self._engine.model_copy(update=changes)
        job = ReplayJob(
            audit=self.path,
            config=RunConfig(name=name, engine=engine),
            run_name=name,
            model=None,
            model_path=None,
            only=only,
            repeat_of=None,
            force=False,
        )
        self._run(job, None if fault is None else partial(replay_with, fault))

    def report(self, candidate: str, *options: str) -> Answer:
        """What `diff report` says of a run against the record."""
        arguments = (str(self.path), "--candidate", candidate, "--format", "json")
        return self._ask((*arguments, *options))

    @cached_property
    def audit(self) -> AuditDir:
        """The recorded audit."""
        return AuditDir.open(self.path)

    @cached_property
    def trace(self) -> list[TraceSequence]:
        """Its trace."""
        return self.audit.read_trace()

    @property
    def block_size(self) -> int:
        """Tokens of a KV page."""
        return self._engine.block_size

    def page_in_every_output(self) -> int:
        """The first page that no sequence's prompt reaches.

        Raises:
            InputError: the prompts differ so much in length that some output ends too early to
                show what two pages from there on do.
        """
        lengths = [len(sequence.prompt_token_ids) for sequence in self.trace]
        page = -(-max(lengths) // self.block_size)
        needed = (page + 2) * self.block_size + 1 + _AFTER
        if min(lengths) + MAX_TOKENS < needed:
            raise InputError(
                f"the selftest's prompts have {min(lengths)} to {max(lengths)} tokens with this "
                f"model's tokenizer, and {MAX_TOKENS} more do not reach position {needed}",
                hint="test the instrument on the demo model",
            )
        return page
