"""Sums in the orders that engines use, by examples where the order is visible."""

from __future__ import annotations

import pytest
import torch

from trace_audit.parallel.reduction import reduce_partials

ORDERS = ["rank_order", "ring", "tree"]
# In bfloat16 256 + 1 rounds back to 256, while 1 + 1 first gives 258.
BIG, ONE = 256.0, 1.0


def summed(order: str, *values: float, float32: bool = False, width: int = 1) -> list[float]:
    partials = [torch.full((width,), v, dtype=torch.bfloat16) for v in values]
    total = reduce_partials(partials, order, float32=float32)  # type: ignore[arg-type]
    assert total.dtype == torch.bfloat16
    return [float(v) for v in total]


def test_rank_order_adds_one_after_the_other():
    assert summed("rank_order", BIG, ONE, ONE) == [256.0]
    assert summed("rank_order", ONE, ONE, BIG) == [258.0]


def test_tree_adds_neighbours_first():
    assert summed("tree", BIG, ONE, ONE, ONE) == [258.0]  # (256 + 1) + (1 + 1)
    assert summed("rank_order", BIG, ONE, ONE, ONE) == [256.0]
    assert summed("tree", ONE, ONE, BIG) == [258.0]  # a rank without a neighbour waits


def test_ring_starts_each_chunk_at_another_rank():
    # Chunk 0 starts at the big one and loses both; chunk 1 is 1 + 1 + 256; chunk 2 is 1 + 256 + 1.
    assert summed("ring", BIG, ONE, ONE, width=3) == [256.0, 258.0, 256.0]


def test_ring_with_fewer_elements_than_ranks_and_an_uneven_last_chunk():
    assert summed("ring", BIG, ONE, ONE, width=1) == [256.0]
    # Chunks of 2, 2 and 1 elements.
    assert summed("ring", BIG, ONE, ONE, width=5) == [256.0, 256.0, 258.0, 258.0, 256.0]


@pytest.mark.parametrize("order", ORDERS)
def test_float32_rounds_once(order):
    assert summed(order, BIG, ONE, ONE, width=3, float32=True) == [258.0] * 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_two_addends_have_one_sum(order, float32, dtype):
    generator = torch.Generator().manual_seed(0)
    pair = [(torch.randn(4, 33, generator=generator) * 300).to(dtype) for _ in range(2)]
    total = reduce_partials(pair, order, float32=float32)
    assert torch.equal(total, pair[0] + pair[1])
    assert total.shape == (4, 33)


@pytest.mark.parametrize("order", ORDERS)
def test_orders_differ_and_the_partial_sums_stay_as_they_are(order):
    generator = torch.Generator().manual_seed(1)
    partials = [torch.randn(1000, generator=generator) for _ in range(8)]
    before = [p.clone() for p in partials]
    total = reduce_partials(partials, order, float32=False)
    assert all(torch.equal(p, b) for p, b in zip(partials, before, strict=True))
    exact = torch.stack(partials).double().sum(0)
    assert (total - exact).abs().max() < 1e-5
    if order != "rank_order":
        assert not torch.equal(total, reduce_partials(partials, "rank_order", float32=False))


def test_one_addend_is_copied():
    only = torch.ones(3)
    total = reduce_partials([only], "ring", float32=False)
    total += 1
    assert only.tolist() == [1, 1, 1]
