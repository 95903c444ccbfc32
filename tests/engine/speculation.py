"""Engines that draft, and proposers that are as good or as bad as a test needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.tiny import VOCABULARY, Harness, engine_config
from trace_audit.config import ParallelConfig, SpeculativeConfig
from trace_audit.engine.build import build_engine
from trace_audit.engine.proposers import Drafting, Proposer
from trace_audit.engine.request import Request
from trace_audit.models.loader import load_model
from trace_audit.models.split import load_split_model
from trace_audit.parallel.lockstep import Lockstep
from trace_audit.parallel.world import World, lockstep_world


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """Proposes a known continuation of each request, wrong in some places.

    Attributes:
        continuations: request id -> output tokens.
        wrong: of the places of a request's outputs, every one that this divides gets another id.
    """

    continuations: dict[str, list[int]]
    wrong: int = 0

    def propose(self, request: Request, most: int) -> Sequence[int]:
        done = len(request.output_token_ids)
        right = self.continuations[request.request_id][done : done + most]
        if not self.wrong:
            return right
        return [
            (token + 1) % VOCABULARY if (done + i) % self.wrong == 0 else token
            for i, token in enumerate(right)
        ]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Random ids, and a random number of them, that may be none."""

    vocabulary: int = VOCABULARY

    def propose(self, request: Request, most: int) -> Sequence[int]:
        generator = torch.Generator().manual_seed(request.total_len * 1000 + request.index)
        count = int(torch.randint(most + 1, (1,), generator=generator))
        return torch.randint(self.vocabulary, (count,), generator=generator).tolist()


def ngram(**changes: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", **changes)


def speculating(
    directory: Path,
    device: torch.device,
    speculative: SpeculativeConfig | None = None,
    *,
    proposer: Proposer | None = None,
    draft: Path | None = None,
    dtype: torch.dtype = torch.float32,
    world: World | None = None,
    **changes: Any,
) -> Harness:
    """An engine that drafts: by its configuration, a model of its own, or a test's proposer."""
    common: dict[str, Any] = {"dtype": dtype, "device": device, "lm_head_dtype": dtype}
    speculative = speculative or SpeculativeConfig()
    if draft is not None:
        speculative = speculative.model_copy(update={"method": "draft_model"})
    drafting_model = None
    if draft is not None and (world is None or world.samples):
        drafting_model = load_model(draft, **common)
    loaded = (
        load_model(directory, **common)
        if world is None
        else load_split_model(directory, world=world, **common)
    )
    config = engine_config(device=device.type, **changes)
    built = build_engine(loaded, config, world, speculative=speculative, draft=drafting_model)
    if proposer is not None:
        built.engine._scheduler.drafting = Drafting(
            proposer=proposer, num_speculative_tokens=speculative.num_speculative_tokens
        )
    return Harness.around(loaded, built)


@contextmanager
def emulated_speculating(
    directory: Path, device: torch.device, parallel: ParallelConfig, *args: Any, **changes: Any
) -> Iterator[Harness]:
    """Rank 0's engine, with the other ranks following it."""
    with Lockstep(parallel.world_size) as lockstep:
        worlds = [lockstep_world(parallel, lockstep, rank) for rank in range(lockstep.size)]

        def follow(rank: int) -> None:
            other = speculating(directory, device, *args, world=worlds[rank], **changes)
            other.built.engine.follow()

        lockstep.start(follow)
        harness = speculating(directory, device, *args, world=worlds[0], **changes)
        yield harness
        harness.built.engine.close()
