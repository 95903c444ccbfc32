"""The attention function that transformers models call, and what it learns of their layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trace_audit.attention.base import (
    AttentionBackend,
    AttentionBatch,
    DecodeBatch,
    DecodesOnDevice,
    LayerSpec,
)
from trace_audit.attention.compiled import attention_of_layer, layer_number, nothing_attended
from trace_audit.attention.kv_cache import KVCache
from trace_audit.errors import ModelError
from trace_audit.kernels.cached_heads import LARGEST, CacheTarget

# Forward kwargs that carry no meaning for the attention of a causal decoder at inference.
_IGNORED_KWARGS = frozenset(
    {
        "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_q",
        "cu_seq_lens_k", "max_length_q", "max_length_k", "position_embeddings",
        "num_items_in_batch", "past_key_values",
    }
)  # fmt: skip


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""A flat batch through a model: input ids int64 [T], positions int64 [T], rows int64 [B] whose
logits are wanted, or None for all -> logits [B, V], or None where the model ends before its
head."""


class PagedAttention:
    """The attention function of one engine, registered with transformers under a unique name.

    It holds the launch's metadata, so models need not pass anything through their forward.

    Attributes:
        layers, modules: of the layers that the model has here, once they were probed.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.name = f"trace_audit_{next(self._numbers)}"
        self.layers: list[LayerSpec] = []
        self.modules: list[torch.nn.Module] = []
        self._first_layer = 0
        self._probed: dict[int, tuple[LayerSpec, torch.nn.Module]] | None = None
        self._cache: KVCache | None = None
        self._backend: AttentionBackend | None = None
        self._kv_slots: torch.Tensor | None = None
        # No mask function is registered under this name, so transformers builds no mask.
        AttentionInterface.register(self.name, self._attend)

    def close(self) -> None:
        """Take the name back from transformers."""
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(self.name, None)

    def probe(self, model: torch.nn.Module, own_layers: range, forward: Forward) -> None:
        """Learn the shapes of this model's layers from a dry forward of two tokens.

        Args:
            model: whose attention is this.
            own_layers: the layers it has; a pipeline stage has some of them.
            forward: runs it.

        Raises:
            ModelError: a layer does not route its attention through the interface, or asks for
                what no backend here computes.
        """
        self._probed = {}
        device = next(model.parameters()).device
        with torch.inference_mode():
            forward(
                torch.zeros(2, dtype=torch.long, device=device),
                torch.arange(2, device=device),
                torch.ones(1, dtype=torch.long, device=device),
            )
        probed, self._probed = self._probed, None
        if sorted(probed) != list(own_layers):
            raise ModelError(
                f"{type(model).__name__} sends {len(probed)} of its {len(own_layers)} layers "
                "through the attention interface of transformers",
                hint="only decoders whose every layer does so can be audited",
            )
        self.layers = [probed[i][0] for i in own_layers]
        self.modules = [probed[i][1] for i in own_layers]
        self._first_layer = own_layers.start

    def bind(self, cache: KVCache, backend: AttentionBackend) -> None:
        """Use this cache and backend from now on."""
        for layer in self.layers:
            backend.check(layer)
        self._cache, self._backend = cache, backend

    def prepare(self, batch: AttentionBatch) -> None:
        """Set the launch that the next forward belongs to."""
        assert self._backend is not None
        self._kv_slots = batch.kv_slots
        self._backend.prepare(batch)

    def prepare_decode(self, batch: DecodeBatch) -> None:
        """The same for a launch whose tables are on the device."""
        assert isinstance(self._backend, DecodesOnDevice)
        self._kv_slots = batch.kv_slots
        self._backend.prepare_decode(batch)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if torch.compiler.is_compiling():
            # The kwargs of this call are those that the probe saw and the layer's spec holds.
            return attention_of_layer(query, key, value, layer_number(module), self.name), None
        if self._probed is not None:
            spec = _layer_spec(query, key, value, scaling, sliding_window, softcap)
            _refuse_unknown(module, attention_mask, kwargs)
            _note(self._probed, module, spec)
            return nothing_attended(query, value), None
        return self.attend(int(module.layer_idx), query, key, value), None  # type: ignore[arg-type]

    def target(self, layer_idx: int, num_tokens: int) -> CacheTarget | None:
        """Where a caller may write a layer's keys and values itself, before `attend_written`.

        None where `attend` must do it: the cache has formats of its own, or the launch was not
        prepared, or padding stands behind its tokens.
        """
        if self._kv_slots is None or len(self._kv_slots) != num_tokens:
            return None
        assert self._cache is not None
        index = layer_idx - self._first_layer
        keys, values = self._cache.keys[index], self._cache.values[index]
        if keys.data.dtype in LARGEST:
            return None
        return CacheTarget(keys=keys, values=values, slots=self._kv_slots)

    def attend_written(self, layer_idx: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of query [T, heads, head_dim] whose layer's target has been written.

        Returns:
            [T, num_heads, value_dim].
        """
        assert self._cache is not None
        assert self._backend is not None
        index = layer_idx - self._first_layer
        return self._backend.forward(
            query, self._cache.keys[index], self._cache.values[index], self.layers[index]
        )

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one layer over the launch that was prepared; zeros before there is any.

        Args:
            layer_idx: in the whole model.
            query, key, value: [1, heads, T, head_dim].

        Returns:
            [1, T, num_heads, value_dim].
        """
        if self._kv_slots is None:
            return nothing_attended(query, value)
        assert self._cache is not None
        index = layer_idx - self._first_layer
        kv_slots = self._kv_slots
        num_tokens, num_padding = kv_slots.shape[0], query.shape[2] - kv_slots.shape[0]
        query, key, value = (x[0].transpose(0, 1)[:num_tokens] for x in (query, key, value))
        self._cache.write(index, key, value, kv_slots)
        out = self.attend_written(layer_idx, query)
        if num_padding:
            out = pad(out, (0, 0, 0, 0, 0, num_padding))
        return out[None]


def _layer_spec(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> LayerSpec:
    return LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
    )


def _refuse_unknown(
    module: torch.nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if mask is not None:
        raise ModelError(f"{name} builds an attention mask of its own, which is not supported")
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _IGNORED_KWARGS)
    if unknown:
        raise ModelError(
            f"{name} asks its attention for {', '.join(unknown)}, which no backend here computes"
        )


def _note(
    probed: dict[int, tuple[LayerSpec, torch.nn.Module]], module: torch.nn.Module, spec: LayerSpec
) -> None:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index in probed:
        raise ModelError(f"{type(module).__name__} does not number its layers one by one")
    probed[index] = (spec, module)
