"""Layers that are one rank's share, and what makes their outputs whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trace_audit.parallel.communicator import Communicator
from trace_audit.parallel.plan import TensorPlan
from trace_audit.parallel.world import World


class RowParallelLinear(torch.nn.Module):
    """Columns of a linear layer's weight: every rank's product is a partial sum.

    Args:
        shard: the rank's columns.
        split_input: the input is whole, and this rank takes its columns of it.
        world: the ranks.
    """

    def __init__(self, shard: torch.nn.Linear, *, split_input: bool, world: World) -> None:
        super().__init__()
        self.shard = shard
        # Added once, after the sum.
        self.bias = shard.bias
        shard.register_parameter("bias", None)
        self._first = world.tensor.rank * shard.in_features if split_input else None
        self._width = shard.in_features
        self._group = world.tensor
        self._reduction = world.reduction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], whole on every rank."""
        if self._first is not None:
            x = x[..., self._first : self._first + self._width]
        total = self._group.all_reduce(self.shard(x), self._reduction)
        return total if self.bias is None else total + self.bias


class GatheredLinear(torch.nn.Module):
    """Rows of a linear layer's weight, with the outputs of all ranks side by side.

    Args:
        shard: the rank's rows.
        width: output features of all ranks; the last rank's may be fewer than its neighbours'.
        share: most output features of a rank.
        group: the ranks.
    """

    def __init__(
        self, shard: torch.nn.Module, *, width: int, share: int, group: Communicator
    ) -> None:
        super().__init__()
        self.shard = shard
        self._width = width
        self._share = share
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., width], whole on every rank."""
        part = self.shard(x)
        missing = self._share - part.shape[-1]
        if missing:
            part = torch.nn.functional.pad(part, (0, missing))
        return torch.cat(self._group.all_gather(part), dim=-1)[..., : self._width]


class VocabParallelEmbedding(torch.nn.Module):
    """Rows of an embedding: one rank has a token's row, the others give zeros.

    Args:
        shard: the rank's rows, with whatever the model does to them.
        first: token id of the first row.
        world: the ranks.
    """

    def __init__(self, shard: torch.nn.Embedding, *, first: int, world: World) -> None:
        super().__init__()
        self.shard = shard
        self._first = first
        self._num_rows = shard.weight.shape[0]
        self._group = world.tensor
        # A row and zeros: every order and every dtype of the sum gives the row.
        self._reduction = world.reduction

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., hidden_size], whole on every rank."""
        local = input_ids - self._first
        mine = (local >= 0) & (local < self._num_rows)
        rows = self.shard(torch.where(mine, local, 0))
        return self._group.all_reduce(
            torch.where(mine[..., None], rows, torch.zeros_like(rows)), self._reduction
        )


class ReducedModule(torch.nn.Module):
    """A module whose output is a partial sum, such as experts over split weights."""

    def __init__(self, shard: torch.nn.Module, world: World) -> None:
        super().__init__()
        self.shard = shard
        self._group = world.tensor
        self._reduction = world.reduction

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The shard's output, summed over the ranks."""
        return self._group.all_reduce(self.shard(*args, **kwargs), self._reduction)


def join_shards(model: torch.nn.Module, plan: TensorPlan, world: World) -> None:
    """Put communication around the modules whose shards need it; their parameters are in place."""
    for name, style in plan.styles.items():
        wrap = _WRAPPERS.get(style)
        module = _find(model, name)
        if wrap is not None and module is not None:
            _replace(model, name, wrap(module, world))
    embedding, head = _find(model, plan.embedding), _find(model, plan.head)
    if isinstance(embedding, torch.nn.Embedding):
        first, _ = plan.vocabulary_range(world.tensor.rank)
        wrapped = VocabParallelEmbedding(embedding, first=first, world=world)
        _replace(model, plan.embedding, wrapped)
    if head is not None:
        gathered = GatheredLinear(
            head, width=plan.vocabulary_size, share=plan.vocabulary_share, group=world.tensor
        )
        _replace(model, plan.head, gathered)


def _gathered(module: torch.nn.Module, world: World) -> GatheredLinear:
    share = int(module.out_features)  # type: ignore[arg-type]
    return GatheredLinear(module, width=share * world.tensor.size, share=share, group=world.tensor)


def _row_parallel(split_input: bool) -> Callable[[torch.nn.Module, World], torch.nn.Module]:
    def wrap(module: torch.nn.Module, world: World) -> torch.nn.Module:
        if not isinstance(module, torch.nn.Linear):
            return module  # a parameter's style: its module sums
        return RowParallelLinear(module, split_input=split_input, world=world)

    return wrap


_WRAPPERS: dict[str, Callable[[torch.nn.Module, World], torch.nn.Module]] = {
    "rowwise": _row_parallel(split_input=False),
    "packed_rowwise": _row_parallel(split_input=False),
    "rowwise_split_input": _row_parallel(split_input=True),
    "colwise_gather_output": _gathered,
    "moe_tp_experts": ReducedModule,
}


def _find(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The module of that name; None where there is none, as of a parameter or another stage's."""
    return dict(model.named_modules()).get(name)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
