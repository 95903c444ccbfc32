"""Where the parameters of a split model come from: slices of the files, or a whole model.

Slices are read where the checkpoint's names are the model's own, or those of single experts that
the model keeps as one tensor. Otherwise transformers loads the whole model, which knows every
renaming, and the parts are cut from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from trace_audit.parallel.plan import Part

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
# Single experts' names of each fused parameter, in the order in which they are put together.
_EXPERT_NAMES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")  # old checkpoints hold what the config says


class Weights(Protocol):
    """Parameters by the model's names.

    Attributes:
        kind: "sliced" or "whole", for run.json.
    """

    kind: str

    def read(self, names: Sequence[str], part: Part | None) -> torch.Tensor:
        """A parameter, or a part of it, on the host.

        Args:
            names: the parameter's names, several where it is shared.
            part: None: all of it.
        """


class WholeWeights:
    """Parameters of a model that is in memory, by name."""

    kind = "whole"

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters

    def read(self, names: Sequence[str], part: Part | None) -> torch.Tensor:
        """See `Weights.read`."""
        tensor = next(self._parameters[name] for name in names if name in self._parameters)
        return tensor.detach().clone() if part is None else part.of(tensor.detach())


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The tensors that a parameter is made of.

    Attributes:
        tensors: one, or for every expert those that are put together along dimension 0.
        of_experts: whether these are stacked along a new first dimension.
    """

    tensors: tuple[tuple[str, ...], ...]
    of_experts: bool

    def blocks(self, part: Part | None) -> list[Part | None]:
        """What to read of each tensor of an expert to get `part` of the parameter."""
        count = len(self.tensors[0])
        if part is None or not self.of_experts:
            return [part] * count
        if count == 1:
            return [Part(dim=part.dim - 1, ranges=part.ranges)]
        # One range a block; each is counted from the start of its own tensor.
        width = part.ranges[1][0] - part.ranges[0][0]
        return [
            Part(dim=part.dim - 1, ranges=((start - i * width, stop - i * width),))
            for i, (start, stop) in enumerate(part.ranges)
        ]


class SlicedWeights:
    """Parameters in safetensors files, of which only the asked parts are read.

    Args:
        files: name of a tensor -> its file.
        sources: name of a parameter -> the tensors it is made of.
    """

    kind = "sliced"

    def __init__(self, files: Mapping[str, Path], sources: Mapping[str, _Source]) -> None:
        self._files = files
        self._sources = sources
        self._open: dict[Path, Any] = {}

    def read(self, names: Sequence[str], part: Part | None) -> torch.Tensor:
        """See `Weights.read`."""
        source = next(self._sources[name] for name in names if name in self._sources)
        blocks = source.blocks(part)
        rows = [
            torch.cat([self._read(n, b) for n, b in zip(tensors, blocks, strict=True)])
            for tensors in source.tensors
        ]
        return torch.stack(rows) if source.of_experts else rows[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole parameter in the files."""
        source = self._sources[name]
        shapes = [self._slice(tensor).get_shape() for tensor in source.tensors[0]]
        rows = sum(shape[0] for shape in shapes)
        whole = (rows, *shapes[0][1:])
        return (len(source.tensors), *whole) if source.of_experts else whole

    def _read(self, name: str, part: Part | None) -> torch.Tensor:
        tensor = self._slice(name)
        if part is None:
            return tensor[:]  # type: ignore[no-any-return]
        before = (slice(None),) * part.dim
        parts = [tensor[(*before, slice(start, stop))] for start, stop in part.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, part.dim)

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)


def sliced_weights(
    directory: Path, shapes: Mapping[tuple[str, ...], tuple[int, ...]]
) -> SlicedWeights | None:
    """The files' slices, if they hold exactly the model's parameters under names known here.

    Args:
        directory: of the checkpoint.
        shapes: names of each parameter (several where it is shared) -> its whole shape.

    Returns:
        None where a name or a shape differs or a file is damaged: transformers loads the
        checkpoint then, or says what is wrong with it.
    """
    try:
        files = _files(directory)
        found = [_first_source(names, files) for names in shapes]
        if not files or None in found:
            return None
        sources = dict(pair for pair in found if pair is not None)
        used = {name for s in sources.values() for tensors in s.tensors for name in tensors}
        shared = {name for names in shapes for name in names}
        others = files.keys() - used - shared
        if any(_DERIVED.fullmatch(name) is None for name in others):
            return None
        weights = SlicedWeights(files, sources)
        same = all(
            weights.shape(pair[0]) == shape
            for pair, shape in zip(found, shapes.values(), strict=True)
            if pair is not None
        )
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
    return weights if same else None


def _files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, of the files that transformers would read."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _first_source(names: Sequence[str], files: Mapping[str, Path]) -> tuple[str, _Source] | None:
    """The first of a parameter's names that the files know, and what it is made of there."""
    for name in names:
        # Mixtral's own spelling of what transformers calls the MLP.
        for spelled in (name, name.replace(".mlp.", ".block_sparse_moe.")):
            if spelled in files:
                return name, _Source(tensors=((spelled,),), of_experts=False)
            match = _EXPERTS.fullmatch(spelled)
            experts = match and _single_experts(match[1], match[2], files)
            if experts:
                return name, _Source(tensors=experts, of_experts=True)
    return None


def _single_experts(
    prefix: str, kind: str, files: Mapping[str, Path]
) -> tuple[tuple[str, ...], ...]:
    for parts in _EXPERT_NAMES[kind]:
        experts: list[tuple[str, ...]] = []
        while all(f"{prefix}.{len(experts)}.{part}.weight" in files for part in parts):
            experts.append(tuple(f"{prefix}.{len(experts)}.{part}.weight" for part in parts))
        if experts:
            return tuple(experts)
    return ()
