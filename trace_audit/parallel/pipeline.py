"""A pipeline stage: its own layers, and pass-through modules in the place of the others."""

from __future__ import annotations

from typing import Any

import torch

from trace_audit.errors import ConfigError, ModelError
from trace_audit.parallel.world import World


class PassThrough(torch.nn.Module):
    """Stands for another stage's layer; keeps what the model reads of a layer, such as its type."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The states as they came."""
        return hidden_states


class Receive(PassThrough):
    """The last layer before a stage's own: the previous stage's states take over here.

    Not at the embedding: models scale or shift what comes out of it.
    """

    def __init__(self, layer: torch.nn.Module, world: World) -> None:
        super().__init__(layer)
        self._world = world

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The previous stage's states, of the shape and dtype of these."""
        return self._world.all.receive(hidden_states, self._world.previous_rank)


class Send(PassThrough):
    """The first layer after a stage's own: hands its states to the next stage."""

    def __init__(self, layer: torch.nn.Module, world: World) -> None:
        super().__init__(layer)
        self._world = world

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The states as they came."""
        self._world.all.send(hidden_states, self._world.next_rank)
        return hidden_states


class NoEmbedding(torch.nn.Module):
    """The embedding of a later stage: zeros of the right shape, which nothing reads."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., hidden_size]."""
        shape = (*input_ids.shape, self._hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=input_ids.device)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """A stage's layers: contiguous, the first stages taking one more where they do not divide.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size = {num_stages} is more than the model's {num_layers} layers",
            hint=f"use at most {num_layers}",
        )
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def cut_to_stage(model: Any, world: World) -> range:
    """Keep this stage's layers of a model, the embedding on the first and the head on the last.

    Args:
        model: a causal language model of transformers; its parameters may be without data.
        world: this rank's place.

    Returns:
        The layers that stayed.

    Raises:
        ModelError: the model does not keep its layers in one list.
        ConfigError: there are more stages than layers.
    """
    layers = _layers(model)
    own = stage_layers(len(layers), world.stage, world.num_stages)
    for index, layer in enumerate(layers):
        if index in own:
            continue
        if index == own.start - 1:
            layers[index] = Receive(layer, world)
        elif index == own.stop:
            layers[index] = Send(layer, world)
        else:
            layers[index] = PassThrough(layer)
    if not world.is_first_stage:
        weight = model.get_input_embeddings().weight
        model.set_input_embeddings(NoEmbedding(int(weight.shape[1]), weight.dtype))
    if not world.is_last_stage:
        model.set_output_embeddings(None)
    return own


def _layers(model: Any) -> torch.nn.ModuleList:
    decoder = model.get_decoder()
    count = int(model.config.get_text_config().num_hidden_layers)
    for child in decoder.children():
        if isinstance(child, torch.nn.ModuleList) and len(child) == count:
            return child
    raise ModelError(
        f"{type(model).__name__} does not keep its {count} layers in one list, so it cannot be cut "
        "into stages",
        hint="use pipeline_parallel_size = 1",
    )
