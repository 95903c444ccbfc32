"""Where drafts come from: tokens that may follow a request's committed ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trace_audit.engine.request import Request

PLACEHOLDER = -1
"""Stands for a draft that the host does not know: the draft model finds it on the device."""

_ID = struct.calcsize("=i")


class Proposer(Protocol):
    """Proposes drafts while the next launch is scheduled, on every rank alike."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most `most` ids that may follow the request's tokens, or placeholders for them."""


@dataclass(frozen=True, kw_only=True)
class NgramProposer:
    """What followed the longest earlier occurrence of the request's last tokens (prompt lookup).

    Of several occurrences of one length the first is taken, as vLLM does; it may overlap the last
    tokens themselves.

    Attributes:
        prompt_lookup_min, prompt_lookup_max: tokens of the shortest and the longest match.
    """

    prompt_lookup_min: int
    prompt_lookup_max: int

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer.propose`; none where nothing matches."""
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        packed = struct.pack(f"={len(tokens)}i", *tokens)
        longest = min(self.prompt_lookup_max, len(tokens) - 1)
        for size in range(longest, self.prompt_lookup_min - 1, -1):
            start = _find(packed, packed[-size * _ID :])
            if start is not None:
                return tokens[start + size : start + size + most]
        return []


@dataclass(frozen=True)
class PlaceholderProposer:
    """As many placeholders as may be: a draft model fills them in once they have KV blocks."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer.propose`."""
        return [PLACEHOLDER] * most


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How many drafts a request gets in a launch.

    Attributes:
        proposer: where they come from.
        num_speculative_tokens: the most a request gets.
    """

    proposer: Proposer
    num_speculative_tokens: int

    def drafts(self, request: Request, room: int) -> tuple[int, ...]:
        """Drafts of a request's next launch; none before its prompt and outputs are computed.

        Never so many that the launch could commit more than `max_tokens`, which with the prompt
        fit into `max_model_len`.

        Args:
            request: running.
            room: tokens that the launch has for them.
        """
        if request.num_uncomputed_tokens != 1 or not request.output_token_ids:
            return ()
        left = request.params.max_tokens - len(request.output_token_ids) - 1
        most = min(self.num_speculative_tokens, left, room)
        return tuple(self.proposer.propose(request, most)[:most]) if most > 0 else ()


def _find(packed: bytes, pattern: bytes) -> int | None:
    """First place of whole ids in whole ids that something follows, as an index of ids."""
    place = packed.find(pattern, 0, len(packed) - _ID)
    while place >= 0 and place % _ID:
        place = packed.find(pattern, place + 1, len(packed) - _ID)
    return place // _ID if place >= 0 else None
