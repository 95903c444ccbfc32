"""Statistics of processed logits, against float64 over the whole row, written another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny import Harness, differing_columns, engine_config, random_prompts
from trace_audit.config import Distribution
from trace_audit.engine import token_statistics as stats
from trace_audit.engine.build import build_engine
from trace_audit.engine.sampler import Sampler, SamplingInputs
from trace_audit.engine.scoring import processed
from trace_audit.kernels.statistics import REFERENCE, TRITON

NEG_INF = float("-inf")
DISTRIBUTIONS = [
    Distribution(temperature=0.7),
    Distribution(temperature=1.6),
    Distribution(top_k=1),
    Distribution(top_k=7),
    Distribution(top_p=0.9),
    Distribution(top_p=1e-9),
    Distribution(temperature=1.3, top_k=50, top_p=0.8),
    Distribution(temperature=0.5, top_k=300, top_p=0.999),
]
VOCABULARIES = [1, 20, 255, 256, 257, 1000]


def make_logits(vocabulary: int, dtype=torch.float32, rows: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)


def plainly(row: list[float], wanted: Distribution) -> list[float]:
    """One row by a loop over its ids, best first, in float64; ids equal to the last kept stay."""
    x = [value / wanted.temperature for value in row]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    kept = order[: wanted.top_k] if wanted.top_k else order
    kept = [i for i in order if x[i] >= x[kept[-1]]]
    if wanted.top_p < 1:
        weight = {i: float(np.exp(x[i] - x[order[0]])) for i in kept}
        total, reached, last = sum(weight.values()), 0.0, kept[0]
        for last in kept:
            reached += weight[last]
            if reached >= wanted.top_p * total:
                break
        kept = [i for i in kept if x[i] >= x[last]]
    return [value if i in set(kept) else NEG_INF for i, value in enumerate(x)]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("wanted", DISTRIBUTIONS, ids=str)
def test_temperature_then_top_k_then_top_p(vocabulary, wanted, device):
    logits = make_logits(vocabulary).to(device)
    before = logits.clone()
    got = processed(logits, wanted)
    want = torch.tensor([plainly(row, wanted) for row in before.tolist()], dtype=torch.float64)
    assert torch.equal(got.cpu() > NEG_INF, want > NEG_INF)
    inside = want > NEG_INF
    assert (got.cpu().double()[inside] - want[inside]).abs().max() < 1e-5
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (Distribution(top_k=1), 2),
        (Distribution(top_k=3), 5),
        (Distribution(top_p=0.1), 2),
        (Distribution(top_p=0.85), 5),
        (Distribution(top_k=3, top_p=0.9), 5),
    ],
)
def test_an_id_that_equals_the_last_one_kept_is_kept(wanted, kept, device):
    row = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -3.0])
    for order in (list(range(7)), [6, 5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 6, 2, 4]):
        got = processed(row[order][None].to(device), wanted)[0].cpu()
        assert torch.equal(got[torch.tensor(order).argsort()] > NEG_INF, row >= (2, 1)[kept > 2])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("wanted", DISTRIBUTIONS, ids=str)
def test_a_broken_row_stays_broken_and_spoils_no_other(broken, wanted, device):
    logits = make_logits(600).to(device)
    clean = processed(logits, wanted)
    logits[1, 599] = broken
    got = processed(logits, wanted)
    assert not torch.isfinite(got[1].logsumexp(-1))
    others = [0, *range(2, len(logits))]
    assert torch.equal(got[others], clean[others])


def test_rows_do_not_depend_on_their_batch(device):
    wanted = Distribution(temperature=0.8, top_k=300, top_p=0.95)
    logits = make_logits(1000, torch.bfloat16).to(device)
    together = processed(logits, wanted)
    for row in range(len(logits)):
        assert torch.equal(processed(logits[row : row + 1], wanted)[0], together[row])


def score(kernels, logits, tokens, wanted, support=None):
    sampler = Sampler(
        vocabulary_size=logits.shape[1],
        device=logits.device,
        kernels=kernels,
        trace_replay=Forced(tokens),
        scored=wanted,
    )
    uniform = torch.full((len(logits), 5), 0.5, dtype=torch.float64, device=logits.device)
    inputs = SamplingInputs(
        temperatures=None,
        uniforms=uniform if support is None else None,
        support=support,
        has_support=None,
    )
    return sampler(logits, inputs, None, None)[1]


class Forced:
    """Stands in for the overwrite: every row replays its token."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def apply_trace(self, sampled: torch.Tensor, idx_mapping: object, state: object) -> None:
        sampled.copy_(self.tokens)


