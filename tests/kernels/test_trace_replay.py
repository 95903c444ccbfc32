"""The overwrite kernel: exact semantics, and agreement with its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trace_audit.kernels import reference, trace_replay
from trace_audit.kernels.runtime import can_run_triton

SENTINEL = -7


class Rows:
    """Request rows as the engine lays them out: prompt, then the trace behind it."""

    def __init__(self, device: torch.device, prompts: list[int], traces: list[list[int]]) -> None:
        width = max(p + len(t) for p, t in zip(prompts, traces, strict=True)) + 3
        ids = torch.full((len(prompts), width), -1, dtype=torch.int32)
        for slot, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
            ids[slot, prompt : prompt + len(trace)] = torch.tensor(trace, dtype=torch.int32)
        self.all_token_ids = ids.to(device)
        self.prompt_len = torch.tensor(prompts, dtype=torch.int32, device=device)
        self.trace_len = torch.tensor([len(t) for t in traces], dtype=torch.int32, device=device)
        self.total_len = self.prompt_len.clone()

    def at_step(self, *steps: int) -> Rows:
        step = torch.tensor(steps, dtype=torch.int32, device=self.prompt_len.device)
        self.total_len = self.prompt_len + step
        return self

    def apply(
        self, mapping: list[int], apply: Callable[..., None] = trace_replay.apply_trace_tokens
    ) -> list[int]:
        device = self.prompt_len.device
        sampled = torch.full((len(mapping),), SENTINEL, dtype=torch.int64, device=device)
        apply(
            sampled,
            torch.tensor(mapping, dtype=torch.int32, device=device),
            self.all_token_ids,
            self.trace_len,
            self.total_len,
            self.prompt_len,
        )
        return sampled.tolist()


@pytest.fixture(params=["triton", "reference"])
def apply(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    if request.param == "reference":
        return reference.apply_trace_tokens
    assert can_run_triton(device)
    return trace_replay.apply_trace_tokens


def test_overwrites_the_sampled_token_at_each_step(apply, device):
    rows = Rows(device, [3, 5], [[10, 11, 12], [20, 21, 22]])
    for step in range(3):
        assert rows.at_step(step, step).apply([0, 1], apply) == [10 + step, 20 + step]


def test_past_the_end_of_the_trace_the_samplers_token_stays(apply, device):
    rows = Rows(device, [3, 5], [[10], [20, 21]])
    assert rows.at_step(1, 1).apply([0, 1], apply) == [SENTINEL, 21]
    assert rows.at_step(2, 2).apply([0, 1], apply) == [SENTINEL, SENTINEL]


def test_a_slot_without_a_trace_is_untouched(apply, device):
    rows = Rows(device, [3, 2], [[], [20]])
    assert rows.at_step(0, 0).apply([0, 1], apply) == [SENTINEL, 20]


def test_rows_find_their_slot_by_idx_mapping_and_padding_is_skipped(apply, device):
    rows = Rows(device, [3, 5], [[10], [20]])
    assert rows.at_step(0, 0).apply([1, -1, 0], apply) == [20, SENTINEL, 10]


def test_a_negative_step_leaves_the_row_alone(apply, device):
    rows = Rows(device, [3, 5], [[10], [20]])
    assert rows.at_step(-1, 0).apply([0, 1], apply) == [SENTINEL, 20]


def test_an_empty_batch_launches_nothing(device, monkeypatch):
    def no_launch(*args: object, **kwargs: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(trace_replay, "_apply_trace_tokens_kernel", no_launch)
    assert Rows(device, [3], [[10]]).apply([]) == []


def test_a_token_id_above_2_to_24_survives(apply, device):
    rows = Rows(device, [1], [[2**31 - 1]])
    assert rows.at_step(0).apply([0], apply) == [2**31 - 1]


@pytest.mark.parametrize("seed", range(6))
def test_kernel_equals_reference_on_random_batches(seed, device):
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator, dtype=torch.int32)

    num_slots, width = 300, 40
    prompt_len = ints(1, 15, num_slots)
    state = {
        "all_token_ids": ints(0, 50_000, num_slots * width).view(num_slots, width),
        "trace_len": ints(0, 12, num_slots),
        "total_len": prompt_len + ints(-2, 14, num_slots),
        "prompt_len": prompt_len,
    }
    state = {name: t.to(device) for name, t in state.items()}
    for num_reqs in (1, 7, 255, 256, 257):
        mapping = torch.randperm(num_slots, generator=generator)[:num_reqs].int()
        mapping[torch.rand(num_reqs, generator=generator) < 0.2] = -1
        sampled = ints(0, 50_000, num_reqs).long().to(device)
        mapping = mapping.to(device)
        got, want = sampled.clone(), sampled.clone()
        trace_replay.apply_trace_tokens(got, mapping, **state)
        reference.apply_trace_tokens(want, mapping, **state)
        assert torch.equal(got, want)
        assert num_reqs < 255 or not torch.equal(want, sampled)


@pytest.mark.gpu
def test_row_offsets_beyond_2_to_31_elements(device):
    width = 1 << 20
    num_slots = 2050  # the last slots start past element 2^31
    ids = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
    ids[2049, 5] = 123
    lens = torch.zeros(num_slots, dtype=torch.int32, device=device)
    lens[2049] = 1
    prompt = torch.full_like(lens, 5)
    sampled = torch.tensor([SENTINEL], device=device)
    mapping = torch.tensor([2049], dtype=torch.int32, device=device)
    trace_replay.apply_trace_tokens(sampled, mapping, ids, lens, prompt.clone(), prompt)
    assert sampled.tolist() == [123]


@pytest.mark.gpu
def test_pinned_host_lengths_are_read_through_unified_addressing(device):
    rows = Rows(device, [3, 5], [[10, 11], [20, 21]]).at_step(1, 1)
    rows.trace_len = rows.trace_len.cpu().pin_memory()
    host_prompt = rows.prompt_len.cpu().pin_memory()
    sampled = torch.full((2,), SENTINEL, dtype=torch.int64, device=device)
    mapping = torch.tensor([1, 0], dtype=torch.int32, device=device)
    trace_replay.apply_trace_tokens(
        sampled, mapping, rows.all_token_ids, rows.trace_len, rows.total_len, host_prompt
    )
    assert sampled.tolist() == [21, 11]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_scatter_writes_each_value_at_its_offset(dtype, device):
    out = torch.zeros(5, 7, dtype=dtype, device=device)
    destinations = torch.tensor([0, 8, 34, 3], device=device)
    values = torch.tensor([1, 2, 3, 4], dtype=dtype, device=device)
    trace_replay.scatter_values(out, destinations, values)
    want = torch.zeros(35, dtype=dtype)
    want[[0, 8, 34, 3]] = torch.tensor([1, 2, 3, 4], dtype=dtype)
    assert torch.equal(out.cpu().view(-1), want)
