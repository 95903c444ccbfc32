"""Reads from an audit directory what comparisons need, and keeps what was read last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trace_audit.diff.align import RunRows, run_rows
from trace_audit.diff.identity import logit_dtype, run_identity, why_no_excess
from trace_audit.diff.summary import TraceIdentity
from trace_audit.diff.trace_index import TraceIndex, trace_index
from trace_audit.text import display_bytes

if TYPE_CHECKING:
    from trace_audit.storage.audit_dir import AuditDir
    from trace_audit.storage.trace import TraceSequence
    from trace_audit.storage.vocabulary import Vocabulary

RECORD = "record"
# Record, baseline, candidate and a repeat: more runs would make memory grow with the audit.
_RUNS_KEPT = 4


class AuditSource:
    """Trace, vocabulary and runs of one audit; the runs used last are kept."""

    def __init__(self, audit: AuditDir, *, redact_text: bool = False) -> None:
        """Reads from an opened directory, when asked.

        Args:
            audit: The directory.
            redact_text: Tokens are told by their ids, and no text leaves this object.
        """
        self.audit = audit
        self.redact_text = redact_text
        self._rows: dict[str, RunRows] = {}
        self._info: dict[str, dict[str, Any]] = {}

    @cached_property
    def sequences(self) -> list[TraceSequence]:
        """The trace, a row a sequence."""
        return self.audit.read_trace()

    @cached_property
    def trace(self) -> TraceIndex:
        """The trace as flat arrays."""
        temperature = self.audit.info.sampling.get("temperature")
        if not isinstance(temperature, int | float):
            temperature = None
        return trace_index(self.sequences, temperature=temperature)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes of each token."""
        return self.audit.vocabulary()

    def token_text(self, token_id: int) -> str:
        """A token's visible text; its id where it has none, or where text is redacted."""
        text = "" if self.redact_text else display_bytes(self.vocabulary.token_bytes(token_id))
        return text or f"<id {token_id}>"

    def joined_text(self, token_ids: Iterable[int]) -> str:
        """Visible text of consecutive tokens; empty where text is redacted."""
        if self.redact_text:
            return ""
        return display_bytes(b"".join(self.vocabulary.token_bytes(int(i)) for i in token_ids))

    def ends_line(self, token_id: int) -> bool:
        """Whether a token's bytes end with a newline; not told where text is redacted."""
        return not self.redact_text and self.vocabulary.token_bytes(token_id).endswith(b"\n")

    def info(self, name: str) -> Mapping[str, Any]:
        """run.json of a run."""
        if name not in self._info:
            self._info[name] = self.audit.run_info(name)
        return self._info[name]

    def rows(self, name: str) -> RunRows:
        """A run's rows, located in the trace.

        Raises:
            InvalidComparisonError: They do not belong to this trace.
        """
        rows = self._rows.pop(name, None)
        if rows is None:
            rows = self._read(name)
        self._rows[name] = rows
        if len(self._rows) > _RUNS_KEPT:
            del self._rows[next(iter(self._rows))]
        return rows

    def _read(self, name: str) -> RunRows:
        identity = run_identity(name, self.info(name))
        rows = run_rows(
            self.trace,
            name,
            self.audit.read_tokens(name),
            logit_dtype=logit_dtype(identity),
            subset=identity.subset,
        )
        return replace(rows, distribution=identity.distribution)

    def excess_refused(self, baseline: str, candidate: str) -> str | None:
        """Why `kl.excess` of two runs has no meaning; None if it has one."""
        names = [RECORD, baseline, candidate]
        known = RECORD in self.audit.run_names()
        record, *sides = (
            run_identity(name, self.info(name)) if known or name != RECORD else None
            for name in names
        )
        assert sides[0] is not None
        assert sides[1] is not None
        return why_no_excess(record, sides[0], sides[1])

    def record_rows(self) -> RunRows | None:
        """The record run, which the support was drawn from; None if the audit lacks it."""
        return self.rows(RECORD) if RECORD in self.audit.run_names() else None

    def trace_identity(self) -> TraceIdentity:
        """The trace as a report names it."""
        info = self.audit.info
        return TraceIdentity(
            path=str(self.audit.path),
            model=info.model,
            model_fingerprint=info.model_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            trace_sha256=info.trace_sha256,
            prompts_sha256=info.prompts_sha256,
            sources=tuple(sorted(set(self.trace.sources))),
            sequences=len(self.sequences),
            output_tokens=len(self.trace),
            vocabulary_size=info.vocabulary_size,
            tokenizer_size=info.tokenizer_size,
        )
