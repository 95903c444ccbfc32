"""Whole distributions are those of the stored statistics, at the wanted steps, and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import VOCABULARY, Harness, random_prompts
from trace_audit.engine.full_logprobs import FullLogprobs
from trace_audit.engine.request import Request, RequestOutput

# Over the token budget of 64, so that prompts come in chunks.
LENGTHS = [3, 8, 70, 31, 9, 17]
STEPS = 10
LAYOUTS = {"single": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}


@pytest.fixture(params=LAYOUTS)
def make(request) -> Iterator[Callable[..., Harness]]:
    tensor, pipeline = LAYOUTS[request.param]
    with ExitStack() as stack:

        def make(directory: Path, device: torch.device, *args: Any, **changes: Any) -> Harness:
            if tensor * pipeline == 1:
                return Harness.make(directory, device, *args, **changes)
            parallel = emulated(tensor, pipeline)
            return stack.enter_context(
                emulated_harness(directory, device, parallel, *args, **changes)
            )

        yield make


def wanting(request: Request, priority: dict[int, float]) -> Request:
    request.full_logprobs = np.full(request.params.max_tokens, np.inf)
    for step, value in priority.items():
        request.full_logprobs[step] = value
    return request


def run(harness: Harness, requests: list[Request], at_most: int) -> list[RequestOutput]:
    return harness.built.engine.run(requests, max_full_logprobs=at_most)


def check_rows(output: RequestOutput) -> None:
    """Each kept row has the very bits of the statistics of its step."""
    for step, row in zip(output.full_logprob_steps, output.full_logprobs, strict=True):
        assert row.dtype == np.float32
        assert row.shape == (VOCABULARY,)
        assert row[output.token_ids[step]] == output.logprob[step]
        assert (row[output.top_token_ids[step]] == output.top_logprobs[step]).all()
        ids = output.support_token_ids[step]
        assert (row[ids] == output.support_logprobs[step]).all()
        assert float(np.exp(row.astype(np.float64)).sum()) == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_statistics(checkpoint, device, make, backend, dtype):
    harness = make(checkpoint(), device, dtype, attention_backend=backend)
    wanted = [{0: 0.0, 4: 0.0, 9: 0.0}, {}, {0: 0.0}, {1: 0.0}, {8: 0.0}, {0: 0.0, 1: 0.0}]
    requests = [
        wanting(harness.request(i, p, max_tokens=STEPS, ignore_eos=True), w)
        for i, (p, w) in enumerate(zip(random_prompts(LENGTHS), wanted, strict=True))
    ]
    outputs = run(harness, requests, at_most=100)
    assert [o.full_logprob_steps.tolist() for o in outputs] == [sorted(w) for w in wanted]
    for output in outputs:
        check_rows(output)


def test_a_replay_has_the_bits_of_its_record(checkpoint, device, make):
    prompts = random_prompts(LENGTHS)
    harness = make(checkpoint(), device)
    wanted = {3: 0.0, 7: 0.0}
    requests = [
        wanting(harness.request(i, p, max_tokens=STEPS, ignore_eos=True), wanted)
        for i, p in enumerate(prompts)
    ]
    recorded = run(harness, requests, at_most=100)
    replays = [
        wanting(
            harness.request(i, p, o.support_token_ids, trace_decode_token_ids=o.token_ids.tolist()),
            wanted,
        )
        for i, (p, o) in enumerate(zip(prompts, recorded, strict=True))
    ]
    replayed = run(harness, replays, at_most=100)
    for a, b in zip(recorded, replayed, strict=True):
        assert a.full_logprobs.tobytes() == b.full_logprobs.tobytes()
        assert len(a.full_logprobs) == 2


def test_preemption_keeps_every_step_once(checkpoint, device):
    prompts = random_prompts([20, 20, 20, 20])
    kept = []
    for changes in ({}, {"num_kv_blocks": 9}, {"num_kv_blocks": 9, "preemption": "recompute"}):
        harness = Harness.make(checkpoint(), device, **changes)
        requests = [
            wanting(
                harness.request(i, p, max_tokens=STEPS, ignore_eos=True),
                dict.fromkeys(range(STEPS), 0.0),
            )
            for i, p in enumerate(prompts)
        ]
        outputs = run(harness, requests, at_most=100)
        assert bool(harness.built.engine.counters.preemptions) is bool(changes)
        for output in outputs:
            check_rows(output)
        kept.append([o.full_logprob_steps.tolist() for o in outputs])
    assert kept == [[list(range(STEPS))] * 4] * 3


def test_the_smallest_priorities_are_kept_however_the_requests_are_scheduled(checkpoint, device):
    priority = np.random.default_rng(0).random((6, STEPS))
    smallest = np.sort(priority.ravel())[:7]
    for slots in (1, 2, 4):
        harness = Harness.make(checkpoint(), device, max_num_seqs=slots)
        requests = [
            wanting(
                harness.request(i, p, max_tokens=STEPS, ignore_eos=True),
                dict(enumerate(priority[i])),
            )
            for i, p in enumerate(random_prompts(LENGTHS))
        ]
        outputs = run(harness, requests, at_most=7)
        kept = [priority[i, s] for i, o in enumerate(outputs) for s in o.full_logprob_steps]
        assert sorted(kept) == smallest.tolist()
        for output in outputs:
            check_rows(output)


def test_the_next_run_keeps_nothing_of_the_one_before(checkpoint, device):
    harness = Harness.make(checkpoint(), device)
    request = wanting(harness.request(0, [5, 6], max_tokens=4, ignore_eos=True), {0: 0.0})
    assert len(run(harness, [request], at_most=3)[0].full_logprobs) == 1
    again = harness.run([harness.request(0, [5, 6], max_tokens=4, ignore_eos=True)])[0]
    assert again.full_logprobs.shape == (0, VOCABULARY)
    unasked = wanting(harness.request(0, [5, 6], max_tokens=4, ignore_eos=True), {0: 0.0})
    assert len(harness.run([unasked])[0].full_logprobs) == 0


def test_never_more_rows_than_asked_for_and_none_of_infinite_priority():
    kept = FullLogprobs(3)
    logits = torch.zeros(5)
    priorities = np.random.default_rng(1).permutation(50) / 50
    for step, priority in enumerate(priorities.tolist()):
        if kept.wants(priority):
            kept.keep("r", step, priority, logits, torch.logsumexp(logits, 0))
        assert len(kept._kept) <= 3
    assert not kept.wants(float("inf"))
    assert not FullLogprobs(3).wants(float("inf"))
    assert not FullLogprobs(0).wants(0.0)
    steps, rows = kept.collect("r", 5)
    assert sorted(priorities[steps]) == [0.0, 0.02, 0.04]
    np.testing.assert_allclose(rows, -np.log(5), rtol=1e-6)
    assert len(kept.collect("r", 5)[0]) == 0


@pytest.mark.gpu
def test_cuda_rows_are_kept_on_the_host(checkpoint, device):
    harness = Harness.make(checkpoint(), device, torch.bfloat16, attention_backend="triton")
    requests = [
        wanting(
            harness.request(i, p, max_tokens=STEPS, ignore_eos=True),
            {s: float(s % 3 + i) for s in range(STEPS)},
        )
        for i, p in enumerate(random_prompts(LENGTHS))
    ]
    outputs = run(harness, requests, at_most=9)
    assert sum(len(o.full_logprobs) for o in outputs) == 9
    for output in outputs:
        check_rows(output)