@pytest.fixture(params=["triton", "reference"])
def kernels(request: pytest.FixtureRequest):
    return TRITON if request.param == "triton" else REFERENCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("vocabulary", [257, 1000])
def test_every_statistic_is_of_the_processed_row(kernels, dtype, wanted, vocabulary, device):
    logits = make_logits(vocabulary, dtype).to(device)
    tokens = logits.float().argmax(-1)
    tokens[1::2] = torch.arange(len(tokens[1::2]), device=device)  # likely filtered out
    got = score(kernels, logits, tokens, wanted)
    rows = torch.tensor([plainly(r, wanted) for r in logits.double().tolist()], dtype=torch.double)
    exact = torch.log_softmax(rows, -1)
    forced = exact.gather(1, tokens.cpu()[:, None])[:, 0]
    assert torch.equal(got.logprob.cpu() == NEG_INF, forced == NEG_INF)
    kept = forced > NEG_INF
    assert (got.logprob.cpu().double()[kept] - forced[kept]).abs().max() < 1e-5
    chosen = rows.gather(1, tokens.cpu()[:, None])
    assert got.rank.tolist() == (1 + (rows > chosen).sum(-1)).tolist()
    assert got.tie_count.tolist() == ((rows == chosen).sum(-1) - 1).tolist()
    entropy = -torch.where(exact > NEG_INF, exact.exp() * exact, 0.0).sum(-1)
    assert (got.entropy.cpu().double() - entropy).abs().max() < 1e-5
    assert (got.logsumexp.cpu().double() - rows.logsumexp(-1)).abs().max() < 1e-5
    order = rows.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(got.top_token_ids.cpu().long(), order[:, :5])
    support = got.support_token_ids.cpu().long()
    assert torch.equal(support[:, :20], order[:, :20])
    tail = rows.scatter(1, order[:, :20], NEG_INF).logsumexp(-1) - rows.logsumexp(-1)
    assert torch.equal(got.log_tail_mass.cpu() == NEG_INF, tail == NEG_INF)
    has_tail = tail > NEG_INF
    assert ((got.log_tail_mass.cpu().double() - tail)[has_tail].abs() < 1e-5).all()
    drawn = support[:, 20:]
    assert torch.equal(drawn == -1, (~has_tail)[:, None].expand_as(drawn))
    assert (rows.gather(1, drawn.clamp(min=0)) > NEG_INF)[drawn >= 0].all()
    at = exact.gather(1, support.clamp(min=0))
    at = torch.where(support >= 0, at, torch.nan)
    assert torch.allclose(got.support_logprobs.cpu().double(), at, atol=1e-5, equal_nan=True)


def test_the_hash_and_the_choice_are_of_the_untouched_logits(kernels, device):
    logits = make_logits(1000).to(device)
    tokens = logits.argmax(-1)
    plain = score(kernels, logits, tokens, Distribution())
    other = score(kernels, logits, tokens, Distribution(temperature=0.5, top_k=3))
    assert torch.equal(plain.logits_hash, other.logits_hash)
    assert not torch.equal(plain.logprob, other.logprob)


