"""Stored expert choices are transformers' own, of the row that gives each token's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import trace_audit.models.loader as loader
from tests.engine.speculation import Scripted, speculating
from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import Harness, differing_columns, engine_config, random_prompts
from trace_audit.engine.build import build_engine
from trace_audit.models.routing import routing_of

FAMILIES = {"qwen3-moe": (0, 2, 3), "mixtral": (0, 1, 2, 3)}
PROMPTS = random_prompts([3, 20, 9, 31])
STEPS = 6


def router_logits(loaded: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Of every layer with a router, what transformers' own forward of a sequence gives: [T, E]."""
    model = loaded.model
    ours = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=next(model.parameters()).device)
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    model.config._attn_implementation = ours
    return [logits.reshape(len(tokens), -1).cpu() for logits in out.router_logits]


def expected(loaded: Any, prompt: list[int], tokens: list[int]) -> tuple[np.ndarray, float]:
    """Experts at the rows of the outputs, [T, L, 2], and how near the third is to the second."""
    layers = [g[len(prompt) - 1 : -1] for g in router_logits(loaded, [*prompt, *tokens])]
    top = [logits.topk(3) for logits in layers]
    ids = np.stack([t.indices[:, :2].sort(-1).values.numpy() for t in top], axis=1)
    return ids, min(float((t.values[:, 1] - t.values[:, 2]).min()) for t in top)


def check(harness: Harness, outputs: list[Any]) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids, margin = expected(harness.loaded, prompt, output.token_ids.tolist())
        assert margin > 1e-4  # far from what float32 can turn round
        assert output.expert_ids.dtype == np.uint16
        assert (output.expert_ids == ids).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("moe_backend", ["eager", "batched_mm", "grouped_mm"])
def test_decode_and_prefill_store_what_the_router_chose(checkpoint, device, family, moe_backend):
    loaded = loader.load_model(
        checkpoint(family),
        dtype=torch.float32,
        device=device,
        lm_head_dtype=torch.float32,
        moe_backend=moe_backend,
    )
    assert loaded.routing is not None
    assert (loaded.routing.layers, loaded.routing.num_experts) == (FAMILIES[family], 4)
    assert loaded.routing.reason is None
    harness = around(loaded, device, max_num_batched_tokens=16)
    recorded = harness.record(PROMPTS, STEPS)
    check(harness, recorded)
    assert len({tuple(o.expert_ids.ravel()) for o in recorded}) > 1
    ways: list[dict[str, Any]] = [{"path": "prefill"}, {"path": "prefill", "prefill_chunk": 7}]
    if moe_backend == "batched_mm":
        ways.append({"fixed_batch": True})  # rows of padding behind the requests' own
    for changes in ways:
        other = around(loaded, device, **changes)
        check(other, other.replay(PROMPTS, recorded))


def around(loaded: Any, device: torch.device, **changes: Any) -> Harness:
    config = engine_config(device=device.type, **changes)
    return Harness.around(loaded, build_engine(loaded, config))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_requests_keep_their_own(checkpoint, device, preemption):
    tight = Harness.make(
        checkpoint("qwen3-moe"), device, num_kv_blocks=6, preemption=preemption, max_num_seqs=4
    )
    outputs = tight.record(PROMPTS, STEPS)
    assert tight.built.engine.counters.preemptions > 0
    check(tight, outputs)


def test_verified_drafts_store_what_the_rows_that_stayed_chose(checkpoint, device):
    directory = checkpoint("qwen3-moe")
    plain = Harness.make(directory, device).record(PROMPTS, STEPS)
    known = {f"r{i}": output.token_ids.tolist() for i, output in enumerate(plain)}
    scripted = Scripted(continuations=known, wrong=4)
    # A draft model with routers of its own: what it chooses is nobody's.
    accepted = []
    for how in ({"proposer": scripted}, {"draft": checkpoint("mixtral")}):
        drafting = speculating(directory, device, **how)
        check(drafting, drafting.replay(PROMPTS, plain))
        counters = drafting.built.engine.counters.as_counts()
        accepted.append(counters["accepted_draft_tokens"])
        assert counters["draft_tokens"] > accepted[-1]
    assert max(accepted) > 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (1, 4), (2, 2)])
def test_ranks_store_the_choices_of_all_layers(checkpoint, device, tensor, pipeline):
    whole = Harness.make(checkpoint("qwen3-moe"), device).record(PROMPTS, STEPS)
    parallel = emulated(tensor, pipeline)
    with emulated_harness(checkpoint("qwen3-moe"), device, parallel) as split:
        outputs = split.replay(PROMPTS, whole)
        assert split.loaded.routing is not None
        assert split.loaded.routing.layers == FAMILIES["qwen3-moe"]
    for a, b in zip(whole, outputs, strict=True):
        assert (a.expert_ids == b.expert_ids).all()


def test_looking_changes_no_bit(checkpoint, device, monkeypatch):
    directory = checkpoint("qwen3-moe")
    looked = Harness.make(directory, device, torch.bfloat16).record(PROMPTS, STEPS)
    monkeypatch.setattr(loader, "capture_choices", lambda model, routing: None)
    blind = Harness.make(directory, device, torch.bfloat16).record(PROMPTS, STEPS)
    assert differing_columns(looked, blind) == {"expert_ids"}
    assert blind[0].expert_ids.shape == (STEPS, 0, 0)


def test_a_dense_model_has_none(checkpoint, device):
    harness = Harness.make(checkpoint(), device)
    assert harness.loaded.routing is None
    assert harness.record(PROMPTS[:1], 2)[0].expert_ids.shape == (2, 0, 0)


class OwnExperts(torch.nn.Module):
    """Experts that find out by themselves who is chosen."""

    num_experts = 4

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_routers_that_choose_different_numbers_give_a_reason(checkpoint, device):
    harness = Harness.make(checkpoint("mixtral"), device)
    harness.loaded.model.model.layers[2].mlp.gate.top_k = 1
    routing = routing_of(harness.loaded.model)
    assert routing is not None
    assert "do not all choose as many" in str(routing.reason)
    assert loader.capture_choices(harness.loaded.model, routing) is None


def test_experts_that_are_not_told_who_is_chosen_give_a_reason():
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([OwnExperts(), OwnExperts()])})
    routing = routing_of(model)
    assert routing is not None
    assert routing.layers == (0, 1)
    assert "are not told which of them were chosen" in str(routing.reason)
    assert loader.capture_choices(model, routing) is None
