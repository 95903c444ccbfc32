"""Does the engine commit what it must, and keep the bits it must, wherever and however it runs?

Records free requests once, without pressure, and replays them over ranks, under pressure, in other
slots, mixed and after others. A row of the table is one of these; the exit code is 1 if any fails.

    python -m benchmarks.correctness                          # the demo model
    python -m benchmarks.correctness --model path/to/model --dtype bfloat16 --json rows.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from trace_audit.config import EngineConfig, ParallelConfig, RunConfig
from trace_audit.engine.build import BuiltEngine
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.ranks import open_engine
from trace_audit.run_setup import Setup, apply_process_settings

NUM_SLOTS = 6
BLOCK_SIZE = 4
NUM_REQUESTS = 14
PROMPT_LENGTHS = range(3, 10)
MAX_TOKENS = 24
# Room for a third of what six sequences hold at their end.
TIGHT = -(-NUM_SLOTS * (PROMPT_LENGTHS[-1] + MAX_TOKENS) // BLOCK_SIZE // 3)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way to run came to.

    Attributes:
        name: of the way.
        requests, finished: asked for, and ended as they had to.
        tokens, matched: of the traces, and those that were committed.
        preemptions: how often a request was preempted.
        needs_preemption: whether the row is about pressure.
        owes_bits: whether its outputs must be those of the unpressured run, field by field.
        differing: fields in which they are not.
    """

    name: str
    requests: int
    finished: int
    tokens: int
    matched: int
    preemptions: int
    needs_preemption: bool
    owes_bits: bool
    differing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether all of it is as it must be."""
        complete = self.finished == self.requests and self.matched == self.tokens
        squeezed = self.preemptions > 0 or not self.needs_preemption
        return complete and squeezed and not (self.owes_bits and self.differing)


class Bench:
    """A model, its prompts, and the outputs of the unpressured run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._model: Path = options.model
        self._dtype: str = options.dtype
        self._backend: str = options.attention_backend
        text = AutoConfig.from_pretrained(self._model).get_text_config()
        self._vocabulary_size: int = text.vocab_size
        self.tensor_parallel_size = options.tensor_parallel_size or smallest_split(text)
        draw = np.random.default_rng(0)
        self.prompts: list[list[int]] = [
            draw.integers(
                3, self._vocabulary_size, PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]
            ).tolist()
            for i in range(NUM_REQUESTS)
        ]
        apply_process_settings(self._config())
        with self.engine() as built:
            self.reference = built.engine.run([self.free(built, i) for i in self.everyone])

    @property
    def everyone(self) -> range:
        """Numbers of the requests."""
        return range(NUM_REQUESTS)

    @contextmanager
    def engine(
        self, parallel: ParallelConfig | None = None, **engine: Any
    ) -> Iterator[BuiltEngine]:
        """An engine with these changes; other ranks follow it and end with it."""
        config = self._config(parallel, **engine)
        setup = Setup(config=config, conformance=0.0, environment={}, draft=None)
        with open_engine(setup, self._model, None) as opened:
            yield opened.built
            opened.finish()
            opened.loaded.attention.close()

    def free(self, built: BuiltEngine, i: int) -> Request:
        """Request i, greedy."""
        params = SamplingParams(max_tokens=MAX_TOKENS - i % 4, ignore_eos=True)
        return built.input_processor.process(f"r{i}", self.prompts[i], params, index=i)

    def replayed(self, built: BuiltEngine, i: int) -> Request:
        """Request i with the reference's tokens as its trace."""
        recorded = self.reference[i]
        return built.input_processor.process(
            f"r{i}",
            self.prompts[i],
            SamplingParams(trace_decode_token_ids=recorded.token_ids.tolist()),
            index=i,
            support_token_ids=recorded.support_token_ids,
        )

    def forced(self, built: BuiltEngine, i: int) -> Request:
        """Request i with a trace that the model would not choose."""
        trace = [(7 * i + 13 * step) % self._vocabulary_size for step in range(MAX_TOKENS - i % 4)]
        params = SamplingParams(trace_decode_token_ids=trace)
        return built.input_processor.process(f"r{i}", self.prompts[i], params, index=i)

    def _config(self, parallel: ParallelConfig | None = None, **engine: Any) -> RunConfig:
        values = {
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "dtype": self._dtype,
            "lm_head_dtype": self._dtype,
            "attention_backend": self._backend,
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": 8,
            "max_model_len": PROMPT_LENGTHS[-1] + MAX_TOKENS,
            "block_size": BLOCK_SIZE,
            "num_threads": torch.get_num_threads(),
            "fixed_batch": True,
        }
        alone = ParallelConfig(backend="single")
        return RunConfig(
            name="correctness", engine=EngineConfig(**(values | engine)), parallel=parallel or alone
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every row, print the table, and say whether all are right."""
    options = parse(arguments)
    bench = Bench(options)
    rows = [make(bench) for make in ROWS]
    print_table(rows)
    if options.json:
        values = [asdict(row) | {"ok": row.ok} for row in rows]
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.ok for row in rows) else 1


def one_rank(bench: Bench) -> Row:
    """A replay on one rank is the record."""
    return replay_row(bench, "TP 1")


def tensor_parallel(bench: Bench) -> Row:
    """Partial sums move bits; tokens and their number stay."""
    size = bench.tensor_parallel_size
    parallel = emulated(tensor_parallel_size=size)
    return replay_row(bench, f"TP {size}, emulated", parallel, owes_bits=False)


def pipeline_parallel(bench: Bench) -> Row:
    """Stages hand states on and move no bit."""
    return replay_row(bench, "PP 2, emulated", emulated(pipeline_parallel_size=2))


def swapped(bench: Bench) -> Row:
    """Blocks that go to the host and come back."""
    return replay_row(
        bench, "preemption, swap", needs_preemption=True, num_kv_blocks=TIGHT, preemption="swap"
    )


def recomputed(bench: Bench) -> Row:
    """Prefilled again: the numerics may move, the tokens not."""
    return replay_row(
        bench,
        "preemption, recompute",
        needs_preemption=True,
        owes_bits=False,
        num_kv_blocks=TIGHT,
        preemption="recompute",
    )


def slot_reuse(bench: Bench) -> Row:
    """All requests twice over the same six slots, in the other order the second time."""
    with bench.engine() as built:
        built.engine.run([bench.forced(built, i) for i in bench.everyone])
        requests = [bench.replayed(built, i) for i in reversed(bench.everyone)]
        outputs = built.engine.run(requests)
        return row(bench, "slot reuse", built, requests, outputs)


def mixed(bench: Bench) -> Row:
    """Every second request replays a foreign trace under pressure; the free ones do not notice."""
    with bench.engine(num_kv_blocks=TIGHT) as built:
        requests = [(bench.free, bench.forced)[i % 2](built, i) for i in bench.everyone]
        outputs = built.engine.run(requests)
        return row(bench, "mixed, swap", built, requests, outputs, needs_preemption=True)


def normal_after_replay(bench: Bench) -> Row:
    """Free requests in an engine that only replayed so far."""
    with bench.engine() as built:
        built.engine.run([bench.forced(built, i) for i in bench.everyone])
        requests = [bench.free(built, i) for i in bench.everyone]
        return row(bench, "normal after replay", built, requests, built.engine.run(requests))


ROWS: tuple[Callable[[Bench], Row], ...] = (
    one_rank,
    tensor_parallel,
    pipeline_parallel,
    swapped,
    recomputed,
    slot_reuse,
    mixed,
    normal_after_replay,
)


def replay_row(
    bench: Bench,
    name: str,
    parallel: ParallelConfig | None = None,
    *,
    owes_bits: bool = True,
    needs_preemption: bool = False,
    **engine: Any,
) -> Row:
    """Replay every request once."""
    with bench.engine(parallel, **engine) as built:
        requests = [bench.replayed(built, i) for i in bench.everyone]
        outputs = built.engine.run(requests)
        return row(
            bench,
            name,
            built,
            requests,
            outputs,
            owes_bits=owes_bits,
            needs_preemption=needs_preemption,
        )


def row(
    bench: Bench,
    name: str,
    built: BuiltEngine,
    requests: Sequence[Request],
    outputs: Sequence[RequestOutput],
    *,
    owes_bits: bool = True,
    needs_preemption: bool = False,
) -> Row:
    """Compare outputs with the traces, and with the unpressured run where they share its tokens."""
    traces = [request.trace for request in requests]
    pairs = list(zip(outputs, traces, strict=True))
    reference = {output.request_id: output for output in bench.reference}
    same = [(reference[o.request_id], o) for o, t in pairs if not is_foreign(bench, o, t)]
    finished = [
        len(o.token_ids) == r.params.max_tokens and o.finish_reason == "length"
        for r, o in zip(requests, outputs, strict=True)
    ]
    return Row(
        name=name,
        requests=len(requests),
        finished=sum(finished),
        tokens=sum(len(trace) for trace in traces if trace),
        matched=sum(num_matched(output, trace) for output, trace in pairs if trace),
        preemptions=built.engine.counters.preemptions,
        needs_preemption=needs_preemption,
        owes_bits=owes_bits,
        differing=differing_fields(same),
    )


def is_foreign(bench: Bench, output: RequestOutput, trace: Sequence[int] | None) -> bool:
    """Whether the trace is not the reference's, so that there is nothing to compare with."""
    number = int(output.request_id[1:])
    return trace is not None and list(trace) != bench.reference[number].token_ids.tolist()


def num_matched(output: RequestOutput, trace: Sequence[int]) -> int:
    """Leading tokens that are the trace's."""
    pairs = zip(output.token_ids.tolist(), trace, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(trace))
    )


