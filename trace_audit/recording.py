"""record(): choose the tokens, keep their statistics, and make the audit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from trace_audit.config import distribution_of
from trace_audit.engine.build import BuiltEngine
from trace_audit.engine.request import Request
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.errors import InputError, RequestError
from trace_audit.exact_record import check_exact_scoring, finish_exact, start_exact
from trace_audit.importing import add_imported, import_messages
from trace_audit.jobs import Message, RecordJob, Rendezvous, Stage
from trace_audit.model_check import check_model
from trace_audit.models.loaded import LoadedModel
from trace_audit.ranks import OpenEngine, open_engine
from trace_audit.run_info import run_info, run_result
from trace_audit.run_setup import ModelSource, digest, find_model, prepare
from trace_audit.shard_loop import Emit, run_shards
from trace_audit.stop_strings import StopStrings
from trace_audit.storage.fingerprint import file_sha256, model_fingerprint, tokenizer_fingerprint
from trace_audit.storage.prompts import PromptEntry, read_prompts
from trace_audit.storage.record_writer import (
    RecordInfo,
    RecordWriter,
    TracePrompt,
    check_record_target,
    start_record,
)
from trace_audit.storage.shards import plan_shards
from trace_audit.tokenizer import (
    begins_twice,
    load_tokenizer,
    render_prompt,
    tokenizer_size,
    vocabulary_rows,
)


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """A line of the prompts file, rendered."""

    entry: PromptEntry
    prompt_token_ids: list[int]

    def longest(self, max_tokens: int) -> int:
        outputs = self.entry.output_token_ids
        return len(self.prompt_token_ids) + (max_tokens if outputs is None else len(outputs))


def record(job: RecordJob, emit: Emit, rendezvous: Rendezvous | None = None) -> dict[str, Any]:
    """Record a trace and its reference statistics into a new audit directory.

    Args:
        job: what to do.
        emit: told of stages, progress and messages.
        rendezvous: how the ranks met; None without any.

    Raises:
        UsageError: prompts, model, configuration or target are wrong; nothing was written.
        RunFailedError: the run could not be finished; finished shards are kept.
    """
    started = time.perf_counter()
    check_record_target(job.output, job.force)
    check_exact_scoring(job)
    entries = read_prompts(job.prompts_path)
    for message in import_messages(entries):
        emit(Message(message))
    emit(Stage("preparing the model"))
    source = find_model(job.model)
    tokenizer = _tokenizer_for(entries, job, source)
    sequences = [_render(entry, tokenizer) for entry in entries]
    _warn_of_doubled_bos(tokenizer, sequences, emit)
    setup = prepare(
        job.config, source, max(s.longest(job.max_tokens) for s in sequences), rendezvous
    )
    shards = plan_shards(len(sequences), setup.config.engine.shard_size)
    emit(Stage("loading the model"))
    with open_engine(setup, source.directory, rendezvous) as opened:
        requests = [_request(i, s, job, opened.built, tokenizer) for i, s in enumerate(sequences)]
        info = _record_info(job, source, opened.loaded, tokenizer)
        writer = start_record(
            job.output,
            job_digest=digest(
                {
                    "info": vars(info),
                    **setup.digest_parts,
                    "exact_positions": job.exact_positions,
                }
            ),
            num_shards=len(shards),
            force=job.force,
        )
        with writer:
            resumed = len(writer.finished_shards)
            masks = _masks(sequences)
            exact = start_exact(job, requests, masks, writer, info.vocabulary_size, emit)
            emit(Stage("recording"))
            indices = range(len(requests))
            run_shards(
                opened.built,
                writer,
                shards,
                indices,
                requests.__getitem__,
                emit,
                batch_order_seed=setup.config.engine.batch_order_seed,
                exact=exact,
            )
            emit(Stage("writing"))
            num_exact, attachments = finish_exact(exact, job, masks, writer, emit)
            check = _check(opened, writer, requests[0])
            warning = add_imported(
                writer,
                entries,
                [len(s.prompt_token_ids) for s in sequences],
                vocabulary_size=info.vocabulary_size,
            )
            if warning is not None:
                emit(Message(warning))
            token_bytes, special = _vocabulary(tokenizer, opened.loaded.vocabulary_size)
            written = run_info(
                requested=job.config,
                setup=setup,
                opened=opened,
                writer=writer,
                model=job.model,
                model_fingerprint=info.model_fingerprint,
                started=started,
                resumed_shards=resumed,
            )
            checks = {
                "conformance_max_abs_delta_logprob": setup.conformance,
                "model_check": check,
                "exact_positions": num_exact,
            }
            writer.finish(
                info,
                [_trace_prompt(s, job) for s in sequences],
                token_bytes=token_bytes,
                special=special,
                run_info=written | checks,
                attachments=attachments,
            )
    return run_result("record", job.output, len(sequences), writer, resumed)


def _tokenizer_for(
    entries: Sequence[PromptEntry], job: RecordJob, source: ModelSource
) -> PreTrainedTokenizerBase | None:
    """The tokenizer, if the model has one; needed only where there is text."""
    needs_text = bool(job.stop_strings) or any(e.prompt_token_ids is None for e in entries)
    if not needs_text and tokenizer_fingerprint(source.directory) is None:
        return None
    return load_tokenizer(source.directory)


def _render(entry: PromptEntry, tokenizer: PreTrainedTokenizerBase | None) -> _Sequence:
    if entry.prompt_token_ids is not None:
        return _Sequence(entry=entry, prompt_token_ids=list(entry.prompt_token_ids))
    assert tokenizer is not None
    return _Sequence(entry=entry, prompt_token_ids=render_prompt(tokenizer, entry))


def _warn_of_doubled_bos(
    tokenizer: PreTrainedTokenizerBase | None, sequences: Sequence[_Sequence], emit: Emit
) -> None:
    if tokenizer is None:
        return
    doubled = [s.entry for s in sequences if begins_twice(tokenizer, s.prompt_token_ids)]
    if doubled:
        emit(
            Message(
                f"{len(doubled)} prompts begin with the tokenizer's BOS token twice, the first of "
                f"them on line {doubled[0].line_number}: text that already holds it gets another."
            )
        )


def _request(
    index: int,
    sequence: _Sequence,
    job: RecordJob,
    built: BuiltEngine,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Request:
    entry = sequence.entry
    params = SamplingParams(
        temperature=job.temperature,
        seed=job.seed,
        max_tokens=job.max_tokens,
        ignore_eos=job.ignore_eos,
        stop_token_ids=job.stop_token_ids,
        stop=job.stop_strings,
        trace_decode_token_ids=entry.output_token_ids,
    )
    checker = None
    if job.stop_strings:
        assert tokenizer is not None
        checker = StopStrings(job.stop_strings, tokenizer)
    try:
        return built.input_processor.process(
            entry.sequence_id,
            sequence.prompt_token_ids,
            params,
            index=index,
            stop_checker=checker,
        )
    except RequestError as error:
        raise InputError(
            f"line {entry.line_number} of {job.prompts_path}: "
            # The key of the prompts file, not the engine's name for it.
            + error.message.replace("trace_decode_token_ids", "output_token_ids"),
            hint=error.hint,
        ) from error


def _record_info(
    job: RecordJob,
    source: ModelSource,
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> RecordInfo:
    return RecordInfo(
        model=job.model,
        model_path=str(source.directory),
        model_revision=source.revision,
        model_fingerprint=model_fingerprint(source.directory),
        tokenizer_fingerprint=tokenizer_fingerprint(source.directory),
        prompts_sha256=file_sha256(job.prompts_path),
        vocabulary_size=loaded.vocabulary_size,
        tokenizer_size=None if tokenizer is None else tokenizer_size(tokenizer),
        seed=job.seed,
        sampling={
            "temperature": job.temperature,
            "max_tokens": job.max_tokens,
            "ignore_eos": job.ignore_eos,
            "stop_token_ids": list(job.stop_token_ids),
            "stop_strings": list(job.stop_strings),
        },
    )


def _masks(sequences: Sequence[_Sequence]) -> dict[int, NDArray[np.bool_]]:
    """Which tokens are scored, of the sequences where not all are: bool [T]."""
    masks = {index: sequence.entry.score_mask for index, sequence in enumerate(sequences)}
    return {i: np.array(mask, dtype=np.bool_) for i, mask in masks.items() if mask is not None}


def _trace_prompt(sequence: _Sequence, job: RecordJob) -> TracePrompt:
    entry = sequence.entry
    source = "sampled" if job.temperature > 0 else "greedy"
    mask = entry.score_mask
    return TracePrompt(
        sequence_id=entry.sequence_id,
        group_id=entry.group_id,
        prompt_token_ids=np.array(sequence.prompt_token_ids, dtype=np.int32),
        score_mask=None if mask is None else np.array(mask, dtype=np.bool_),
        source=source if entry.output_token_ids is None else "imported",
    )


def _check(opened: OpenEngine, writer: RecordWriter, first: Request) -> dict[str, Any]:
    """Score the first sequence with transformers itself, from the rows that were kept."""
    if opened.world.is_split:
        return {"skipped": "the model is split over ranks"}
    if not distribution_of(opened.config.scoring).is_raw:
        return {"skipped": "the logprobs are of processed logits"}
    table = writer.read_shard(0).table
    rows = table.filter(np.asarray(table["sequence_index"]) == 0)
    return check_model(
        opened.loaded,
        first.prompt_token_ids,
        rows["token_id"].to_pylist(),
        rows["logprob"].to_numpy(),
    )


def _vocabulary(
    tokenizer: PreTrainedTokenizerBase | None, vocabulary_size: int
) -> tuple[list[bytes], list[bool]]:
    if tokenizer is None:
        return [b""] * vocabulary_size, [False] * vocabulary_size
    return vocabulary_rows(tokenizer, vocabulary_size)
