"""What verification keeps of free requests' drafts, and the distribution of what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.speculation import Scripted, speculating
from tests.tiny import Harness, random_prompts
from trace_audit.config import SpeculativeConfig
from trace_audit.engine.draws import draw_draft_first, draw_ids, uniforms
from trace_audit.engine.request import RequestOutput
from trace_audit.engine.token_statistics import odd_multipliers
from trace_audit.kernels.statistics import REFERENCE

HOT = {"temperature": 1.3, "seed": 7}
# Largest share of a chi-square that the true distribution exceeds in one of 10,000 tests, over its
# degrees of freedom: Wilson and Hilferty's approximation.
Z = 3.72


def chi_square_limit(freedom: int) -> float:
    return freedom * (1 - 2 / (9 * freedom) + Z * (2 / (9 * freedom)) ** 0.5) ** 3


def drawn(logits: torch.Tensor, drafts: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    multipliers = odd_multipliers(logits.shape[1], logits.device)
    partials = REFERENCE.vocabulary_partials(logits, multipliers)
    maximum = partials.maximum.amax(-1)
    mass = REFERENCE.chunk_masses(logits, partials, drafts[:, None])
    return draw_draft_first(logits, maximum, mass, drafts, uniform)


@pytest.mark.parametrize("draft", [0, 255, 256, 299])
def test_a_token_drawn_draft_first_has_the_distribution_of_the_logits(draft, device):
    generator = torch.Generator().manual_seed(draft)
    row = torch.randn(300, generator=generator) * 2
    row[draft] = row.max() - 0.5  # likely, but not certain
    count = 10_000
    logits = row.to(device).expand(count, -1)
    uniform = torch.from_numpy(uniforms([1], [2], np.arange(count), 1)).to(device)
    drafts = torch.full((count,), draft, device=device)
    tokens = drawn(logits, drafts, uniform).cpu()
    expected = torch.softmax(row.double(), 0) * count
    seen = torch.bincount(tokens, minlength=300).double()
    assert abs(seen[draft] - expected[draft]) < 5 * expected[draft].sqrt()
    often = expected >= 5
    pooled_seen = torch.cat([seen[often], seen[~often].sum()[None]])
    pooled_expected = torch.cat([expected[often], expected[~often].sum()[None]])
    chi_square = float(((pooled_seen - pooled_expected) ** 2 / pooled_expected).sum())
    assert chi_square < chi_square_limit(len(pooled_seen) - 1)


def test_the_draft_comes_first_and_the_others_in_order(device):
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]], device=device).log().expand(5, -1)
    uniform = torch.tensor([[0.0], [0.3], [0.31], [0.62], [0.93]], device=device).double()
    drafts = torch.full((5,), 1, device=device)
    # Of 6.5: the draft has 2, then come 1, 3 and 0.5.
    assert drawn(logits, drafts, uniform).tolist() == [1, 1, 0, 2, 3]


def test_without_a_draft_nothing_changes(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 600, generator=generator).to(device)
    uniform = torch.rand(50, 1, generator=generator).double().to(device)
    nothing = torch.full((50,), -1, device=device)
    partials = REFERENCE.vocabulary_partials(logits, odd_multipliers(600, device))
    maximum = partials.maximum.amax(-1)
    mass = REFERENCE.chunk_masses(logits, partials, nothing[:, None])
    want = draw_ids(logits, maximum, mass, nothing[:, None], uniform)[:, 0]
    assert torch.equal(drawn(logits, nothing, uniform), want)


def test_a_certain_draft_and_an_impossible_one(device):
    infinite = float("-inf")
    logits = torch.tensor([[infinite, 0.0, infinite], [0.0, infinite, 0.0]], device=device)
    drafts = torch.tensor([1, 1], device=device)
    for u in (0.0, 0.4, 0.6, 1.0 - 2.0**-53):
        uniform = torch.full((2, 1), u, dtype=torch.float64, device=device)
        tokens = drawn(logits, drafts, uniform).tolist()
        assert tokens == [1, 0 if u < 0.5 else 2]


def hot(harness: Harness, prompts: list[list[int]], steps: int = 15) -> list[RequestOutput]:
    return harness.record(prompts, steps, **HOT)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts([5, 9, 14, 20])


@pytest.fixture(scope="module")
def plain(checkpoint, device, prompts) -> list[RequestOutput]:
    return hot(Harness.make(checkpoint(), device), prompts)


def script(outputs: list[RequestOutput], wrong: int = 0) -> Scripted:
    return Scripted(
        continuations={o.request_id: o.token_ids.tolist() for o in outputs}, wrong=wrong
    )


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_greedy_rejection_keeps_the_sampled_tokens(checkpoint, device, prompts, plain, wrong):
    harness = speculating(checkpoint(), device, proposer=script(plain, wrong))
    for output, want in zip(hot(harness, prompts), plain, strict=True):
        assert output.token_ids.tolist() == want.token_ids.tolist()
    counters = harness.built.engine.counters
    assert (counters.accepted_draft_tokens == counters.draft_tokens) == (wrong == 0)


PROBABILISTIC = SpeculativeConfig(rejection="probabilistic")


def test_probabilistic_rejection_depends_on_seed_sequence_and_step_alone(
    checkpoint, device, prompts, plain
):
    """Drafts that depend on the request's own tokens, whatever batch it is in."""
    together = hot(speculating(checkpoint(), device, PROBABILISTIC, draft=checkpoint()), prompts)
    narrow = speculating(checkpoint(), device, PROBABILISTIC, draft=checkpoint(), max_num_seqs=1)
    apart = hot(narrow, prompts)
    tokens = [o.token_ids.tolist() for o in together]
    assert tokens == [o.token_ids.tolist() for o in apart]
    assert tokens != [o.token_ids.tolist() for o in plain]
    assert any(rank > 1 for o in together for rank in o.rank)


