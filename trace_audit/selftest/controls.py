"""The controls: what is planted, what must come of it, and what the tool says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from trace_audit.selftest.bench import Bench
from trace_audit.selftest.faults import OneUnit, SwappedKeys
from trace_audit.selftest.finding import Finding
from trace_audit.selftest.noise_control import logit_noise
from trace_audit.storage.run_files import build_run

Control: TypeAlias = Callable[[Bench], Finding]

_BITWISE = ("--profile", "bitwise")
_LAYER = 1
_FEW = 4  # sequences that run in batches of one
# What a row says of its token; the rest of the columns say where it is and how it was launched.
_OF_THE_TOKEN = (
    "token_id", "logprob", "rank", "tie_count", "top_token_ids", "top_logprobs", "entropy",
    "logsumexp", "support_logprobs", "log_tail_mass", "logits_hash",
)  # fmt: skip


def shifted_tokens(bench: Bench) -> Finding:
    """Every row is the next token's, as from an engine that is off by one."""
    name = "shifted"
    info = bench.audit.run_info("record")
    # Straight into place: the writer of runs holds every row to the trace and would refuse these.
    build_run(
        bench.path / "runs" / name,
        name,
        [_shifted(bench.audit.read_tokens("record"))],
        trace_sha256=bench.audit.info.trace_sha256,
        run_info=info,
        counters=info["counters"],
    )
    answer = bench.report(name, *_BITWISE)
    return Finding(
        control="shifted tokens",
        planted="every row holds the next token's",
        expected="exit 4, INVALID for other tokens",
        said=answer.verdict,
        holds=answer.exit_code == 4 and "other tokens than the trace" in answer.message,
    )


def swapped_keys(bench: Bench) -> Finding:
    """Keys of two pages of one layer change places, in the output of every sequence."""
    fault = SwappedKeys(layer=_LAYER, page=bench.page_in_every_output())
    bench.replay("swapped", fault)
    answer = bench.report("swapped", *_BITWISE)
    position = fault.first_position(bench.block_size)
    first, onset = answer.first_difference, answer.onset or {}
    begins = onset.get("position"), onset.get("persistent"), first and first["position"]
    return Finding(
        control="swapped keys",
        planted=f"keys of pages {fault.page} and {fault.page + 1} of layer {fault.layer} swapped",
        expected=f"exit 1, FAIL, onset {position}, persistent, first difference {position}",
        said=f"{answer.verdict}, onset {begins[0]}, {'' if begins[1] else 'not '}persistent, "
        f"first difference {begins[2]}",
        holds=answer.exit_code == 1 and begins == (position, True, position),
    )


def same_again(bench: Bench) -> Finding:
    """The record's own configuration, in a process of its own."""
    bench.replay("again")
    answer = bench.report("again", *_BITWISE)
    return Finding(
        control="A/A",
        planted="nothing",
        expected="exit 0, PASS BITWISE",
        said=answer.verdict,
        holds=answer.verdict == "exit 0, PASS BITWISE",
    )


def one_unit(bench: Bench) -> Finding:
    """One unit in the last place of one logit: no logprob need move, but the bits do."""
    index = len(bench.trace) // 2
    sequence = bench.trace[index]
    step = len(sequence.output_token_ids) // 2
    position = len(sequence.prompt_token_ids) + step
    bench.replay("unit", OneUnit(sequence_index=index, position=position))
    answer = bench.report("unit", *_BITWISE)
    rows, first = answer.pair.get("unequal_rows"), answer.first_difference or {}
    place = first.get("sequence_id"), first.get("step")
    return Finding(
        control="one unit",
        planted="one unit in the last place of one logit",
        expected=f"exit 1, FAIL, unequal rows 1, sequence {sequence.sequence_id} step {step}",
        said=f"{answer.verdict}, unequal rows {rows}, sequence {place[0]} step {place[1]}",
        holds=answer.exit_code == 1 and rows == 1 and place == (sequence.sequence_id, step),
    )


def batch_of_one(bench: Bench) -> Finding:
    """Some sequences alone in their launches: on some machines bit-equal, so nothing is owed."""
    few = tuple(sequence.sequence_id for sequence in bench.trace[:_FEW])
    bench.replay("alone", only=few, max_num_seqs=1)
    answer = bench.report("alone")
    pair = answer.pair
    largest = 0.0 if pair["bitwise"] else answer.value("abs.max")
    return Finding(
        control="batch 1",
        planted=f"{_FEW} sequences with max_num_seqs = 1",
        expected="nothing: it depends on the machine",
        said=f"{pair['unequal_rows']} of {pair['tokens']} rows unequal, "
        f"largest |delta| {largest:.1e} nats",
        holds=None,
    )


CONTROLS: tuple[Control, ...] = (
    logit_noise,
    shifted_tokens,
    swapped_keys,
    same_again,
    one_unit,
    batch_of_one,
)
"""In the order in which they are run."""


def _shifted(tokens: pa.Table) -> pa.Table:
    """Each row with the token and the statistics of the next row of its sequence."""
    index = tokens["sequence_index"].to_numpy()
    is_last = np.append(index[1:] != index[:-1], True)
    following = tokens.take(np.arange(len(index)) + ~is_last)
    for name in _OF_THE_TOKEN:
        place = tokens.schema.get_field_index(name)
        tokens = tokens.set_column(place, tokens.schema.field(name), following[name])
    return tokens
