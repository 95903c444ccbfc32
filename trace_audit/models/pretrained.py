"""What transformers reads of a local directory, and what of it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from trace_audit.errors import ConfigError, ModelError
from trace_audit.models.checkpoint_format import checkpoint_format, library_hint

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


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
            hint="shorten the prompts, or lower --max-tokens or max_model_len",
        )


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
