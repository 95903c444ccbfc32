"""The demo model itself: a thousand greedy tokens against transformers' own full forward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 64
# Largest |delta logprob| in nats of each float32 backend.
LIMITS = {"eager": 5e-5, "sdpa": 1e-4, "triton": 1e-4}


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
    return [render_prompt(tokenizer, entry) for entry in read_prompts(path)]


def harness(demo: Path, device, backend: str):
    from tests.tiny import Harness

    return Harness.make(
        demo, device, attention_backend=backend, max_num_seqs=32, max_num_batched_tokens=2048,
        max_model_len=256, block_size=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace(demo: Path, prompts: list[list[int]], device):
    return harness(demo, device, "eager").record(prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def reference(demo: Path, prompts: list[list[int]], trace, device) -> list[np.ndarray]:
    """transformers' own logprobs of the trace, from one full forward a sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        demo, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.to(device).eval()
    logprobs = []
    with torch.inference_mode():
        for prompt, output in zip(prompts, trace, strict=True):
            ids = torch.tensor([prompt + output.token_ids.tolist()], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            rows = torch.log_softmax(logits.float(), -1)
            logprobs.append(rows.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy())
    return logprobs


@pytest.mark.parametrize("backend", LIMITS)
def test_float32_logprobs_against_transformers(
    demo, prompts, trace, reference, device, backend, record_property
):
    outputs = harness(demo, device, backend).replay(prompts, trace)
    assert sum(len(o.token_ids) for o in outputs) >= 1000
    worst = max(
        float(np.abs(output.logprob - want).max())
        for output, want in zip(outputs, reference, strict=True)
    )
    record_property("max_abs_delta_logprob", worst)
    print(json.dumps({"backend": backend, "device": str(device), "max_abs_delta": worst}))
    assert worst <= LIMITS[backend]