def test_a_probabilistic_record_is_replayed(checkpoint, device, prompts):
    recorded = hot(speculating(checkpoint(), device, PROBABILISTIC, draft=checkpoint()), prompts)
    harness = Harness.make(checkpoint(), device)
    for output, want in zip(harness.replay(prompts, recorded), recorded, strict=True):
        assert output.token_ids.tolist() == want.token_ids.tolist()
        assert np.abs(output.logprob - want.logprob).max() < 1e-4


@pytest.mark.parametrize("rejection", ["greedy", "probabilistic"])
def test_the_tokens_of_a_run_have_the_models_distribution(checkpoint, device, rejection):
    """Two tokens of one prompt, many times: pairs as the model's own joint probabilities say.

    The scale makes the drafts likely, and two of three of them wrong in their second place.
    """
    temperature, count = 0.35, 700
    prompt = random_prompts([6])[0]
    speculative = PROBABILISTIC.model_copy(update={"rejection": rejection})
    greedy = Harness.make(checkpoint(), device).record([prompt], 4)[0].token_ids.tolist()
    continuations = {f"r{i}": greedy for i in range(count)}
    harness = speculating(
        checkpoint(), device, speculative, proposer=Scripted(continuations=continuations),
        max_num_seqs=64, max_num_batched_tokens=512,
    )  # fmt: skip
    outputs = harness.record([prompt] * count, 3, temperature=temperature, seed=5)
    counters = harness.built.engine.counters
    assert 0.05 < counters.accepted_draft_tokens / counters.draft_tokens < 0.95
    seconds = [o.token_ids[1] for o in outputs if o.token_ids[0] == greedy[0]]
    with torch.inference_mode():
        harness.loaded.model.config._attn_implementation = "eager"
        ids = torch.tensor([prompt + greedy[:1]], device=device)
        row = harness.loaded.model(input_ids=ids, use_cache=False).logits[0, -1].double().cpu()
    expected = torch.softmax(row / temperature, 0) * len(seconds)
    seen = torch.bincount(torch.tensor(seconds), minlength=len(row)).double()
    often = expected >= 5
    assert often.sum() >= 3
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < chi_square_limit(len(seen) - 1)


@pytest.mark.parametrize("rejection", ["greedy", "probabilistic"])
def test_a_draft_stays_with_its_probability_under_either_rule(checkpoint, device, rejection):
    """The first draft of many requests, of which each is a fresh draw."""
    temperature, count = 0.5, 600
    prompt = random_prompts([6])[0]
    plain = Harness.make(checkpoint(), device).record([prompt], 3)[0]
    draft = int(plain.token_ids[1])
    harness = speculating(
        checkpoint(), device, SpeculativeConfig(num_speculative_tokens=1, rejection=rejection),
        proposer=Scripted(continuations={f"r{i}": [0, draft, 0] for i in range(count)}),
        max_num_seqs=64, max_num_batched_tokens=512,
    )  # fmt: skip
    outputs = harness.record([prompt] * count, 3, temperature=temperature, seed=11)
    firsts = np.array([o.token_ids[0] for o in outputs])
    stayed = np.array([o.token_ids[1] == draft for o in outputs])
    counters = harness.built.engine.counters
    assert counters.draft_tokens == count
    assert counters.accepted_draft_tokens == stayed.sum()
    expected = _probability_after(harness, prompt, firsts, draft, temperature)
    deviation = np.sqrt((expected * (1 - expected)).sum())
    assert abs(stayed.sum() - expected.sum()) < 4 * deviation


def _probability_after(
    harness: Harness, prompt: list[int], firsts: np.ndarray, draft: int, temperature: float
) -> np.ndarray:
    """Of the draft, after the prompt and each of the first tokens."""
    unique, back = np.unique(firsts, return_inverse=True)
    harness.loaded.model.config._attn_implementation = "eager"
    device = next(harness.loaded.model.parameters()).device
    ids = torch.tensor([[*prompt, int(first)] for first in unique], device=device)
    with torch.inference_mode():
        rows = harness.loaded.model(input_ids=ids, use_cache=False).logits[:, -1].double().cpu()
    return torch.softmax(rows / temperature, -1)[:, draft].numpy()[back]
