"""The vocabulary passes and everything built on them, against float64 over the whole row."""

from __future__ import annotations

import pytest
import torch

from trace_audit.engine import token_statistics as stats
from trace_audit.engine.draws import draw_ids, uniforms
from trace_audit.kernels.partials import RowStatistics
from trace_audit.kernels.row_sum import row_sum, row_sum_in_tiles
from trace_audit.kernels.statistics import REFERENCE, TRITON

VOCABULARIES = [1, 20, 255, 256, 257, 1000, 4096]
NEG_INF = float("-inf")


@pytest.fixture(params=["triton", "reference"])
def kernels(request: pytest.FixtureRequest):
    return TRITON if request.param == "triton" else REFERENCE


def make_logits(vocabulary: int, device: torch.device, dtype=torch.float32, rows: int = 3):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    return logits.to(dtype).to(device)


def first_pass(kernels, logits):
    multipliers = stats.odd_multipliers(logits.shape[1], logits.device)
    return kernels.vocabulary_partials(logits, multipliers)


def statistics(kernels, logits, *, tokens=None, excluded=None) -> RowStatistics:
    """All steps, for the likeliest token and a support of the 20 best ids and 4 others."""
    partials = first_pass(kernels, logits)
    top = kernels.top_ids(logits, partials.maximum, 20)
    tokens = top[:, 0].long() if tokens is None else tokens
    excluded = top if excluded is None else excluded
    drawn = torch.tensor([[0, -1, logits.shape[1] - 1, 0]], device=logits.device)
    support = torch.cat([top, drawn.expand(len(logits), -1)], dim=1).int()
    tail = kernels.chunk_masses(logits, partials, excluded)
    counts = kernels.token_counts(logits, tokens)
    return kernels.row_statistics(logits, partials, counts, tail, tokens, top[:, :5], support)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normalizer_and_entropy_against_float64(kernels, vocabulary, dtype, device):
    logits = make_logits(vocabulary, device, dtype)
    got = statistics(kernels, logits)
    exact = torch.log_softmax(logits.double(), -1)
    want = logits.double().logsumexp(-1)
    torch_error = (logits.float().logsumexp(-1).double() - want).abs().max()
    error = (got.logsumexp.double() - want).abs().max()
    assert error <= 2 * torch_error + 1e-6
    entropy = -(exact.exp() * exact).sum(-1)
    assert (got.entropy.double() - entropy).abs().max() < 1e-5
    maximum = first_pass(kernels, logits).maximum
    assert torch.equal(maximum.amax(-1), logits.float().amax(-1))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_hash_is_the_sum_of_bits_times_odd_factors(kernels, vocabulary, device):
    logits = make_logits(vocabulary, device)
    factors = stats.odd_multipliers(vocabulary, device).tolist()
    assert all(f % 2 == 1 for f in factors)
    bits = logits.cpu().view(torch.int32).tolist()
    want = [sum(b * f for b, f in zip(row, factors, strict=True)) % 2**64 for row in bits]
    assert [h % 2**64 for h in statistics(kernels, logits).logits_hash.tolist()] == want


def test_one_unit_in_the_last_place_of_one_logit_changes_the_hash(kernels, device):
    logits = make_logits(1000, device)
    before = statistics(kernels, logits).logits_hash
    logits[1, 777] = torch.nextafter(logits[1, 777], torch.tensor(100.0, device=device))
    after = statistics(kernels, logits).logits_hash
    assert (before != after).tolist() == [False, True, False]


def test_odd_multipliers_are_splitmix64_of_the_id():
    factors = stats.odd_multipliers(2, torch.device("cpu")).tolist()
    # The first two outputs of splitmix64 seeded with 0, their lowest bit set.
    assert [f % 2**64 for f in factors] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rank_and_ties_count_the_whole_vocabulary(kernels, vocabulary, device):
    logits = make_logits(vocabulary, device).round()  # many exact ties
    tokens = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    got = statistics(kernels, logits, tokens=tokens)
    chosen = logits.gather(1, tokens[:, None])
    assert torch.equal(got.rank, 1 + (logits > chosen).sum(-1))
    assert torch.equal(got.tie_count, (logits == chosen).sum(-1) - 1)


