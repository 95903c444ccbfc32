"""The overwrite after verification: exact semantics, and agreement with its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trace_audit.kernels import reference, trace_replay
from trace_audit.kernels.runtime import can_run_triton

SENTINEL = -7
UNTOUCHED = 99  # a count that no row can have


class Launch:
    """Request rows, and one launch of verified rows over them; row b is of slot `mapping[b]`."""

    def __init__(
        self,
        device: torch.device,
        traces: list[list[int]],
        *,
        steps: list[int] | None = None,
        mapping: list[int] | None = None,
        prompt_len: int = 3,
    ) -> None:
        width = prompt_len + max(map(len, traces)) + 3
        ids = torch.full((len(traces), width), -1, dtype=torch.int32)
        for slot, trace in enumerate(traces):
            ids[slot, prompt_len : prompt_len + len(trace)] = torch.tensor(trace)
        self.device = device
        self.ids = ids.to(device)
        self.trace_len = self._ints([len(trace) for trace in traces])
        self.prompt_len = self._ints([prompt_len] * len(traces))
        self.total_len = self.prompt_len + self._ints(steps or [0] * len(traces))
        self.mapping = list(range(len(traces))) if mapping is None else mapping

    def apply(
        self, apply: Callable[..., None], drafts: list[list[int]]
    ) -> tuple[list[list[int]], list[int]]:
        """Each row's written tokens, and its count."""
        sampled = torch.full(
            (len(drafts), 1 + max(map(len, drafts), default=0)), SENTINEL, device=self.device
        )
        counts = self._ints([UNTOUCHED] * len(drafts))
        cu_num_logits = self._ints([0, *(len(row) + 1 for row in drafts)]).cumsum(0).int()
        # The entry before each row's drafts is its last committed token, which nothing compares.
        draft_sampled = self._ints([token for row in drafts for token in (11, *row)])
        apply(
            sampled, counts, draft_sampled, cu_num_logits, self._ints(self.mapping),
            self.ids, self.trace_len, self.total_len, self.prompt_len,
        )  # fmt: skip
        return [[t for t in row if t != SENTINEL] for row in sampled.tolist()], counts.tolist()

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@pytest.fixture(params=["triton", "reference"])
def apply(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    if request.param == "reference":
        return reference.apply_trace_tokens_to_verified
    assert can_run_triton(device)
    return trace_replay.apply_trace_tokens_to_verified


def test_all_drafts_match_and_the_token_after_them_is_written(apply, device):
    launch = Launch(device, [[10, 11, 12, 13, 14]])
    assert launch.apply(apply, [[10, 11, 12]]) == ([[10, 11, 12, 13]], [4])


def test_the_first_draft_differs(apply, device):
    launch = Launch(device, [[10, 11, 12, 13, 14]])
    assert launch.apply(apply, [[50, 11, 12]]) == ([[10]], [1])


def test_a_middle_draft_differs_and_later_matches_do_not_count(apply, device):
    launch = Launch(device, [[10, 11, 12, 13, 14]])
    assert launch.apply(apply, [[10, 50, 12]]) == ([[10, 11]], [2])


def test_the_last_draft_differs(apply, device):
    launch = Launch(device, [[10, 11, 12, 13, 14]])
    assert launch.apply(apply, [[10, 11, 50]]) == ([[10, 11, 12]], [3])


def test_the_trace_ends_inside_the_window(apply, device):
    launch = Launch(device, [[10, 11, 12]], steps=[1])
    assert launch.apply(apply, [[11, 12, 13, 14]]) == ([[11, 12]], [2])


def test_the_trace_ends_with_the_last_draft(apply, device):
    assert Launch(device, [[10, 11]]).apply(apply, [[10, 11]]) == ([[10, 11]], [2])


@pytest.mark.parametrize("step", [2, 3, -1])
def test_a_step_outside_the_trace_leaves_row_and_count_alone(apply, device, step):
    launch = Launch(device, [[10, 11]], steps=[step])
    assert launch.apply(apply, [[10, 11]]) == ([[]], [UNTOUCHED])


def test_no_draft_beside_several(apply, device):
    launch = Launch(device, [[10, 11, 12], [20, 21, 22]])
    assert launch.apply(apply, [[], [20, 21]]) == ([[10], [20, 21, 22]], [1, 3])
    assert launch.apply(apply, [[10, 11], []]) == ([[10, 11, 12], [20]], [3, 1])


def test_only_rows_without_drafts_are_what_the_plain_kernel_writes(apply, device):
    launch = Launch(device, [[10, 11], [20], [30]], steps=[1, 1, 0], mapping=[2, -1, 0, 1])
    assert launch.apply(apply, [[], [], [], []]) == (
        [[30], [], [11], []],
        [1, UNTOUCHED, 1, UNTOUCHED],
    )


def test_a_neighbour_without_a_trace_is_untouched(apply, device):
    launch = Launch(device, [[10, 11, 12], [], [30, 31]])
    assert launch.apply(apply, [[10], [5, 6], [30]]) == (
        [[10, 11], [], [30, 31]],
        [2, UNTOUCHED, 2],
    )


def test_a_placeholder_never_matches(apply, device):
    launch = Launch(device, [[10, 11, 12]])
    assert launch.apply(apply, [[-1, 11]]) == ([[10]], [1])
    assert launch.apply(apply, [[10, -1]]) == ([[10, 11]], [2])


def test_rows_of_different_widths_find_their_own_drafts_by_idx_mapping(apply, device):
    launch = Launch(
        device, [[10, 11, 12, 13], [20, 21, 22], [30, 31]], steps=[1, 0, 0], mapping=[2, 0, -1, 1]
    )
    assert launch.apply(apply, [[30], [11, 12], [20], [20, 50, 22]]) == (
        [[30, 31], [11, 12, 13], [], [20, 21]],
        [2, 3, UNTOUCHED, 2],
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_window_in_parts_commits_what_the_whole_does(apply, device, cut):
    trace = list(range(10, 20))
    whole, _ = Launch(device, [trace]).apply(apply, [trace[:5]])
    first, counts = Launch(device, [trace]).apply(apply, [trace[:cut]])
    rest, _ = Launch(device, [trace], steps=counts).apply(apply, [trace[cut + 1 : 5]])
    assert first[0] + rest[0] == whole[0]


def test_an_empty_batch_launches_nothing(device, monkeypatch):
    def no_launch(*args: object, **kwargs: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(trace_replay, "_apply_trace_tokens_to_verified_kernel", no_launch)
    apply = trace_replay.apply_trace_tokens_to_verified
    assert Launch(device, [[10]], mapping=[]).apply(apply, []) == ([], [])


def test_a_token_id_above_2_to_24_survives(apply, device):
    last = 2**31 - 1
    assert Launch(device, [[last, 5]]).apply(apply, [[last]]) == ([[last, 5]], [2])


@pytest.mark.parametrize("seed", range(6))
def test_kernel_equals_reference_on_random_launches(seed, device):
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    num_slots, num_spec = 300, 5
    prompt_len = ints(1, 15, num_slots)
    ids = ints(0, 3, num_slots, 40)  # few ids, so that drafts of any length match
    state = [ids, ints(0, 12, num_slots), prompt_len + ints(-2, 14, num_slots), prompt_len]
    state = [tensor.to(device) for tensor in state]
    counts = set()
    for num_reqs in (1, 7, 255, 256, 257):
        mapping = torch.randperm(num_slots, generator=generator)[:num_reqs].int()
        mapping[torch.rand(num_reqs, generator=generator) < 0.2] = -1
        num_logits = ints(1, num_spec + 2, num_reqs)
        cu_num_logits = torch.cat([torch.zeros(1), num_logits.cumsum(0)]).int()
        inputs = [ints(-1, 3, int(cu_num_logits[-1])), cu_num_logits, mapping]
        inputs = [tensor.to(device) for tensor in inputs]
        sampled = ints(100, 200, num_reqs, num_spec + 1).long().to(device)
        num_sampled = ints(50, 60, num_reqs).to(device)
        got, want = (sampled.clone(), num_sampled.clone()), (sampled.clone(), num_sampled.clone())
        trace_replay.apply_trace_tokens_to_verified(*got, *inputs, *state)
        reference.apply_trace_tokens_to_verified(*want, *inputs, *state)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        counts |= set(want[1].tolist())
    assert counts >= {1, 2, 3}  # and rows that nothing replays keep a count of 50 or more
    assert max(counts) >= 50


@pytest.mark.gpu
def test_row_offsets_beyond_2_to_31_elements(device):
    width, num_slots = 1 << 20, 2050  # the last slots start past element 2^31
    ids = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
    ids[2049, 5:8] = torch.tensor([123, 124, 125], dtype=torch.int32)
    lens = torch.zeros(num_slots, dtype=torch.int32, device=device)
    lens[2049] = 3
    prompt = torch.full_like(lens, 5)
    sampled = torch.full((1, 3), SENTINEL, device=device)
    counts, drafts, starts, mapping = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([0], [7, 123, 124], [0, 3], [2049])
    )
    trace_replay.apply_trace_tokens_to_verified(
        sampled, counts, drafts, starts, mapping, ids, lens, prompt.clone(), prompt
    )
    assert sampled.tolist() == [[123, 124, 125]]
    assert counts.tolist() == [3]


@pytest.mark.gpu
def test_pinned_host_lengths_are_read_through_unified_addressing(device):
    launch = Launch(device, [[10, 11, 12], [20, 21, 22]], steps=[1, 0])
    launch.trace_len = launch.trace_len.cpu().pin_memory()
    launch.prompt_len = launch.prompt_len.cpu().pin_memory()
    apply = trace_replay.apply_trace_tokens_to_verified
    assert launch.apply(apply, [[11], [20, 5]]) == ([[11, 12], [20, 21]], [2, 2])
