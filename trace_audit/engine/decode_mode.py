"""How decode launches run: laid out by the host, or by the device, eagerly or as CUDA graphs."""

from __future__ import annotations

from typing import Literal, TypeAlias

from trace_audit.attention.base import AttentionBackend, DecodesOnDevice
from trace_audit.config import EngineConfig, SpeculativeConfig
from trace_audit.models.loaded import LoadedModel
from trace_audit.parallel.world import World

DecodeMode: TypeAlias = Literal["eager", "device", "cuda-graph"]
"""eager: the host lays every launch out. device: decode launches go the decode path, padded.
cuda-graph: as device, and replayed from recordings."""

_WAITING_EXPERTS = "eager"  # transformers asks the device which experts have tokens


def decode_mode(
    loaded: LoadedModel,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    world: World,
    backend: AttentionBackend,
) -> DecodeMode:
    """The fastest way that the model, the ranks and the attention allow.

    What a model computes eagerly and as a graph is the same in every bit, since both pad alike.
    """
    on_cuda = next(loaded.model.parameters()).is_cuda
    plain = config.path == "decode" and speculative.method == "none" and not world.is_split
    if not (on_cuda and plain and isinstance(backend, DecodesOnDevice)):
        return "eager"
    waits = loaded.experts == _WAITING_EXPERTS or loaded.checkpoint is not None
    return "device" if config.enforce_eager or waits else "cuda-graph"
