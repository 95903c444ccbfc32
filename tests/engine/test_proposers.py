"""Where drafts come from, and how many a request gets."""

from __future__ import annotations

import pytest
import torch

from trace_audit.engine.proposers import Drafting, NgramProposer
from trace_audit.engine.request import Request
from trace_audit.engine.sampling_params import SamplingParams


def request(prompt: list[int], outputs: list[int] | None = None, max_tokens: int = 50) -> Request:
    made = Request(
        request_id="r",
        index=0,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        output_token_ids=list(outputs or []),
    )
    made.num_computed_tokens = max(0, made.total_len - 1)
    return made


def proposed(tokens: list[int], low: int = 1, high: int = 4, most: int = 4) -> list[int]:
    proposer = NgramProposer(prompt_lookup_min=low, prompt_lookup_max=high)
    return list(proposer.propose(request(tokens), most))


def test_what_followed_the_last_tokens_before_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]


def test_the_longest_match_wins_over_an_earlier_shorter_one():
    assert proposed([3, 9, 2, 3, 8, 7, 1, 2, 3, 4, 5, 1, 2, 3], most=2) == [4, 5]


def test_of_one_length_the_first_match_wins():
    assert proposed([1, 2, 7, 1, 2, 8, 1, 2], most=1) == [7]


def test_no_match_under_the_shortest_length():
    tokens = [1, 2, 3, 9, 2, 3]
    assert proposed(tokens, low=2, most=2) == [9, 2]
    assert proposed(tokens, low=3) == []


def test_no_match_over_the_longest_length_is_looked_for():
    # Two tokens match first before the 7; three would match before the 8.
    assert proposed([2, 3, 7, 1, 2, 3, 8, 1, 2, 3], high=2, most=1) == [7]
    assert proposed([2, 3, 7, 1, 2, 3, 8, 1, 2, 3], high=3, most=1) == [8]


def test_fewer_tokens_follow_the_match_than_are_wanted():
    assert proposed([5, 6, 7, 6], most=4) == [7, 6]


def test_a_match_may_overlap_the_last_tokens():
    assert proposed([4, 4, 4]) == [4]
    assert proposed([1, 2, 1, 2, 1, 2], high=4) == [1, 2]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3]])
def test_nothing_repeats(tokens):
    assert proposed(tokens) == []


def test_bytes_of_two_ids_are_not_an_id():
    # 0x01 00 00 00 01 00 00 00 holds the bytes of 0x01000000 one byte off.
    assert proposed([1, 1 << 8, 5, 1 << 16, 1]) == [1 << 8, 5, 1 << 16, 1]
    assert proposed([0, 1, 0, 7, 1 << 8]) == []


def naive(tokens: list[int], low: int, high: int, most: int) -> list[int]:
    for size in range(high, low - 1, -1):
        for start in range(len(tokens) - size):
            if size < len(tokens) and tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + most]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_search_is_that_of_a_plain_one(seed):
    generator = torch.Generator().manual_seed(seed)
    for length in range(1, 40):
        tokens = torch.randint(0, 4, (length,), generator=generator).tolist()
        for low, high in ((1, 4), (2, 3), (3, 3), (1, 60)):
            assert proposed(tokens, low, high, 3) == naive(tokens, low, high, 3), tokens


class Always:
    def propose(self, request: Request, most: int) -> list[int]:
        return [7] * 100


DRAFTING = Drafting(proposer=Always(), num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("num_outputs", "room", "count"),
    [
        (1, 99, 4),
        (45, 99, 4),
        (46, 99, 3),
        (48, 99, 1),
        (49, 99, 0),
        (1, 2, 2),
        (1, 0, 0),
        (1, -3, 0),
    ],
)
def test_drafts_leave_room_for_the_token_after_them(num_outputs, room, count):
    made = request([1, 2], [5] * num_outputs, max_tokens=50)
    assert len(DRAFTING.drafts(made, room)) == count


def test_no_draft_before_the_prompt_and_outputs_are_computed():
    assert DRAFTING.drafts(request([1]), 9) == ()
    behind = request([1, 2, 3], [4, 5])
    behind.num_computed_tokens = 3
    assert DRAFTING.drafts(behind, 9) == ()
    behind.num_computed_tokens = 4
    assert len(DRAFTING.drafts(behind, 9)) == 4
