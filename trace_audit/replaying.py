"""replay(): score a recorded trace under another configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trace_audit.config import distribution_of
from trace_audit.engine.build import BuiltEngine
from trace_audit.engine.request import Request
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.errors import ModelError
from trace_audit.exact_positions import ExactReplayer, exact_kl_attachments
from trace_audit.jobs import Rendezvous, ReplayJob, Stage
from trace_audit.ranks import EngineOpener, open_engine
from trace_audit.run_info import run_info, run_result
from trace_audit.run_setup import ModelSource, digest, find_model, prepare
from trace_audit.shard_loop import Emit, run_shards
from trace_audit.storage.audit_dir import RECORD_RUN, AuditDir
from trace_audit.storage.exact_files import full_logprobs_entry, open_full_logprobs
from trace_audit.storage.fingerprint import model_fingerprint, tokenizer_fingerprint
from trace_audit.storage.shards import plan_shards
from trace_audit.storage.trace import TraceSequence


def replay(
    job: ReplayJob,
    emit: Emit,
    rendezvous: Rendezvous | None = None,
    *,
    opener: EngineOpener = open_engine,
) -> dict[str, Any]:
    """Replay the audit's trace, every token of it, and add the run to the audit.

    Args:
        job: what to do.
        emit: told of stages, progress and messages.
        rendezvous: how the ranks met; None without any.
        opener: what opens the run's engine.

    Raises:
        UsageError: audit, model or configuration are wrong; nothing was written.
        RunFailedError: the run could not be finished; finished shards are kept.
    """
    started = time.perf_counter()
    audit = AuditDir.open(job.audit)
    trace = audit.read_trace()
    chosen = [i for i, s in enumerate(trace) if not job.only or s.sequence_id in job.only]
    emit(Stage("preparing the model"))
    source, fingerprint = _model(job, audit)
    setup = prepare(job.config, source, max(_length(trace[i]) for i in chosen), rendezvous)
    shards = plan_shards(len(chosen), setup.config.engine.shard_size)
    subset = [trace[i].sequence_id for i in chosen] if job.only else None
    distributions = full_logprobs_entry(audit)
    reference = None if distributions is None else open_full_logprobs(audit, RECORD_RUN)
    # Whole distributions are the model's own: those of processed logits are compared with nothing.
    is_raw = distribution_of(setup.config.scoring).is_raw
    exact = ExactReplayer(reference) if reference is not None and is_raw else None
    # Before the weights are read: a name that is taken need not wait for them.
    writer = audit.run_writer(
        job.run_name,
        job_digest=digest(
            {
                "trace": audit.info.trace_sha256,
                "model": fingerprint,
                **setup.digest_parts,
                "subset": subset,
                "full_logprobs": distributions,
            }
        ),
        num_shards=len(shards),
        force=job.force,
    )
    emit(Stage("loading the model"))
    with writer, opener(setup, source.directory, rendezvous) as opened:
        _check_vocabulary(opened.loaded.vocabulary_size, audit)
        resumed = len(writer.finished_shards)
        emit(Stage("replaying"))
        run_shards(
            opened.built,
            writer,
            shards,
            chosen,
            _request_maker(opened.built, trace),
            emit,
            batch_order_seed=setup.config.engine.batch_order_seed,
            exact=exact,
        )
        info = run_info(
            requested=job.config,
            setup=setup,
            opened=opened,
            writer=writer,
            model=job.model or audit.info.model,
            model_fingerprint=fingerprint,
            started=started,
            resumed_shards=resumed,
        )
        repeat_kind = None if job.repeat_of is None else job.repeat_kind
        path = writer.finish(
            info | {"subset": subset, "repeat_of": job.repeat_of, "repeat_kind": repeat_kind},
            attachments=None if exact is None else exact_kl_attachments(writer),
        )
    return run_result(job.run_name, path, len(chosen), writer, resumed)


def _model(job: ReplayJob, audit: AuditDir) -> tuple[ModelSource, str]:
    """Where the model is, and its fingerprint; the recorded one unless --model names another."""
    if job.model is not None:
        source = find_model(job.model)
        ours, theirs = tokenizer_fingerprint(source.directory), audit.info.tokenizer_fingerprint
        if None not in (ours, theirs) and ours != theirs:
            raise ModelError(
                f"{source.directory} has another tokenizer than the recorded model",
                hint="a trace can be replayed on checkpoints of the same vocabulary only",
            )
        return source, model_fingerprint(source.directory)
    where = job.model_path or Path(audit.info.model_path)
    if not where.is_dir():
        raise ModelError(
            f"the recorded model is not at {where} any more",
            hint="say where it is with --model-path, or replay on another with --model",
        )
    fingerprint = model_fingerprint(where)
    if fingerprint != audit.info.model_fingerprint:
        raise ModelError(
            f"the model at {where} is not the one that was recorded",
            hint="its files changed or are damaged; to replay on another checkpoint of the same "
            "vocabulary, name it with --model",
        )
    return ModelSource(directory=where, revision=audit.info.model_revision), fingerprint


def _check_vocabulary(vocabulary_size: int, audit: AuditDir) -> None:
    if vocabulary_size != audit.info.vocabulary_size:
        raise ModelError(
            f"the model has a vocabulary of {vocabulary_size} ids and the recorded one of "
            f"{audit.info.vocabulary_size}",
            hint="a trace can be replayed on checkpoints of the same vocabulary only",
        )


def _length(sequence: TraceSequence) -> int:
    return len(sequence.prompt_token_ids) + len(sequence.output_token_ids)


def _request_maker(built: BuiltEngine, trace: Sequence[TraceSequence]) -> Callable[[int], Request]:
    def make(index: int) -> Request:
        sequence = trace[index]
        return built.input_processor.process(
            sequence.sequence_id,
            sequence.prompt_token_ids.tolist(),
            SamplingParams(trace_decode_token_ids=sequence.output_token_ids.tolist()),
            index=index,
            support_token_ids=sequence.support_token_ids,
        )

    return make
