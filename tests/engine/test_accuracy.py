"""Our float32 forward against transformers' own, over model families and backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny import Harness, random_prompts


def transformers_logprobs(model, prompt, tokens, device):
    """Logprobs of `tokens` from one full forward with transformers' eager attention."""
    model.config._attn_implementation = "eager"
    ids = torch.tensor([list(prompt) + list(tokens)], device=device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        (family, backend)
        for family in ("llama", "llama-tied", "qwen3", "gemma3", "gemma2")
        for backend in ("eager", "sdpa", "triton")
        if (family, backend) != ("gemma2", "sdpa")  # soft-capping, which sdpa refuses
    ],
)
def test_float32_logprobs_agree_with_transformers(checkpoint, device, family, backend):
    # Contexts cross the block size of 8 and the sliding window of 24, at prefill and at decode.
    prompts = random_prompts([5, 20, 60] if backend != "triton" else [5, 22, 40])
    steps = 20 if backend != "triton" else 5
    harness = Harness.make(
        checkpoint(family), device, attention_backend=backend, max_num_batched_tokens=32
    )
    outputs = harness.record(prompts, steps)
    for prompt, output in zip(prompts, outputs, strict=True):
        want = transformers_logprobs(
            harness.loaded.model, prompt, output.token_ids.tolist(), device
        )
        assert np.abs(output.logprob - want).max() <= (5e-5 if backend == "eager" else 1e-4)


def test_sdpa_refuses_a_soft_capped_model(checkpoint, device):
    from trace_audit.errors import ModelError

    with pytest.raises(ModelError, match="soft-cap"):
        Harness.make(checkpoint("gemma2"), device, attention_backend="sdpa")


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_float32_head_over_a_bfloat16_model(checkpoint, device, family):
    prompts = random_prompts([5, 20])
    plain = Harness.make(checkpoint(family), device, torch.bfloat16)
    recorded = plain.record(prompts, 6)
    cast = Harness.make(checkpoint(family), device, torch.bfloat16, head_dtype=torch.float32)
    model = cast.loaded.model
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight.dtype == torch.float32
    replayed = cast.replay(prompts, recorded)
    for a, b in zip(recorded, replayed, strict=True):
        rounded = torch.from_numpy(b.top_logprobs + b.logsumexp[:, None])
        # A bfloat16 head rounds every logit to 8 bits; a float32 one does not.
        assert not torch.equal(rounded, rounded.bfloat16().float())
        assert 0 < np.abs(a.logprob - b.logprob).max() < 0.1