def test_padding_lanes_never_count_for_an_impossible_token(kernels, device):
    logits = make_logits(257, device)
    logits[:, 3] = NEG_INF
    tokens = torch.full((3,), 3, device=device)
    counts = kernels.token_counts(logits, tokens)
    assert counts.num_greater.sum(-1).tolist() == [256] * 3
    assert counts.num_equal.sum(-1).tolist() == [1] * 3


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("k", [1, 5, 20])
def test_top_ids_are_a_stable_sort_by_value_then_id(kernels, vocabulary, k, device):
    for logits in (make_logits(vocabulary, device), make_logits(vocabulary, device).round()):
        partials = first_pass(kernels, logits)
        got = kernels.top_ids(logits, partials.maximum, k)
        want = logits.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(got.cpu()[:, : want.shape[1]], want)
        assert (got[:, want.shape[1] :] == -1).all()


def test_equal_logits_give_the_lowest_id(kernels, device):
    logits = torch.zeros(2, 700, device=device)
    logits[1, 300:] = 1.0
    partials = first_pass(kernels, logits)
    assert kernels.top_ids(logits, partials.maximum, 3).tolist() == [[0, 1, 2], [300, 301, 302]]


def test_minus_zero_ties_with_zero(kernels, device):
    logits = torch.zeros(1, 600, device=device)
    logits[0, 0] = -0.0
    partials = first_pass(kernels, logits)
    assert kernels.top_ids(logits, partials.maximum, 2).tolist() == [[0, 1]]


def test_nan_and_infinite_logits_make_the_normalizer_non_finite(kernels, device):
    logits = make_logits(600, device, rows=4)
    logits[0, 599] = float("nan")
    logits[1, 0] = float("inf")
    logits[2] = NEG_INF
    got = statistics(kernels, logits)
    assert got.logsumexp.isfinite().tolist() == [False, False, False, True]
    assert got.rank.tolist() == [0, 0, 0, 1]
    assert got.tie_count.tolist() == [0] * 4
    ids = kernels.top_ids(logits, first_pass(kernels, logits).maximum, 5)
    assert ((ids >= 0) & (ids < 600)).all()


@pytest.mark.parametrize("vocabulary", [20, 257, 1000, 4096])
def test_tail_mass_is_exact_where_it_is_tiny(kernels, vocabulary, device):
    logits = make_logits(vocabulary, device)
    logits[:, 7] += 60.0  # leaves a tail of about e^-60, which 1 - p would lose
    excluded = torch.tensor([[7, 8, 19, -1]] * 3, device=device)
    got = statistics(kernels, logits, excluded=excluded).log_tail_mass
    kept = torch.ones(vocabulary, dtype=torch.bool, device=device)
    kept[[7, 8, 19]] = False
    want = logits.double()[:, kept].logsumexp(-1) - logits.double().logsumexp(-1)
    assert (got.double() - want).abs().max() < 1e-5


def test_tail_mass_without_a_tail_is_zero(kernels, device):
    logits = make_logits(20, device)
    partials = first_pass(kernels, logits)
    everything = torch.arange(20, device=device).expand(3, -1)
    assert (kernels.chunk_masses(logits, partials, everything) == 0).all()


def test_uniforms_depend_on_what_they_are_for_alone():
    one = uniforms([5], [17], [3], 4)
    many = uniforms([5] * 4, [2, 17, 17, 9], [3, 4, 3, 3], 4)
    assert (many[2] == one[0]).all()
    assert len({tuple(row) for row in many.tolist()}) == 4
    assert ((many >= 0) & (many < 1)).all()


def test_uniforms_are_uniform():
    values = uniforms([0] * 5000, range(5000), [1] * 5000, 4).ravel()
    # Mean and variance of 20,000 uniforms, at 5 standard errors.
    assert abs(values.mean() - 0.5) < 5 * (1 / 12 / 20000) ** 0.5
    assert abs(values.var() - 1 / 12) < 5 * (1 / 180 / 20000) ** 0.5


def test_draws_follow_the_tail_distribution(kernels, device):
    vocabulary, num_draws = 600, 20000
    logits = make_logits(vocabulary, device, rows=1)
    excluded = kernels.top_ids(logits, first_pass(kernels, logits).maximum, 20)
    partials = first_pass(kernels, logits)
    mass = kernels.chunk_masses(logits, partials, excluded)
    uniform = torch.from_numpy(uniforms([1], [0], [0], num_draws)).to(device)
    drawn = draw_ids(logits, partials.maximum.amax(-1), mass, excluded, uniform)[0].cpu()
    probability = logits[0].double().softmax(-1).cpu()
    probability[excluded[0].cpu()] = 0
    probability /= probability.sum()
    counts = torch.bincount(drawn, minlength=vocabulary).double()
    expected = probability * num_draws
    assert (counts[expected == 0] == 0).all()
    big = expected > 20
    chi2 = ((counts - expected)[big] ** 2 / expected[big]).sum()
    degrees = int(big.sum()) - 1
    assert chi2 < degrees + 6 * (2 * degrees) ** 0.5


