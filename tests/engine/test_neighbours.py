"""Without `fixed_batch` other neighbours give other bits, but never other ones each time."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import Harness, differing_columns, random_prompts


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_give_the_same_bytes_every_time(checkpoint, device, family, dtype):
    """Case 22: an order of sums that is left to chance, such as atomic additions, would show."""
    prompts = random_prompts([9, 17, 5, 30])
    runs = [Harness.make(checkpoint(family), device, dtype).record(prompts, 6) for _ in range(3)]
    assert differing_columns(runs[0], runs[1]) == set()
    assert differing_columns(runs[0], runs[2]) == set()


def test_other_neighbours_give_other_bits_and_the_same_ones_each_time(checkpoint, device):
    """Case 24: deterministic but different."""
    first, *others = random_prompts([9] + [3 + i % 29 for i in range(40)])
    sizes = {"max_num_seqs": 41, "max_num_batched_tokens": 1024}

    def beside(mates: list[list[int]]):
        return Harness.make(checkpoint(), device, **sizes).record([first, *mates], 8)[:1]

    # A GPU's library takes another kernel only for many more rows.
    few, many = beside(others[:1]), beside(others)
    assert differing_columns(few, beside(others[:1])) == set()
    assert differing_columns(many, beside(others)) == set()
    assert "logits_hash" in differing_columns(few, many)
