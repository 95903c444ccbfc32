"""Weights, and for fp8 activations too, rounded to numbers of 8 or 4 bits.

Every linear layer of the decoder but the head is quantized from the numbers that the model has in
its dtype. Weight-only formats are rounded and brought back to that dtype in place, so the products
are those of the unquantized model over other weights, on every device, packed or compiled. fp8
rounds the activations of every token as well and multiplies 8-bit numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trace_audit.errors import ConfigError

INT4_GROUPS = (128, 64, 32)
"""Weights of a row that share a scale: the first of these that divides the row."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What a model's linear layers became, in the words of run.json.

    Attributes:
        name: as in the configuration.
        products: what fp8 products run as, "fp8-scaled_mm" or "fp8-float32"; None where they are
            those of the plain model.
        scales: how many weights share one.
    """

    name: str
    products: str | None
    scales: str


NOT_QUANTIZED = Quantized(name="none", products=None, scales="none")

_LARGEST_FP8 = 448.0
_ALIGNMENT = 16  # of the widths of torch._scaled_mm


def int8_rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] as int8 with a float32 scale a row holds it, in its own dtype.

    The scale is max |w| / 127.5 and integers are -128 to 127, as torchao and compressed-tensors
    have them.
    """
    return _symmetric(weight, num_bits=8).to(weight.dtype)


def int4_rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] as int4 with a float32 scale a group of a row holds it, in its own dtype.

    The scale is max |w| / 7.5 and integers are -8 to 7, as in compressed-tensors' W4A16.
    """
    groups = weight.unflatten(1, (-1, int4_group(weight.shape[1])))
    return _symmetric(groups, num_bits=4).to(weight.dtype).flatten(1)


def int4_group(width: int) -> int:
    """How many weights of a row of this width share a scale.

    Raises:
        ConfigError: no group size divides it.
    """
    for size in INT4_GROUPS:
        if width % size == 0:
            return size
    raise ConfigError(
        f"int4_weight_only needs layers whose input width is a multiple of {INT4_GROUPS[-1]}, and "
        f"this model has one of {width}",
        hint='use quantization = "int8_weight_only" or "fp8"',
    )


def fp8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, K] as float8_e4m3fn [T, K] with a float32 scale [T, 1] each, max |x| / 448."""
    values = rows.float()
    scale = _scale(values, _LARGEST_FP8)
    # Clamped: what a cast makes of numbers beyond the largest depends on torch's version.
    quantized = (values / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return quantized, scale


def _symmetric(values: torch.Tensor, *, num_bits: int) -> torch.Tensor:
    """float32 of the values' shape: integers times a scale of each last dimension."""
    half = 2 ** (num_bits - 1)
    values = values.float()
    scale = _scale(values, half - 0.5)
    return torch.round(values * (1.0 / scale)).clamp(-half, half - 1) * scale


def _scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """max |x| / largest over the last dimension, which is kept; 1 where all are 0."""
    maximum = values.abs().amax(-1, keepdim=True)
    # Not by a number: a GPU multiplies by its reciprocal then, which rounds in another way.
    scale = maximum / torch.full_like(maximum, largest)
    return torch.where(scale == 0, 1.0, scale)


class Fp8Linear(torch.nn.Module):
    """A linear layer over 8-bit floats: [..., in_features] -> [..., out_features].

    Weights have a scale an output channel, activations one a token. The products of 8-bit numbers
    are exact in float32; `scaled_mm` sums them as the GPU's tensor cores do, the other way is a
    float32 product. The sum times both scales and the bias are rounded to the dtype once.
    """

    def __init__(self, linear: torch.nn.Linear, *, scaled_mm: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        quantized, scale = fp8_rows(linear.weight.detach())
        self.quantized: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("quantized", quantized if scaled_mm else quantized.float())
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias
        self._scaled_mm = scaled_mm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Linear`."""
        rows, scale = fp8_rows(x.reshape(-1, self.in_features))
        if self._scaled_mm:
            out = torch._scaled_mm(
                rows,
                self.quantized.t(),
                scale_a=scale,
                scale_b=self.scale,
                bias=self.bias,
                out_dtype=x.dtype,
                use_fast_accum=False,
            )
        else:
            out = rows.float() @ self.quantized.t() * (scale * self.scale)
            if self.bias is not None:
                out = out + self.bias.float()
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


def quantize(model: torch.nn.Module, quantization: str) -> Quantized:
    """Quantize the linear layers of a model on its device; the head and embeddings stay.

    Args:
        model: whole, or a pipeline stage of it, admitted by `check_quantization`.
        quantization: as in the configuration.

    Raises:
        ConfigError: a width cannot be quantized so.
    """
    if quantization == "none":
        return NOT_QUANTIZED
    linears = list(quantized_linears(model))
    products, scales = None, "one a row"
    with torch.no_grad():
        if quantization == "fp8":
            products = _quantize_fp8(linears)
        else:
            rounded = int8_rounded if quantization == "int8_weight_only" else int4_rounded
            for module, name in linears:
                weight = getattr(module, name).weight
                weight.copy_(rounded(weight))
    if quantization == "int4_weight_only":
        widths = {getattr(module, name).in_features for module, name in linears}
        sizes = sorted({int4_group(width) for width in widths})
        scales = f"one for {' or '.join(map(str, sizes))} weights of a row"
    return Quantized(name=quantization, products=products, scales=scales)


def _quantize_fp8(linears: list[tuple[torch.nn.Module, str]]) -> str:
    scaled_mm = False
    for module, name in linears:
        linear = getattr(module, name)
        scaled_mm = has_scaled_mm(linear.weight)
        if scaled_mm:
            _check_fp8_widths(linear)
        setattr(module, name, Fp8Linear(linear, scaled_mm=scaled_mm))
    return "fp8-scaled_mm" if scaled_mm else "fp8-float32"


def has_scaled_mm(weight: torch.Tensor) -> bool:
    """Whether this device multiplies 8-bit floats with a scale a row, into the weight's dtype."""
    on_gpu = weight.device.type == "cuda" and weight.dtype == torch.bfloat16
    return on_gpu and torch.cuda.get_device_capability(weight.device) >= (9, 0)


def _check_fp8_widths(linear: torch.nn.Linear) -> None:
    sizes = (linear.in_features, linear.out_features)
    if any(size % _ALIGNMENT for size in sizes):
        raise ConfigError(
            f"fp8 products on this GPU need widths that are multiples of {_ALIGNMENT}, and this "
            f"model has a layer of {sizes[0]} x {sizes[1]}",
            hint='use quantization = "int8_weight_only", or device = "cpu"',
        )


def quantized_linears(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Every linear layer but the head: the module that holds it, and its name there."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not head:
                yield module, name
