"""Reads from an audit directory what comparisons need, and keeps what was read last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.identity import logit_dtype, run_identity, why_no_excess
from trace_audit.diff.pair_rows import PairRows, pair_rows
from trace_audit.diff.routing import run_routing
from trace_audit.diff.run_rows import RunRows, run_rows
from trace_audit.diff.summary import TraceIdentity
from trace_audit.diff.trace_index import TraceIndex, trace_index
from trace_audit.text import display_bytes

if TYPE_CHECKING:
    from trace_audit.storage.audit_dir import AuditDir
    from trace_audit.storage.vocabulary import Vocabulary

RECORD = "record"


@dataclass(frozen=True, kw_only=True)
class SequenceTokens:
    """Token ids of one sequence, for its text: int32 each."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


class AuditSource:
    """Trace, vocabulary and runs of one audit; of the runs only where their rows are is kept."""

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
    def trace(self) -> TraceIndex:
        """The trace as flat arrays."""
        temperature = self.audit.info.sampling.get("temperature")
        if not isinstance(temperature, int | float):
            temperature = None
        return trace_index(self.audit.open_trace(), temperature=temperature)

    def text_of(self, index: int) -> SequenceTokens:
        """Token ids of one sequence of the trace; the prompt is read for it."""
        start, end = self.trace.start[index : index + 2]
        return SequenceTokens(
            prompt=self.trace.reader.prompt(index), output=self.trace.token_id[start:end]
        )

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
        if name not in self._rows:
            identity = run_identity(name, self.info(name))
            self._rows[name] = run_rows(
                self.trace,
                name,
                self.audit.open_tokens(name),
                logit_dtype=logit_dtype(identity),
                subset=identity.subset,
                distribution=identity.distribution,
                routing=run_routing(self.info(name)),
            )
        return self._rows[name]

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

    def pair_rows(self, baseline: str, candidate: str, *, referee: str | None = None) -> PairRows:
        """The scored tokens of two runs, paired.

        Raises:
            InvalidComparisonError: They cannot be compared.
            AuditDirError: A run is unknown or damaged.
        """
        record = RECORD if RECORD in self.audit.run_names() else None
        trace, names = self.trace, (baseline, candidate, record, referee)
        with ThreadPoolExecutor() as threads:
            # Checksums and keys of one run are read beside those of another.
            named = [name for name in dict.fromkeys(names) if name is not None]
            rows = dict(zip(named, threads.map(self.rows, named), strict=True))
        return pair_rows(
            trace,
            rows[baseline],
            rows[candidate],
            record=None if record is None else rows[record],
            referee=None if referee is None else rows[referee],
        )

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
            sequences=len(self.trace.sequence_ids),
            output_tokens=len(self.trace),
            vocabulary_size=info.vocabulary_size,
            tokenizer_size=info.tokenizer_size,
        )
