"""A step of the decode path, recorded as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trace_audit.engine.decode_path import DecodeInputs, DecodeOutputs, Step


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A graph, and the tensors that it reads and writes each time."""

    graph: torch.cuda.CUDAGraph
    inputs: DecodeInputs
    outputs: DecodeOutputs


class GraphedStep:
    """Runs a step by replaying a graph of it, one for each shape of its inputs.

    The first launch of a shape runs as it is, which compiles kernels and lets libraries allocate;
    the second is recorded. A replayed graph launches the same kernels on the same shapes, so every
    bit is the same. Outputs are overwritten by the next launch of the same shape.

    Args:
        step: what to record; it must neither wait for the device nor allocate on the host.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._warm: set[tuple[object, ...]] = set()
        self._recordings: dict[tuple[object, ...], _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: DecodeInputs) -> DecodeOutputs:
        """One launch."""
        key = inputs.key
        if key not in self._warm:
            self._warm.add(key)
            return self._step(inputs)
        if key not in self._recordings:
            self._recordings[key] = self._record(inputs)
        recording = self._recordings[key]
        for fixed, new in zip(recording.inputs.tensors, inputs.tensors, strict=True):
            fixed.copy_(new)
        recording.graph.replay()
        # The statistics outlive the next launch, the rest is read before it.
        statistics = recording.outputs.statistics
        return replace(
            recording.outputs, statistics=None if statistics is None else statistics.clone()
        )

    def _record(self, inputs: DecodeInputs) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._step(inputs)
        return _Recording(graph=graph, inputs=inputs, outputs=outputs)
