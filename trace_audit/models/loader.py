"""Loading a causal language model from a local directory, and refusing what cannot be trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from trace_audit.attention.base import LayerSpec
from trace_audit.attention.paged import Forward, PagedAttention
from trace_audit.errors import ConfigError, ModelError
from trace_audit.models.checkpoint_format import checkpoint_format, library_hint, running
from trace_audit.models.compiled import compile_layers
from trace_audit.models.experts import apply_moe_backend, check_expert_widths, experts_backend
from trace_audit.models.fused import fuse_layers
from trace_audit.models.packed_linear import can_pack, pack_linears
from trace_audit.models.quantization import NOT_QUANTIZED, Quantized, quantize
from trace_audit.models.routing import ExpertChoices, Routing, capture_choices, routing_of

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_ALIGNMENT = 64  # bytes, of what torch allocates on a CPU
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready for the engine.

    Attributes:
        model: in eval mode, its attention routed to `attention`.
        attention: the paged attention, probed.
        vocabulary_size: width of the logits.
        eos_token_ids: from the generation config, else the config.
        linear: what the linear layers run as: "torch", "onednn-packed", or an fp8 product.
        forward: runs a flat batch through the layers that this rank has.
        weights: how they were read: "whole" or "sliced".
        experts: what a mixture of experts runs as; "none" where there is none.
        quantized: what was done to the linear layers.
        checkpoint: how the checkpoint was quantized before; None for a plain one.
        compiled: whether the decoder layers are compiled.
        fused: whether they are this engine's own.
        routing: the whole model's routers; None where it has none.
        choices: what those of this rank's layers choose; None where that is not recorded.
    """

    model: torch.nn.Module
    attention: PagedAttention
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    linear: str
    forward: Forward
    weights: str
    experts: str
    quantized: Quantized = NOT_QUANTIZED
    checkpoint: str | None = None
    compiled: bool = False
    fused: bool = False
    routing: Routing | None = None
    choices: ExpertChoices | None = None

    @property
    def layers(self) -> list[LayerSpec]:
        """Attention shapes of each layer."""
        return self.attention.layers

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads in a layer of the whole model, however few of them a rank has."""
        config: Any = self.model.config.get_text_config()  # type: ignore[operator,union-attr]
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def read_config(directory: Path) -> PreTrainedConfig:
    """Read and check config.json.

    Raises:
        ModelError: no directory, no or broken config.json, remote code needed, an architecture
            that transformers does not know, or a layer type that is neither full nor sliding
            attention.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        raise ModelError(f"the model directory {directory} does not exist")
    if not path.is_file():
        raise ModelError(
            f"{directory} has no config.json", hint="give a Hugging Face model directory"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    if "auto_map" in raw:
        raise ModelError(
            f"the model in {directory} needs code of its own (auto_map in config.json)",
            hint="only architectures that ship with transformers are run",
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # its validators raise types of their own
        raise ModelError(
            f"transformers does not accept {path}: {_one_line(error)}",
            hint=f"its model_type is {raw.get('model_type')!r}",
        ) from error
    _check_layer_types(config)
    return config


def check_context(config: PreTrainedConfig, longest: int) -> None:
    """Refuse sequences longer than the model was made for, before its weights are read.

    Args:
        config: of the model.
        longest: tokens of the longest sequence, prompt and outputs.

    Raises:
        ConfigError: they exceed the model's context.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ConfigError(
            f"sequences of {longest} tokens exceed the model's context of {context}",
            hint="shorten the prompts or lower --max-tokens",
        )


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lm_head_dtype: torch.dtype,
    moe_backend: str = "auto",
    quantization: str = "none",
    compiled: bool = False,
    fused: bool = False,
) -> LoadedModel:
    """Load weights from safetensors and probe the attention of every layer.

    Args:
        directory: config.json and *.safetensors.
        dtype: of weights, activations and the KV cache.
        device: where the model lives.
        lm_head_dtype: of the logits product; the head's weights are converted if it differs.
        moe_backend: see `apply_moe_backend`.
        quantization: see `quantize`.
        compiled: whether to compile the decoder layers.
        fused: whether to replace them, see `fuse_layers`.

    Raises:
        ModelError: see `read_config`; no safetensors, weights that do not match the config, or a
            model that cannot be compiled.
        ConfigError: the experts cannot be computed so, or the layers not quantized so.
    """
    config = read_config(directory)
    apply_moe_backend(config, moe_backend)
    check_weights_present(directory)
    checkpoint = checkpoint_format(config)
    attention = PagedAttention()
    try:
        return ready_model(
            from_pretrained(directory, config, dtype, attention.name),
            attention,
            dtype=dtype,
            device=device,
            lm_head_dtype=lm_head_dtype,
            quantization=quantization,
            compiled=compiled,
            fused=fused,
            eos_token_ids=eos_token_ids(directory, config.get_text_config()),
            checkpoint=checkpoint,
        )
    except BaseException:
        attention.close()
        raise


def ready_model(
    model: Any,
    attention: PagedAttention,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lm_head_dtype: torch.dtype,
    quantization: str = "none",
    compiled: bool = False,
    fused: bool = False,
    eos_token_ids: frozenset[int] = frozenset(),
    checkpoint: str | None = None,
) -> LoadedModel:
    """Make a whole model in memory ready for the engine.

    Args:
        model: of transformers, in `dtype`; its attention implementation is `attention.name`.
        attention: still without layers.
        dtype, device, lm_head_dtype, quantization, compiled, fused: see `load_model`.
        eos_token_ids: see `LoadedModel`.
        checkpoint: how its checkpoint was quantized, if it was.

    Raises:
        ModelError, ConfigError: see `load_model`.
    """
    check_expert_widths(model)
    model = model.to(device).eval()
    align_parameters(model)
    head_dtype_applied(model, lm_head_dtype)
    vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
    quantized = quantize(model, quantization)
    routing = routing_of(model)
    choices = capture_choices(model, routing)
    forward = causal_forward(model, has_head=True)
    with running(checkpoint, dtype, device):
        attention.probe(model, range(num_layers(model.config)), forward)
    if fused:
        fuse_layers(model, attention)
    linear = linears_packed(model, device, dtype, quantized, merge=not compiled, own_rounding=fused)
    if compiled:
        compile_layers(model, attention, forward)
    return LoadedModel(
        model=model,
        attention=attention,
        vocabulary_size=vocabulary_size,
        eos_token_ids=eos_token_ids,
        linear=linear,
        forward=forward,
        weights="whole",
        experts=experts_backend(model),
        quantized=quantized,
        checkpoint=checkpoint,
        compiled=compiled,
        fused=fused,
        routing=routing,
        choices=choices,
    )


def align_parameters(model: torch.nn.Module) -> None:
    """Move parameters on a CPU to addresses as torch allocates them.

    They may lie in the mapped weights file, at whatever offset its header left them, and MKL sums a
    product of a single row by its operands' addresses.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def causal_forward(model: Any, *, has_head: bool) -> Forward:
    """The forward of a causal language model, or of its decoder where the head is elsewhere."""

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        inputs = {
            "input_ids": input_ids[None],
            "position_ids": positions[None],
            "use_cache": False,
        }
        if not has_head:
            model.get_decoder()(**inputs)
            return None
        # To keep 0 is to keep all.
        logits: torch.Tensor = model(**inputs, logits_to_keep=0 if rows is None else rows).logits[0]
        return logits

    return forward


def linears_packed(
    model: torch.nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    quantized: Quantized,
    *,
    merge: bool = True,
    own_rounding: bool = False,
) -> str:
    """Pack the linear layers that oneDNN would run; returns what all of them run as.

    Args:
        model: on its device.
        device, dtype: its own.
        quantized: what of its layers was quantized.
        merge: see `pack_linears`.
        own_rounding: see `can_pack`.
    """
    packs = can_pack(device, dtype, own_rounding=own_rounding)
    packed = packs and pack_linears(model, dtype, merge=merge) > 0
    if quantized.products is not None:
        return quantized.products + (", head onednn-packed" if packed else "")
    return "onednn-packed" if packed else "torch"


def head_dtype_applied(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make the model compute its logits in `dtype`, with a head of its own if that differs."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head.weight.dtype == dtype:
        return
    cast = _CastingHead(head, dtype)
    model.set_output_embeddings(cast)  # type: ignore[operator]


class _CastingHead(torch.nn.Module):
    """A linear head in another dtype than the activations it is given."""

    def __init__(self, head: torch.nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        # A copy: a tied embedding keeps its own dtype.
        self.weight = torch.nn.Parameter(head.weight.detach().to(dtype), requires_grad=False)
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def from_pretrained(
    directory: Path, config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> Any:
    """The whole model as transformers loads it, on the host.

    Raises:
        ModelError: the weights are damaged, or are not those of the config.
    """
    with quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(
                f"transformers cannot load {directory}: {_first_line(error)}",
                hint=library_hint(checkpoint_format(config)),
            ) from error
        except Exception as error:
            if type(error).__name__ == "SafetensorError":
                raise ModelError(
                    f"a weights file of {directory} is damaged: {_first_line(error)}"
                ) from error
            raise
    _check_loading_info(directory, info)
    return model


def _check_loading_info(directory: Path, info: dict[str, Any]) -> None:
    for key, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has unexpected"),
        ("mismatched_keys", "has other shapes than config.json says for"),
        ("error_msgs", "cannot be loaded:"),
    ):
        names = sorted(str(n[0]) if isinstance(n, tuple) else str(n) for n in info.get(key, ()))
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"the checkpoint in {directory} {what} {', '.join(names[:3])}{more}",
                hint="config.json and the weights must belong together",
            )


def check_weights_present(directory: Path) -> None:
    """Refuse a directory without safetensors.

    Raises:
        ModelError: there are none, or only pickled weights.
    """
    if any(directory.glob("*.safetensors")):
        return
    pickled = [p.name for pattern in _PICKLED for p in directory.glob(pattern)]
    if pickled:
        raise ModelError(
            f"{directory} has pickled weights only ({pickled[0]}), which can run code when loaded",
            hint="convert them to safetensors first",
        )
    raise ModelError(f"{directory} has no *.safetensors weights")


def _check_layer_types(config: PreTrainedConfig) -> None:
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    unknown = sorted(set(layer_types) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise ModelError(
            f"the model has layers of type {', '.join(unknown)}, which this engine does not run",
            hint="full_attention and sliding_attention are supported",
        )


def num_layers(config: PreTrainedConfig) -> int:
    """Decoder layers of the whole model."""
    return int(config.get_text_config().num_hidden_layers)


def eos_token_ids(directory: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Ids that end a sequence: the generation config's, else the config's."""
    eos = getattr(config, "eos_token_id", None)
    if (directory / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list | tuple) else [eos])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading bars and reports go nowhere: what matters in them becomes an error here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a configuration's dtype name."""
    dtypes = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in dtypes:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]