def test_a_given_support_is_scored_as_it_is(kernels, device):
    logits = make_logits(1000).to(device)
    tokens = logits.argmax(-1)
    support = torch.arange(24, device=device).expand(len(logits), -1).int().contiguous()
    got = score(kernels, logits, tokens, Distribution(temperature=2.0, top_k=40), support)
    assert torch.equal(got.support_token_ids, support)
    want = torch.log_softmax(processed(logits, Distribution(temperature=2.0, top_k=40)), -1)
    assert torch.allclose(got.support_logprobs, want[:, :24], atol=1e-5)
    rest = want[:, 20:].logsumexp(-1)
    assert torch.allclose(got.log_tail_mass, rest, atol=1e-5)


@pytest.mark.parametrize(
    "neutral", [Distribution(), Distribution(top_k=1000), Distribution(top_k=10**6)]
)
def test_what_keeps_everything_is_the_raw_path(kernels, neutral, device):
    logits = make_logits(1000, torch.bfloat16).to(device)
    tokens = logits.float().argmax(-1)
    raw, same = (score(kernels, logits, tokens, d) for d in (Distribution(), neutral))
    for name in vars(raw):
        assert torch.equal(getattr(raw, name), getattr(same, name)), name


def test_the_blocked_path_gives_the_bits_of_the_plain_one(kernels, device):
    """Everything kept, but by the path that copies: a filter just short of the vocabulary."""
    logits = make_logits(1000, torch.bfloat16).to(device)
    logits[:, 0] = NEG_INF  # the one id that top_k = 999 leaves out had no mass anyway
    tokens = logits.float().argmax(-1)
    raw, same = (
        score(kernels, logits, tokens, d) for d in (Distribution(), Distribution(top_k=999))
    )
    for name in vars(raw):
        assert torch.equal(getattr(raw, name), getattr(same, name)), name


def test_joined_keeps_the_order(device):
    logits = make_logits(300).to(device)
    tokens = logits.argmax(-1)
    parts = [score(REFERENCE, logits[i : i + 1], tokens[i : i + 1], Distribution()) for i in (2, 0)]
    assert torch.equal(stats.joined(parts).logsumexp, torch.cat([p.logsumexp for p in parts]))


def make(checkpoint, device, wanted: Distribution, **changes) -> Harness:
    plain = Harness.make(checkpoint(), device, **changes)
    config = engine_config(device=device.type, **changes)
    return Harness.around(plain.loaded, build_engine(plain.loaded, config, scored=wanted))


def test_free_requests_choose_the_same_tokens_whatever_is_scored(checkpoint, device):
    prompts = random_prompts([5, 9, 14])
    for params in ({}, {"temperature": 1.5, "seed": 7}):
        plain = Harness.make(checkpoint(), device).record(prompts, 8, **params)
        other = make(checkpoint, device, Distribution(temperature=0.5, top_k=3)).record(
            prompts, 8, **params
        )
        assert [o.token_ids.tolist() for o in plain] == [o.token_ids.tolist() for o in other]
        assert "logits_hash" not in differing_columns(plain, other)
        assert "logprob" in differing_columns(plain, other)


def test_a_processed_replay_of_a_processed_record_is_the_same_bits(checkpoint, device):
    prompts = random_prompts([3, 8, 9, 31, 70, 17])
    wanted = Distribution(temperature=0.7, top_k=200, top_p=0.99)
    recorded = make(checkpoint, device, wanted).record(prompts, 8)
    replayed = make(checkpoint, device, wanted).replay(prompts, recorded)
    assert differing_columns(recorded, replayed) == set()


def test_a_forced_token_can_be_filtered_out(checkpoint, device):
    harness = make(checkpoint, device, Distribution(top_k=4))
    trace = [300, 2, 7, 2, 511, 0, 2]
    output = harness.run([harness.request(0, [5, 6, 7], trace_decode_token_ids=trace)])[0]
    out = np.isneginf(output.logprob)
    assert out.any()
    assert np.isfinite(output.logsumexp).all()
    assert (output.rank[out] == 5).all()
    assert output.token_ids.tolist() == trace
