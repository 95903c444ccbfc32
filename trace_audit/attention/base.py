"""The attention protocol, the paged KV cache, and the object transformers models call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trace_audit.attention.compiled import attention_of_layer, layer_number, nothing_attended
from trace_audit.config.kv_formats import KV_FORMATS
from trace_audit.errors import ModelError
from trace_audit.kernels import reference
from trace_audit.kernels.cached_heads import LARGEST, CachedHeads, CacheTarget

# Forward kwargs that carry no meaning for the attention of a causal decoder at inference.
_IGNORED_KWARGS = frozenset(
    {
        "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_q",
        "cu_seq_lens_k", "max_length_q", "max_length_k", "position_embeddings",
        "num_items_in_batch", "past_key_values",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Shapes and options of one layer's attention, as the model's own call states them.

    Attributes:
        num_heads, num_kv_heads: query heads and key/value heads.
        key_dim, value_dim: widths of a key and a value head.
        scale: factor on the query-key product.
        window: a token sees itself and window - 1 tokens before it; None: all before it.
        softcap: logits become softcap * tanh(logits / softcap); None: unchanged.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None

    def kv_bytes_per_token(self, kv_cache_dtype: str) -> int:
        """Bytes of one token's key and value in this layer, with what stands beside them."""
        stored = KV_FORMATS[kv_cache_dtype]
        return self.num_kv_heads * (stored.bytes_of(self.key_dim) + stored.bytes_of(self.value_dim))


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """What a launch looks like to attention. Rows are requests; decode rows come first.

    Padding rows of a launch are none of these: they write no key and attend to nothing.

    Attributes:
        query_lens: int64 [B] on the host, tokens of each row in this launch.
        context_lens: int64 [B] on the host, tokens each row has once they are written.
        block_table: int32 [B, max_blocks] on the host, rows padded by block 0.
        block_size: tokens a block.
        kv_slots: int64 [T] on the device, where each token's key and value go in the cache; tokens
            of the launch past these are padding.
        device: the device of the launch.
    """

    query_lens: npt.NDArray[np.int64]
    context_lens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    block_size: int
    kv_slots: torch.Tensor
    device: torch.device

    @property
    def num_decode_rows(self) -> int:
        """Leading rows with a single token."""
        return int((self.query_lens == 1).sum())


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """A launch of one token a row, all of it on the device; see `AttentionBatch`.

    Attributes:
        kv_slots: int64 [B].
        context_lens: int32 [B].
        block_table: int32 [B, max_blocks], entries of a row contiguous.
        max_context_len: at least the largest of `context_lens`, known on the host.
    """

    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_context_len: int


class CacheKernels(Protocol):
    """How heads are written, as Triton kernels or as their references; they agree in every bit."""

    @property
    def write_plain(self) -> Callable[..., None]:
        """See `trace_audit.kernels.kv_cache.write_plain`."""

    @property
    def write_quantized(self) -> Callable[..., None]:
        """See `trace_audit.kernels.kv_cache.write_quantized`."""


class KVCache:
    """Keys and values of every layer in blocks of tokens.

    Args:
        layers: shapes of the layers.
        num_blocks, block_size: how many blocks, of how many tokens.
        dtype: what is stored; a float dtype that the model does not compute in is rounded to on
            writing and from on reading.
        scaled: a factor of its own for every token and head; always with int8.
        device: where.
        kernels: how heads are written.

    Attributes:
        keys, values: per layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scaled: bool = False,
        kernels: CacheKernels = reference,
    ) -> None:
        assert scaled or dtype != torch.int8
        self._kernels = kernels
        self.num_blocks = num_blocks

        def cache(layer: LayerSpec, width: int) -> CachedHeads:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            # Zeros, not empty: padded rows of a gathered context are multiplied by probability 0,
            # and 0 * NaN from stale memory would be NaN.
            return CachedHeads(
                data=torch.zeros((*shape, width), dtype=dtype, device=device),
                scales=torch.zeros(shape, device=device) if scaled else None,
            )

        self.keys = [cache(layer, layer.key_dim) for layer in layers]
        self.values = [cache(layer, layer.value_dim) for layer in layers]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at flat token slots int64 [T]."""
        keys, values = self.keys[layer], self.values[layer]
        if keys.data.dtype in LARGEST:
            self._kernels.write_quantized(key, kv_slots, keys)
            self._kernels.write_quantized(value, kv_slots, values)
        else:
            self._kernels.write_plain(key, value, kv_slots, keys, values)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is stored, scales included; the first index is the block."""
        return [tensor for cached in (*self.keys, *self.values) for tensor in cached.tensors]

    def copy_out(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """Contents of the blocks on the host, bit for bit, in the order of `tensors`."""
        tensors = self.tensors
        index = torch.tensor(block_ids, device=tensors[0].device)
        return [cache[index].cpu() for cache in tensors]

    def copy_in(self, block_ids: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Put what `copy_out` returned into other blocks."""
        tensors = self.tensors
        index = torch.tensor(block_ids, device=tensors[0].device)
        for cache, saved in zip(tensors, contents, strict=True):
            cache[index] = saved.to(cache.device)


class AttentionBackend(Protocol):
    """Attention of one launch, layer by layer."""

    name: str

    def check(self, layer: LayerSpec) -> None:
        """Refuse a layer this backend cannot honour (ModelError)."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Build what every layer of the launch shares."""

    def forward(
        self, query: torch.Tensor, keys: CachedHeads, values: CachedHeads, layer: LayerSpec
    ) -> torch.Tensor:
        """Attend from query [T, num_heads, key_dim] to one layer's cache.

        Keys and values are what the cache holds, rounded to the query's dtype.

        Returns:
            [T, num_heads, value_dim] in the query's dtype.
        """


@runtime_checkable
class DecodesOnDevice(Protocol):
    """A backend that can decode without asking the host anything."""

    def prepare_decode(self, batch: DecodeBatch) -> None:
        """`AttentionBackend.prepare` for a launch whose tables are on the device."""


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


def visible(positions: torch.Tensor, context_len: int, window: int | None) -> torch.Tensor:
    """Which keys each query sees: bool [num_queries, context_len].

    Args:
        positions: int64 [num_queries], absolute positions of the queries.
        context_len: keys, at positions 0..context_len - 1.
        window: see `LayerSpec.window`.
    """
    distance = positions[:, None] - torch.arange(context_len, device=positions.device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
