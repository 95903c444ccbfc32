"""The demo model with drafts: the same tokens, the same logprobs, and how many drafts stayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_PROMPTS = 6
NUM_TOKENS = 40
TOLERANCE = 1e-4  # nats, of float32 logprobs
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 256, "block_size": 16}
# Largest and smallest share of drafts that may stay: the model agrees with itself, up to near ties.
RATES = {"ngram": (0.02, 0.9), "draft_model": (0.97, 1.0)}


@pytest.fixture(scope="module")
def demo() -> Path:
    from trace_audit.models.demo import demo_model
    from trace_audit.storage.fingerprint import cache_dir

    return demo_model(cache_dir())


@pytest.fixture(scope="module")
def prompts(demo: Path) -> list[list[int]]:
    from trace_audit.storage.prompts import read_prompts
    from trace_audit.tokenizer import load_tokenizer, render_prompt

    tokenizer = load_tokenizer(demo)
    path = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
    return [render_prompt(tokenizer, entry) for entry in read_prompts(path)][:NUM_PROMPTS]


@pytest.fixture(scope="module")
def plain(demo: Path, prompts: list[list[int]], device: torch.device) -> Any:
    from tests.tiny import Harness

    harness = Harness.make(demo, device, attention_backend="sdpa", **SIZES)
    return harness.record(prompts, NUM_TOKENS)


@pytest.fixture(params=RATES)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def speculating(demo: Path, device: torch.device, method: str) -> Any:
    from tests.engine.speculation import ngram, speculating

    how = {"draft": demo} if method == "draft_model" else {"speculative": ngram()}
    return speculating(demo, device, attention_backend="sdpa", **how, **SIZES)


def check(harness: Any, outputs: Any, plain: Any, method: str) -> None:
    from trace_audit.acceptance import acceptance

    worst = 0.0
    for output, want in zip(outputs, plain, strict=True):
        assert output.token_ids.tolist() == want.token_ids.tolist()
        worst = max(worst, float(np.abs(output.logprob - want.logprob).max()))
    stayed = acceptance(harness.built.engine.counters.as_counts())
    assert stayed is not None
    print(json.dumps({"method": method, "max_abs_delta": worst, **stayed}))
    assert worst <= TOLERANCE
    low, high = RATES[method]
    assert low <= stayed["acceptance_rate"] <= high
    assert stayed["mean_acceptance_length"] > 1


def test_a_replay_with_drafts_is_the_replay_without(demo, prompts, plain, device, method):
    harness = speculating(demo, device, method)
    check(harness, harness.replay(prompts, plain), plain, method)


def test_greedy_decoding_with_drafts_chooses_the_same_tokens(demo, prompts, plain, device, method):
    harness = speculating(demo, device, method)
    check(harness, harness.record(prompts, NUM_TOKENS), plain, method)
