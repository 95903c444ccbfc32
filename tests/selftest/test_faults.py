"""Each fault does what it says and nothing else; noise does what the expectations say."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from tests.tiny import Harness, engine_config, random_prompts
from trace_audit.selftest.expectation import (
    ExpectedFlips,
    Held,
    Recorded,
    kl_of_noise,
    kl_on_average,
)
from trace_audit.selftest.faults import LogitNoise, OneUnit, SwappedKeys
from trace_audit.storage.schema import SUPPORT_TAIL_DRAWS, SUPPORT_TOP_K
from trace_audit.storage.trace import TraceSequence

PROMPTS = random_prompts([5, 9, 16, 11])
MAX_TOKENS = 40


def faulty(checkpoint, device, fault, **changes) -> Harness:
    """An engine over the tiny model whose runner has the fault."""
    import torch

    from trace_audit.engine.build import build_engine
    from trace_audit.models.loader import load_model
    from trace_audit.selftest.runners import runner_of

    loaded = load_model(
        checkpoint(), dtype=torch.float32, device=device, lm_head_dtype=torch.float32
    )
    config = engine_config(device=device.type, **changes)
    return Harness.around(loaded, build_engine(loaded, config, make_runner=runner_of(fault)))


@pytest.fixture(scope="module")
def trace(checkpoint, device):
    return Harness.make(checkpoint(), device).record(PROMPTS, MAX_TOKENS)


def test_noise_does_not_depend_on_batches(checkpoint, device, trace):
    fault = LogitNoise(sigma=0.5, seed=3)
    together = faulty(checkpoint, device, fault).replay(PROMPTS, trace)
    alone = faulty(checkpoint, device, fault, max_num_seqs=1).replay(PROMPTS, trace)
    for healthy, a, b in zip(trace, together, alone, strict=True):
        assert np.abs(a.logprob - healthy.logprob).max() > 0.1
        np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-4)


def test_noise_is_what_it_says_at_every_position():
    fault = LogitNoise(sigma=0.5, seed=3)
    rows = np.stack([fault.of(i, p, 4096) for i in range(4) for p in range(16)])
    assert rows.std() == pytest.approx(0.5, rel=4 / math.sqrt(2 * rows.size))
    assert abs(rows.mean()) < 4 * 0.5 / math.sqrt(rows.size)
    similarity = np.corrcoef(rows) - np.eye(len(rows))
    # 2016 pairs: the largest of so many is under 5 standard errors.
    assert np.abs(similarity).max() < 5 / math.sqrt(4096)


def test_one_unit_changes_the_bits_of_one_row_and_no_logprob(checkpoint, device, trace):
    position = len(PROMPTS[2]) + 7
    fault = OneUnit(sequence_index=2, position=position)
    outputs = faulty(checkpoint, device, fault).replay(PROMPTS, trace)
    changed = [
        (index, step)
        for index, (a, b) in enumerate(zip(trace, outputs, strict=True))
        for step in np.flatnonzero(a.logits_hash != b.logits_hash)
    ]
    assert changed == [(2, 7)]
    assert (outputs[2].logprob == trace[2].logprob).all()


def test_swapped_keys_change_everything_from_one_position_on_and_nothing_before(
    checkpoint, device, trace
):
    fault = SwappedKeys(layer=1, page=2)
    first = fault.first_position(8)
    assert first == 33
    outputs = faulty(checkpoint, device, fault).replay(PROMPTS, trace)
    for healthy, planted in zip(trace, outputs, strict=True):
        differs = healthy.logits_hash != planted.logits_hash
        assert (differs == (healthy.position >= first)).all()


def test_a_healthy_engine_has_no_fault(checkpoint, device, trace):
    again = Harness.make(checkpoint(), device).replay(PROMPTS, trace)
    for a, b in zip(trace, again, strict=True):
        assert (a.logits_hash == b.logits_hash).all()


def recorded(logits: np.ndarray, seed: int) -> Recorded:
    """What a record run would store of logits float64 [N, V]."""
    draw = np.random.default_rng(seed)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logprobs, axis=1, kind="stable")
    top, rest = order[:, :SUPPORT_TOP_K], order[:, SUPPORT_TOP_K:]
    probabilities = np.exp(np.take_along_axis(logprobs, rest, 1))
    tail = probabilities.sum(axis=1)
    drawn = np.stack(
        [
            draw.choice(ids, SUPPORT_TAIL_DRAWS, p=p / p.sum())
            for ids, p in zip(rest, probabilities, strict=True)
        ]
    )
    ids = np.concatenate([top, drawn], axis=1).astype(np.int32)
    count = len(logits)
    sequence = TraceSequence(
        sequence_id="a",
        group_id="a",
        prompt_token_ids=np.array([1], dtype=np.int32),
        output_token_ids=top[:, 0].astype(np.int32),
        score_mask=None,
        finish_reason="length",
        source="greedy",
        support_token_ids=ids,
    )
    tokens = pa.table(
        {
            "sequence_index": np.zeros(count, dtype=np.int32),
            "position": np.arange(1, count + 1, dtype=np.int32),
            "support_logprobs": list(np.take_along_axis(logprobs, ids.astype(int), 1)),
            "log_tail_mass": np.log(tail),
        }
    )
    return Recorded.of([sequence], tokens)


def test_expected_kl_and_flips_are_those_of_the_full_distribution():
    """Against the exact KL of all V ids, with the tail summed out."""
    sigma, count, width = 0.1, 3000, 200
    logits = np.random.default_rng(0).normal(0, 2.5, (count, width))
    fault = LogitNoise(sigma=sigma, seed=1)
    noise = np.stack([fault.of(0, p, width) for p in range(1, count + 1)]).astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    exact = np.log((p * np.exp(noise)).sum(axis=1)) - (p * noise).sum(axis=1)
    stored = recorded(logits, seed=2)
    of_support = stored.noise(fault, width)
    average = Held.of(exact, kl_on_average(stored, sigma))
    of_noise = Held.of(exact, kl_of_noise(stored, of_support, sigma))
    assert average.holds(4)
    assert of_noise.holds(4)
    assert of_noise.error < average.error / 2
    flips = ExpectedFlips.of(stored, of_support, sigma)
    assert (flips.flips == ((logits + noise).argmax(axis=1) != logits.argmax(axis=1))).all()
    turned = int(flips.flips.sum()) - flips.by_others
    assert abs(turned - flips.chance.sum()) < 4 * math.sqrt(flips.chance.sum())


def test_a_position_without_a_support_is_left_out():
    logits = np.random.default_rng(0).normal(0, 2.5, (3, 200))
    whole = recorded(logits, seed=0)
    assert whole.rows.all()
    ids = whole.support_token_ids.copy()
    ids[1, -1] = -1
    sequence = TraceSequence(
        sequence_id="a",
        group_id="a",
        prompt_token_ids=np.array([1], dtype=np.int32),
        output_token_ids=np.zeros(3, dtype=np.int32),
        score_mask=None,
        finish_reason="length",
        source="greedy",
        support_token_ids=ids.astype(np.int32),
    )
    logprobs = [[None if i < 0 else -1.0 for i in row] for row in ids]
    tokens = pa.table(
        {
            "sequence_index": [0, 0, 0],
            "position": [1, 2, 3],
            "support_logprobs": logprobs,
            "log_tail_mass": [-1.0, -1.0, -1.0],
        }
    )
    part = Recorded.of([sequence], tokens)
    assert part.rows.tolist() == [True, False, True]
    assert part.position.tolist() == [1, 3]


def test_the_controls_need_no_torch():
    code = "import trace_audit.selftest.controls, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
