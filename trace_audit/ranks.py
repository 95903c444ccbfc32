"""A run's engine, whatever ranks it has: one, several processes, or several that take turns."""

from __future__ import annotations

import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trace_audit.config import RunConfig, distribution_of
from trace_audit.engine.build import BuiltEngine, MakeRunner, build_engine
from trace_audit.engine.model_runner import ModelRunner
from trace_audit.environment import environment_fingerprint
from trace_audit.jobs import Rendezvous
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.loader import load_model
from trace_audit.models.pretrained import torch_dtype
from trace_audit.models.split import load_split_model
from trace_audit.parallel.lockstep import Lockstep
from trace_audit.parallel.rendezvous import open_store, under
from trace_audit.parallel.world import World, lockstep_world, process_world, single_world
from trace_audit.run_setup import Setup, apply_process_settings, run_environment, use_device

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What every rank computes.

    Attributes:
        config: resolved.
        directory: of the model, on every rank's machine.
        draft_directory: of the draft model, if there is one.
    """

    config: RunConfig
    directory: Path
    draft_directory: Path | None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank took.

    Attributes:
        rank: its number.
        peak_host_bytes: the most memory of its process; emulated ranks share one.
        peak_device_bytes: the most memory of its GPU that it had allocated, 0 on a CPU.
        environment_fingerprint: of its machine and libraries.
    """

    rank: int
    peak_host_bytes: int
    peak_device_bytes: int
    environment_fingerprint: str


@dataclass(frozen=True, kw_only=True)
class OpenEngine:
    """Rank 0's engine, with the others ready to follow it.

    Attributes:
        loaded: the model, or rank 0's share of it.
        built: the engine.
        config: resolved.
        world: rank 0's place.
        load_seconds: time to load and build.
    """

    loaded: LoadedModel
    built: BuiltEngine
    config: RunConfig
    world: World
    load_seconds: float

    def finish(self) -> dict[str, Any]:
        """Let the other ranks end; what run.json says of all of them."""
        self.built.engine.close()
        reports = self.world.all.gather_objects(_report(self.world, self.config))
        return {
            "world_size": self.world.all.size,
            "transport": self.world.transport,
            "reports": [asdict(report) for report in reports],
        }


EngineOpener: TypeAlias = Callable[
    [Setup, Path, Rendezvous | None], AbstractContextManager[OpenEngine]
]
"""`open_engine`, or what opens one in its place."""


@contextmanager
def open_engine(
    setup: Setup,
    directory: Path,
    rendezvous: Rendezvous | None,
    *,
    make_runner: MakeRunner = ModelRunner,
) -> Iterator[OpenEngine]:
    """Load the model and build the engine on every rank; the caller is rank 0.

    Args:
        setup: the run that is ready.
        directory: of the model, on every rank's machine.
        rendezvous: how the ranks met, where they are processes.
        make_runner: what runs rank 0's launches.

    Raises:
        ModelError, ConfigError: the model or a machine cannot honour the configuration.
    """
    config = setup.config
    draft = None if setup.draft is None else setup.draft.directory
    assignment = Assignment(config=config, directory=directory, draft_directory=draft)
    if config.parallel.backend == "process":
        assert rendezvous is not None
        _assignments(rendezvous).set("assignment", pickle.dumps(assignment))
        world = process_world(config.parallel, _device(config))
        yield _open(assignment, world, make_runner)
    elif config.parallel.backend == "emulated":
        with Lockstep(config.parallel.world_size) as lockstep:
            worlds = [
                lockstep_world(config.parallel, lockstep, rank) for rank in range(lockstep.size)
            ]
            lockstep.start(lambda rank: _follow(assignment, worlds[rank]))
            yield _open(assignment, worlds[0], make_runner)
    else:
        yield _open(assignment, single_world(), make_runner)


def serve_rank(rendezvous: Rendezvous) -> dict[str, Any]:
    """Be a rank other than 0: wait to be told the assignment, then follow rank 0's engine."""
    store = _assignments(rendezvous)
    # Rank 0 may hash and render for long; the process that started it knows if it died.
    while not store.check(["assignment"]):
        time.sleep(_POLL_SECONDS)
    assignment: Assignment = pickle.loads(store.get("assignment"))
    config = assignment.config
    use_device(config, rendezvous)
    apply_process_settings(config)
    _follow(assignment, process_world(config.parallel, _device(config)))
    return {}


def _follow(assignment: Assignment, world: World) -> None:
    engine = _open(assignment, world).built.engine
    engine.follow()
    world.all.gather_objects(_report(world, assignment.config))


def _open(
    assignment: Assignment, world: World, make_runner: MakeRunner = ModelRunner
) -> OpenEngine:
    started = time.perf_counter()
    config = assignment.config
    how: dict[str, Any] = {
        "dtype": torch_dtype(config.engine.dtype),
        "device": _device(config),
        "lm_head_dtype": torch_dtype(config.engine.lm_head_dtype),
    }
    load = (
        partial(load_split_model, world=world)
        if world.is_split
        else partial(load_model, compiled=config.engine.compile, fused=config.engine.fused)
    )
    loaded = load(
        assignment.directory,
        **how,
        moe_backend=config.engine.moe_backend,
        quantization=config.engine.quantization,
    )
    draft = None
    # It is not split: the rank that samples has all of it, and tells its drafts.
    if assignment.draft_directory is not None and world.samples:
        draft = load_model(assignment.draft_directory, **how)
    built = build_engine(
        loaded,
        config.engine,
        world,
        scored=distribution_of(config.scoring),
        speculative=config.speculative,
        draft=draft,
        make_runner=make_runner,
    )
    seconds = time.perf_counter() - started
    return OpenEngine(loaded=loaded, built=built, config=config, world=world, load_seconds=seconds)


def _device(config: RunConfig) -> torch.device:
    if config.engine.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _assignments(rendezvous: Rendezvous) -> Any:
    return under(open_store(rendezvous), "assignment")


def _report(world: World, config: RunConfig) -> RankReport:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return RankReport(
        rank=world.all.rank,
        peak_host_bytes=peak if sys.platform == "darwin" else peak * 1024,
        peak_device_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        environment_fingerprint=environment_fingerprint(run_environment(config)),
    )