def test_draws_take_no_id_from_an_empty_or_broken_row(kernels, device):
    logits = make_logits(20, device, rows=2)
    logits[1, 3] = float("nan")
    partials = first_pass(kernels, logits)
    excluded = torch.arange(20, device=device).expand(2, -1)
    mass = kernels.chunk_masses(logits, partials, excluded)
    uniform = torch.full((2, 4), 0.5, dtype=torch.float64, device=device)
    assert (draw_ids(logits, partials.maximum.amax(-1), mass, excluded, uniform) == -1).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_possible_ids(kernels, uniform, device):
    logits = make_logits(1000, device, rows=1)
    logits[0, :10] = NEG_INF
    logits[0, 990:] = NEG_INF
    partials = first_pass(kernels, logits)
    nothing = torch.full((1, 1), -1, device=device)
    mass = kernels.chunk_masses(logits, partials, nothing)
    u = torch.full((1, 1), uniform, dtype=torch.float64, device=device)
    drawn = int(draw_ids(logits, partials.maximum.amax(-1), mass, nothing, u))
    assert 10 <= drawn < 990


@pytest.mark.parametrize("width", [1, 3, 192, 256, 594, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_sums_against_float64(width, dtype, device):
    x = torch.rand(5, 2, width, generator=torch.Generator().manual_seed(width), dtype=dtype)
    x = x.to(device)
    want = x.double().sum(-1)
    bound = float(want.max()) * torch.finfo(dtype).eps * 12  # a tree of twelve levels at most
    for total in (row_sum(x), row_sum_in_tiles(x), row_sum_in_tiles(x.transpose(0, 1)).T):
        assert total.dtype == dtype
        assert float((total.double() - want).abs().max()) <= bound


def test_no_statistic_of_a_row_depends_on_how_many_stand_beside_it(kernels, device):
    """How torch splits a sum on CUDA depends on the number of rows."""
    interpreted = kernels is TRITON and device.type == "cpu"
    vocabulary, num_rows = (4096, 40) if interpreted else (49152, 130)
    logits = make_logits(vocabulary, device, rows=num_rows)
    together = vars(statistics(kernels, logits))
    for rows in (slice(0, 1), slice(7, 9), slice(num_rows - 33, num_rows)):
        for name, alone in vars(statistics(kernels, logits[rows])).items():
            assert torch.equal(alone.view(torch.uint8), together[name][rows].view(torch.uint8)), (
                name
            )


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_references_agree_on_every_number(vocabulary, dtype, device):
    logits = make_logits(vocabulary, device, dtype)
    logits[2] = logits[2].round()  # ties
    tokens = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    excluded = torch.tensor([[0, vocabulary - 1, -1], [-1, 0, -1], [-1, -1, -1]], device=device)
    excluded[0, 0] = -1 if vocabulary == 1 else 0
    one, other = (
        statistics(kernels, logits, tokens=tokens, excluded=excluded)
        for kernels in (TRITON, REFERENCE)
    )
    for name, got in vars(one).items():
        want = getattr(other, name)
        assert got.dtype == want.dtype
        if got.is_floating_point():
            assert torch.allclose(got, want, rtol=1e-6, atol=2e-6, equal_nan=True), name
        else:
            assert torch.equal(got, want), name


@pytest.mark.parametrize("vocabulary", [512, 1000, 4096, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_logprob_of_a_row_is_its_logit_less_one_normalizer(
    kernels, vocabulary, dtype, device
):
    logits = make_logits(vocabulary, device, dtype, rows=40)
    tokens = torch.arange(40, device=device) * 7 % vocabulary
    got = statistics(kernels, logits, tokens=tokens)
    logprobs = logits.float() - got.logsumexp[:, None]
    top = logits.float().topk(5, dim=-1).values - got.logsumexp[:, None]
    assert torch.equal(got.logprob, logprobs.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(got.top_logprobs, top)
    # The support's ends: id 0, the last one, and 0 again.
    assert torch.equal(got.support_logprobs[:, [20, 22, 23]], logprobs[:, [0, -1, 0]])


def test_ids_that_share_a_chunk_are_all_struck(kernels, device):
    logits = torch.zeros(2, 600, device=device)
    excluded = torch.tensor([[5, 7, 300, 9, -1, 301], [599, -1, -1, 598, 0, 512]], device=device)
    partials = first_pass(kernels, logits)
    masses = kernels.chunk_masses(logits, partials, excluded)
    assert masses.tolist() == [[253.0, 254.0, 88.0], [255.0, 256.0, 85.0]]
