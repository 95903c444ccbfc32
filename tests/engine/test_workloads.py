"""Random workloads: whatever arrives, every trace comes back and no request touches another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.tiny import VOCABULARY, Harness, differing_columns, engine_config
from trace_audit.engine.build import build_engine
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.loader import load_model

BLOCK_SIZE = 2
MAX_PROMPT, MAX_OUTPUT = 12, 14
LONGEST = -(-(MAX_PROMPT + MAX_OUTPUT) // BLOCK_SIZE)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request; its tokens follow from its numbers, so that examples stay small."""

    prompt_len: int
    output_len: int
    is_replayed: bool
    first_token: int
    arrives_at: int

    @property
    def trace(self) -> list[int] | None:
        return self._tokens(self.output_len, 13) if self.is_replayed else None

    def request(self, harness: Harness, index: int) -> Request:
        prompt = self._tokens(self.prompt_len, 7)
        if self.is_replayed:
            return harness.request(index, prompt, trace_decode_token_ids=self.trace)
        return harness.request(index, prompt, max_tokens=self.output_len, ignore_eos=True)

    def _tokens(self, count: int, factor: int) -> list[int]:
        return [(self.first_token + factor * i) % VOCABULARY for i in range(count)]


arrivals = st.builds(
    Arrival,
    prompt_len=st.integers(min_value=1, max_value=MAX_PROMPT),
    output_len=st.integers(min_value=1, max_value=MAX_OUTPUT),
    is_replayed=st.booleans(),
    first_token=st.integers(min_value=0, max_value=VOCABULARY - 1),
    arrives_at=st.integers(min_value=0, max_value=6),
)


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Slots, blocks and budget; the cache holds at least one sequence."""
    slots = draw(st.integers(min_value=3, max_value=6))
    return {
        "max_num_seqs": slots,
        "max_num_batched_tokens": draw(st.integers(min_value=slots, max_value=16)),
        "num_kv_blocks": draw(st.integers(min_value=LONGEST, max_value=LONGEST + 4)),
        "block_size": BLOCK_SIZE,
        "attention_backend": draw(st.sampled_from(["eager", "sdpa"])),
        "max_model_len": 32,
    }


@pytest.fixture(scope="module")
def loaded(checkpoint, device) -> LoadedModel:
    """One model under the engines of all examples."""
    directory = checkpoint("llama-2l")
    return load_model(directory, dtype=torch.float32, device=device, lm_head_dtype=torch.float32)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("fixed_batch", [False, True])
def test_any_workload_keeps_every_request_to_itself(loaded, device, fixed_batch, preemption):
    preemptions = 0

    # The same examples every time. Looking for the smallest that fails takes minutes: to have it
    # done, add Phase.shrink.
    @settings(
        derandomize=True,
        max_examples=12,
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )
    @given(engine=engines(), workload=st.lists(arrivals, min_size=4, max_size=8))
    def check(engine: dict[str, Any], workload: list[Arrival]) -> None:
        nonlocal preemptions
        config = engine_config(
            device=device.type, fixed_batch=fixed_batch, preemption=preemption, **engine
        )
        harness = Harness.around(loaded, build_engine(loaded, config))
        requests = [arrival.request(harness, i) for i, arrival in enumerate(workload)]
        outputs = run(harness, requests, workload)
        nothing_is_left(harness)
        every_request_got_its_tokens(workload, outputs)
        counters = harness.built.engine.counters
        preemptions += counters.preemptions
        if config.fixed_batch and not counters.recomputed_tokens:
            for i, (arrival, output) in enumerate(zip(workload, outputs, strict=True)):
                alone = harness.run([arrival.request(harness, i)])
                assert differing_columns([output], alone) == set()

    check()
    assert preemptions > 5, "the examples put no pressure on the cache"


def every_request_got_its_tokens(workload: list[Arrival], outputs: list[RequestOutput]) -> None:
    for arrival, output in zip(workload, outputs, strict=True):
        if arrival.trace is not None:
            assert output.token_ids.tolist() == arrival.trace
        else:
            assert len(output.token_ids) == arrival.output_len


def run(harness: Harness, requests: list[Request], workload: list[Arrival]) -> list[RequestOutput]:
    """Step by step, so that requests arrive while others run; rows are watched all along."""
    engine = harness.built.engine
    waiting = sorted(range(len(requests)), key=lambda i: workload[i].arrives_at)
    step = 0
    with torch.inference_mode():
        while waiting or engine._scheduler.has_work:
            while waiting and (
                workload[waiting[0]].arrives_at <= step or not engine._scheduler.has_work
            ):
                engine._scheduler.add(requests[waiting.pop(0)])
            engine.step()
            rows_are_their_owners(harness, requests)
            step += 1
    return engine._outputs.collect(requests)


def rows_are_their_owners(harness: Harness, requests: list[Request]) -> None:
    """Slots and blocks have one owner each, and a slot's row is its request's tokens."""
    engine = harness.built.engine
    running = engine._scheduler.running
    assert len({r.slot for r in running}) == len(running)
    held = [block for r in running for block in r.block_ids]
    assert len(held) == len(set(held))
    assert engine._scheduler.pool.num_free + len(held) == engine._scheduler.pool.num_blocks
    assert all(r.slot == -1 and not r.block_ids for r in requests if r not in running)
    state = engine._runner.request_state
    for r in running:
        mine = [
            *r.prompt_token_ids,
            *r.output_token_ids,
            *(r.trace or [])[len(r.output_token_ids) :],
        ]
        assert state.all_token_ids.gpu[r.slot, : len(mine)].tolist() == mine
        assert int(state.total_len.gpu[r.slot]) == r.total_len


def nothing_is_left(harness: Harness) -> None:
    engine = harness.built.engine
    pool, runner = engine._scheduler.pool, engine._runner
    assert sorted(pool._free) == list(range(pool.num_blocks))
    assert len(runner.request_state._free_slots) == len(runner.request_state.total_len.gpu)
    assert runner._swapped == {}
    assert not runner.trace_replay.trace_len.np.any()