def differing_fields(pairs: Sequence[tuple[RequestOutput, RequestOutput]]) -> tuple[str, ...]:
    """Fields of an output in which any pair differs in a bit."""
    assert pairs
    found = []
    for field in fields(RequestOutput):
        sides = [(getattr(a, field.name), getattr(b, field.name)) for a, b in pairs]
        if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in sides):
            found.append(field.name)
    return tuple(found)


def print_table(rows: Sequence[Row]) -> None:
    """A Markdown table, and a line a failure."""
    print("| row | finished | trace tokens | preemptions | fields equal | verdict |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        if not r.differing:
            equal = "all"
        else:
            equal = f"not {', '.join(r.differing)}" if r.owes_bits else "not owed"
        print(
            f"| {r.name} | {r.finished} of {r.requests} | {r.matched} of {r.tokens} "
            f"| {r.preemptions} | {equal} | {'ok' if r.ok else 'FAIL'} |"
        )


def emulated(**sizes: int) -> ParallelConfig:
    """Ranks that take turns on one device."""
    return ParallelConfig(backend="emulated", reduction="rank_order", **sizes)


def smallest_split(text: Any) -> int:
    """The least number of tensor-parallel ranks that shares out all heads."""
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    return next(n for n in range(2, heads + 1) if heads % n == 0 and kv_heads % n == 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="a model directory; default: the demo model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--attention-backend", choices=("eager", "sdpa", "triton"), default="eager")
    parser.add_argument("--tensor-parallel-size", type=int, help="default: the smallest that works")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(arguments)
    if options.model is None:
        from trace_audit.models.demo import demo_model
        from trace_audit.storage.fingerprint import cache_dir

        options.model = demo_model(cache_dir())
    return options


if __name__ == "__main__":
    sys.exit(main())
