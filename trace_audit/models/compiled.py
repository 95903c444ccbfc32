"""torch.compile of a model's decoder layers.

A layer is compiled whole, without a graph break, once for all layers of its kind and for any number
of tokens: attention is an operator of its own in the graph. Embedding, last norm and head are not
compiled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch

from trace_audit.attention.compiled import number_layers
from trace_audit.attention.paged import Forward, PagedAttention
from trace_audit.errors import ConfigError, ModelError

COMPILED = "inductor, decoder layers"
"""What run.json calls it."""

_COMPILERS = ("g++", "clang++", "gcc", "clang", "cc")


def check_compiler(device: str) -> None:
    """Refuse a machine that cannot compile, before the weights are read.

    Args:
        device: "cpu" or "cuda".

    Raises:
        ConfigError: there is no C++ compiler on a CPU, no C compiler or no Triton on a GPU.
    """
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "compile = true needs a C++ compiler on a CPU, and this machine has none that "
                "torch finds",
                hint="install g++, or name a compiler in the variable CXX",
            ) from error
        return
    if not torch.utils._triton.has_triton():
        raise ConfigError(
            "compile = true needs Triton on a GPU, and this process has none that can compile",
            hint="unset TRITON_INTERPRET, or use compile = false",
        )
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        raise ConfigError(
            "compile = true needs a C compiler for Triton's launchers, and this machine has none",
            hint="install gcc, or name a compiler in the variable CC",
        )


def compile_layers(model: torch.nn.Module, attention: PagedAttention, forward: Forward) -> None:
    """Compile every decoder layer, now: no launch of the run waits for it.

    Args:
        model: whole, on its device, in eval mode.
        attention: of the model, probed.
        forward: runs it.

    Raises:
        ModelError: a layer has code that cannot be part of a graph.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    # There are few graphs, and workers would be processes that outlive a failure.
    torch._inductor.config.compile_threads = 1
    number_layers(attention.modules)
    for layer in _layers(model, attention.modules):
        # Timing must not choose kernels, or two runs of one configuration would differ.
        layer.compile(fullgraph=True, dynamic=True, options={"deterministic": True})
    device = next(model.parameters()).device
    try:
        # A size of 1 is always a constant of a graph: one token has a graph of its own.
        for num_tokens in (2, 1):
            with torch.inference_mode():
                forward(
                    torch.zeros(num_tokens, dtype=torch.long, device=device),
                    torch.arange(num_tokens, device=device),
                    torch.zeros(1, dtype=torch.long, device=device),
                )
    except (TorchDynamoException, InductorError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"{type(model).__name__} cannot be compiled layer by layer: {first}",
            hint='use compile = false; experts compile with moe_backend = "batched_mm" or '
            '"grouped_mm"',
        ) from error


def _layers(
    model: torch.nn.Module, attention_modules: Sequence[torch.nn.Module]
) -> list[torch.nn.Module]:
    """The decoder layers: the list of modules that has one attention module in each."""
    wanted = set(attention_modules)
    for candidates in model.modules():
        if isinstance(candidates, torch.nn.ModuleList) and len(candidates) == len(wanted):
            held = [wanted & set(layer.modules()) for layer in candidates]
            if all(len(inside) == 1 for inside in held):
                return list(candidates)
    raise ModelError(
        f"{type(model).__name__} does not keep its layers in one list, so they cannot be compiled",
        hint="use compile = false",
    )
