"""Running sequences shard by shard, and what is counted meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trace_audit.batch_order import batch_order
from trace_audit.engine.build import BuiltEngine
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.exact_positions import ExactCheck
from trace_audit.jobs import Event, Message, Progress
from trace_audit.run_tables import num_impossible_tokens, num_nonfinite_rows, shard_table
from trace_audit.storage.shards import ShardWriter

Emit = Callable[[Event], None]

_SECONDS_BETWEEN_EVENTS = 0.1


def run_shards(
    built: BuiltEngine,
    writer: ShardWriter,
    shards: Sequence[range],
    sequence_indices: Sequence[int],
    make_request: Callable[[int], Request],
    emit: Emit,
    *,
    batch_order_seed: int,
    exact: ExactCheck | None = None,
) -> None:
    """Run every shard that is not finished and hand its rows to the writer.

    Args:
        built: the engine; it drains between shards.
        writer: keeps finished shards.
        shards: groups of positions in `sequence_indices`.
        sequence_indices: of the sequences to run, their index in the trace.
        make_request: from an index in the trace to its request.
        emit: told of progress, and of rows that are not finite.
        batch_order_seed: shuffles the order in which a shard's sequences enter the engine; rows
            are written in trace order whatever it is.
        exact: keeps whole distributions, or what they were compared with; None: nothing does.
    """
    requests = {i: make_request(i) for i in sequence_indices}
    todo = [n for n in range(len(shards)) if n not in writer.finished_shards]

    def most_tokens(number: int) -> int:
        return sum(requests[sequence_indices[p]].params.max_tokens for p in shards[number])

    # A free request may end early: its most tokens stand in until its shard is finished.
    total = writer.finished_tokens + sum(most_tokens(number) for number in todo)
    meter = _Meter(emit, done=writer.finished_tokens, total=total)
    for number in todo:
        indices = [sequence_indices[position] for position in shards[number]]
        before = built.engine.counters.as_counts()
        start = time.perf_counter()
        wanted = [requests[i] for i in indices]
        most_rows = 0 if exact is None else exact.prepare(wanted)
        order = batch_order(batch_order_seed, number, len(indices))
        outputs = _run_shuffled(built, wanted, order, meter, most_rows)
        seconds = time.perf_counter() - start
        writer.write_shard(
            number,
            shard_table(outputs, indices),
            counters=_counters(before, built.engine.counters.as_counts(), outputs),
            finish_reasons=[o.finish_reason for o in outputs],
            engine_seconds=seconds,
            attach=None if exact is None else exact.attach(outputs, indices),
        )
        meter.total += sum(len(o.token_ids) for o in outputs) - most_tokens(number)
        meter.emit_now()
    broken = writer.counters().get("nonfinite_rows", 0)
    if broken:
        share = f"{broken} of {writer.finished_tokens} rows"
        emit(Message(f"warning: {share} are not finite: their logits hold NaN or infinity"))


def _run_shuffled(
    built: BuiltEngine,
    requests: Sequence[Request],
    order: Sequence[int],
    meter: _Meter,
    max_full_logprobs: int,
) -> list[RequestOutput]:
    """Run requests in an order of their positions; the outputs come in the order given."""
    shuffled = [requests[position] for position in order]
    outputs = built.engine.run(shuffled, meter.add, max_full_logprobs=max_full_logprobs)
    by_position = dict(zip(order, outputs, strict=True))
    return [by_position[position] for position in range(len(requests))]


class _Meter:
    """Turns committed tokens into progress events, a few a second."""

    def __init__(self, emit: Emit, *, done: int, total: int) -> None:
        self._emit = emit
        self._done = done
        self._last = 0.0
        self.total = total

    def add(self, tokens: int) -> None:
        self._done += tokens
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_EVENTS:
            self._last = now
            self.emit_now()

    def emit_now(self) -> None:
        self._emit(Progress(done_tokens=self._done, total_tokens=max(self._done, self.total)))


def _counters(
    before: dict[str, int], after: dict[str, int], outputs: Sequence[RequestOutput]
) -> dict[str, int]:
    counted = {name: count - before.get(name, 0) for name, count in after.items()}
    return {
        "sequences": len(outputs),
        "tokens": sum(len(o.token_ids) for o in outputs),
        **counted,
        "nonfinite_rows": num_nonfinite_rows(outputs),
        "impossible_tokens": num_impossible_tokens(outputs),
    }
