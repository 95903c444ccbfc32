"""Loading one rank's share of a model: its stage's layers, its shards of them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from trace_audit.attention.paged import PagedAttention
from trace_audit.errors import ModelError
from trace_audit.models.experts import apply_moe_backend, check_expert_widths, experts_backend
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.loader import causal_forward, head_dtype_applied, linears_packed
from trace_audit.models.pretrained import (
    check_weights_present,
    eos_token_ids,
    from_pretrained,
    quiet_transformers,
    read_config,
)
from trace_audit.models.quantization import quantize
from trace_audit.models.routing import capture_choices, routing_of
from trace_audit.models.weights import Weights, WholeWeights, sliced_weights
from trace_audit.parallel.layers import join_shards
from trace_audit.parallel.pipeline import cut_to_stage
from trace_audit.parallel.plan import TensorPlan, has_plan, tensor_plan
from trace_audit.parallel.world import World

Names = dict[int, tuple[str, ...]]
"""id of a parameter -> its names in the whole model; several where it is shared."""


def load_split_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lm_head_dtype: torch.dtype,
    world: World,
    moe_backend: str = "auto",
    quantization: str = "none",
) -> LoadedModel:
    """Load one rank's share; every rank of the world calls this at the same time.

    Args:
        directory: config.json and *.safetensors.
        dtype: of weights, activations and the KV cache.
        device: where this rank's share lives.
        lm_head_dtype: of the logits product.
        world: this rank's place.
        moe_backend: see `apply_moe_backend`.
        quantization: see `quantize`; of layers that are whole on their rank.

    Raises:
        ModelError: see `load_model`; or the model cannot be split.
        ConfigError: it cannot be split over this many ranks.
    """
    config = read_config(directory)
    apply_moe_backend(config, moe_backend)
    check_weights_present(directory)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the checkpoint in {directory} is quantized, and only plain ones can be split",
            hint="use tensor_parallel_size = 1 and pipeline_parallel_size = 1",
        )

    def weights_of(model: Any, names: Names) -> Weights:
        shapes = {names[id(p)]: tuple(p.shape) for p in model.parameters()}
        # Some models keep a few parameters in float32, which is transformers' to decide.
        mixed = getattr(model, "_keep_in_fp32_modules", None)
        sliced = None if mixed else sliced_weights(directory, shapes)
        if sliced is not None:
            return sliced
        whole = from_pretrained(directory, config, dtype, "eager")
        return WholeWeights(dict(whole.named_parameters(remove_duplicate=False)))

    loaded = split_model(
        config,
        weights_of,
        dtype=dtype,
        device=device,
        lm_head_dtype=lm_head_dtype,
        world=world,
        eos=eos_token_ids(directory, config.get_text_config()),
        quantization=quantization,
    )
    gc.collect()  # a whole model that parts were cut from
    return loaded


def split_model(
    config: PreTrainedConfig,
    weights_of: Callable[[Any, Names], Weights],
    *,
    dtype: torch.dtype,
    device: torch.device,
    lm_head_dtype: torch.dtype,
    world: World,
    eos: frozenset[int] = frozenset(),
    quantization: str = "none",
) -> LoadedModel:
    """One rank's share of a model.

    Args:
        config: of the whole model.
        weights_of: given the whole model without data, where its parameters come from.
        dtype, device, lm_head_dtype, world: see `load_split_model`.
        eos: ids that end a sequence.
        quantization: see `load_split_model`.
    """
    attention = PagedAttention()
    try:
        model = empty_model(config, dtype, attention.name)
        names = _names(model)
        vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
        plan = _plan(model, config.get_text_config(), world)
        weights = weights_of(model, names)
        routing = routing_of(model)
        layers = cut_to_stage(model, world)
        _fill(model, names, weights, plan, world, dtype)
        check_expert_widths(model)
        model = model.to(device).eval()
        if world.is_last_stage:
            head_dtype_applied(model, lm_head_dtype)
        if plan is not None:
            join_shards(model, plan, world)
        quantized = quantize(model, quantization)
        linear = linears_packed(model, device, dtype, quantized)
        choices = capture_choices(model, routing)
        forward = causal_forward(model, has_head=world.is_last_stage)
        attention.probe(model, layers, forward)
    except BaseException:
        attention.close()
        raise
    return LoadedModel(
        model=model,
        attention=attention,
        vocabulary_size=vocabulary_size,
        eos_token_ids=eos,
        linear=linear,
        forward=forward,
        weights=weights.kind,
        experts=experts_backend(model),
        quantized=quantized,
        routing=routing,
        choices=choices,
    )


def _plan(model: Any, config: PreTrainedConfig, world: World) -> TensorPlan | None:
    """The tensor-parallel plan; None where nothing is split and the model has none."""
    if world.tensor.size == 1 and not has_plan(config):
        return None
    return tensor_plan(model, config, world.tensor.size)


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """The model with its buffers, its parameters being shapes only."""
    with quiet_transformers(), _parameters_without_data():
        try:
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # where the model keeps its attention's name
                dtype=dtype,
                attn_implementation=attention,
            )
        except (ValueError, ImportError) as error:
            raise ModelError(f"transformers cannot make the model: {error}") from error


@contextmanager
def _parameters_without_data() -> Iterator[None]:
    """Parameters that modules register meanwhile are moved to the meta device at once."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _names(model: torch.nn.Module) -> Names:
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _fill(
    model: torch.nn.Module,
    names: Names,
    weights: Weights,
    plan: TensorPlan | None,
    world: World,
    dtype: torch.dtype,
) -> None:
    """Put this rank's part of every parameter that is left in its place, shared ones once."""
    filled: dict[int, torch.nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        for kind, empty in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(empty) not in filled:
                full_name = f"{name}.{kind}" if name else kind
                part = None
                if plan is not None:
                    part = plan.part(full_name, empty.shape, world.tensor.rank)
                tensor = weights.read(names[id(empty)], part)
                if weights.kind == "sliced":
                    tensor = tensor.to(dtype)
                filled[id(empty)] = torch.nn.Parameter(tensor, requires_grad=False)
            setattr(module, kind, filled[id(empty)])
        _state_sizes(module)


def _state_sizes(module: torch.nn.Module) -> None:
    """What a layer says of its size is that of the shard it holds."""
    if isinstance(module, torch.nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, torch.nn.Embedding):
        module.num_embeddings = module.weight.shape[0]
