"""Which part of every parameter a tensor-parallel rank holds, by the model's own plan.

The plan is transformers' `base_model_tp_plan`: module or parameter names with a style. Embedding
and head are always split by vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from trace_audit.errors import ConfigError, ModelError

REPLICATED = frozenset({"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"})
"""Styles that mean nothing at inference: every rank computes the same."""

_SPLIT_DIMS = {
    # style -> (dim of a weight, blocks that are split each by itself)
    "colwise": (-2, 1),
    "colwise_gather_output": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "rowwise_split_input": (-1, 1),
    "packed_rowwise": (-1, 2),
}
_OTHER_STYLES = frozenset({"moe_tp_experts", "embedding_rowwise"})
_KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a parameter: ranges along one dimension, put together in order."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the part."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim).clone()


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model is split over `size` ranks.

    Attributes:
        styles: full name of a module or parameter -> style; the replicated ones are left out.
        embedding, head: full names of the modules split by vocabulary.
        vocabulary_size: rows of both.
        num_heads, num_kv_heads: what attention can be cut between.
        size: ranks.
    """

    styles: Mapping[str, str]
    embedding: str
    head: str
    vocabulary_size: int
    num_heads: int
    num_kv_heads: int
    size: int

    def part(self, parameter: str, shape: Sequence[int], rank: int) -> Part | None:
        """What `rank` holds of a parameter; None: all of it.

        Raises:
            ConfigError: it cannot be split over this many ranks.
        """
        module, _, kind = parameter.rpartition(".")
        if module in (self.embedding, self.head):
            return Part(dim=0, ranges=(self.vocabulary_range(rank),))
        style = self.styles.get(parameter) or self.styles.get(module)
        if style not in _SPLIT_DIMS:
            return None
        dim, num_blocks = _SPLIT_DIMS[style]
        if kind == "bias":
            if dim == -1:
                return None  # added once, after the sum
            dim = -1
        dim += len(shape)
        block = shape[dim] // num_blocks
        low, high = self._range(parameter, style, block, rank)
        ranges = tuple((i * block + low, i * block + high) for i in range(num_blocks))
        return Part(dim=dim, ranges=ranges)

    def vocabulary_range(self, rank: int) -> tuple[int, int]:
        """First and last + 1 of the token ids that `rank` holds; the last rank's may be fewer."""
        share = self.vocabulary_share
        return min(rank * share, self.vocabulary_size), min(
            (rank + 1) * share, self.vocabulary_size
        )

    @property
    def vocabulary_share(self) -> int:
        """Most token ids of a rank."""
        return -(-self.vocabulary_size // self.size)

    def _range(self, parameter: str, style: str, width: int, rank: int) -> tuple[int, int]:
        """The rank's range of `width` columns or rows, cut between heads where they are heads."""
        units, what = self._units(parameter, style, width)
        per_unit, rest = divmod(width, units)
        if rest == 0 and units % self.size == 0:
            share = units // self.size * per_unit
            return rank * share, (rank + 1) * share
        if rest == 0 and what == "num_key_value_heads" and self.size % units == 0:
            # More ranks than KV heads: neighbours hold the same one.
            first = rank * units // self.size * per_unit
            return first, first + per_unit
        raise ConfigError(
            f"{what} = {units} cannot be split over tensor_parallel_size = {self.size}"
        )

    def _units(self, parameter: str, style: str, width: int) -> tuple[int, str]:
        *_, parent, module = ["", "", *parameter.split(".")[:-1]]
        is_attention = "attn" in parent or "attention" in parent
        if not is_attention or style in ("colwise_gather_output", "rowwise_split_input"):
            return width, f"the {width} columns of {parameter}"
        if module in _KEYS_AND_VALUES:
            return self.num_kv_heads, "num_key_value_heads"
        return self.num_heads, "num_attention_heads"


def kv_heads_of(config: Any) -> int:
    """Key and value heads in a layer of a text config; as many as query heads where it has none."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def tensor_plan(model: Any, config: PreTrainedConfig, size: int) -> TensorPlan:
    """The plan of a model, checked against every parameter of it.

    Args:
        model: a causal language model of transformers; its parameters may be without data.
        config: its text config.
        size: tensor-parallel size.

    Raises:
        ModelError: it has no plan, or one with a style that is not known here.
        ConfigError: a parameter cannot be split over this many ranks; the hint says which sizes
            work.
    """
    embedding, head = _vocabulary_modules(model)
    plan = TensorPlan(
        styles=_styles(model, config),
        embedding=embedding,
        head=head,
        vocabulary_size=int(model.get_output_embeddings().weight.shape[0]),
        num_heads=int(config.num_attention_heads),
        num_kv_heads=kv_heads_of(config),
        size=size,
    )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    problem = _problem(plan, shapes, size)
    if problem is not None:
        sizes = [n for n in range(1, plan.num_heads + 1) if _problem(plan, shapes, n) is None]
        raise ConfigError(problem, hint=f"sizes that work: {', '.join(map(str, sizes))}")
    return plan


def has_plan(config: PreTrainedConfig) -> bool:
    """Whether the model says how to split it."""
    return bool(getattr(config, "base_model_tp_plan", None))


def _problem(plan: TensorPlan, shapes: Mapping[str, Sequence[int]], size: int) -> str | None:
    sized = TensorPlan(**(vars(plan) | {"size": size}))
    try:
        for name, shape in shapes.items():
            sized.part(name, shape, size - 1)
    except ConfigError as error:
        return error.message
    return None


def _styles(model: Any, config: PreTrainedConfig) -> dict[str, str]:
    given = getattr(config, "base_model_tp_plan", None)
    if not given:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan in transformers, so it cannot be "
            "split over ranks",
            hint="use tensor_parallel_size = 1; pipeline_parallel_size needs no plan",
        )
    unknown = sorted(set(given.values()) - _SPLIT_DIMS.keys() - _OTHER_STYLES - REPLICATED)
    if unknown:
        raise ModelError(
            f"the tensor-parallel plan of {type(model).__name__} asks for {', '.join(unknown)}, "
            "which this engine does not do",
            hint="use tensor_parallel_size = 1; pipeline_parallel_size needs no plan",
        )
    decoder = _name_of(model, model.get_decoder())
    styles = {
        name: style
        for pattern, style in given.items()
        if style not in REPLICATED and style != "embedding_rowwise"
        for name in _matching(model, f"{decoder}.{pattern}")
    }
    if not styles:
        raise ModelError(
            f"the tensor-parallel plan of {type(model).__name__} splits none of its layers",
            hint="use tensor_parallel_size = 1; pipeline_parallel_size needs no plan",
        )
    return styles


def _matching(model: torch.nn.Module, pattern: str) -> Iterator[str]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    for name, _ in [*model.named_modules(), *model.named_parameters()]:
        if regex.fullmatch(name):
            yield name


def _vocabulary_modules(model: Any) -> tuple[str, str]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no plain embedding and head that could be split by "
            "vocabulary",
            hint="use tensor_parallel_size = 1",
        )
    return _name_of(model, embedding), _name_of(model, head)


def _name_of(model: torch.nn.Module, wanted: torch.nn.Module) -> str:
    names: dict[torch.nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[wanted]
