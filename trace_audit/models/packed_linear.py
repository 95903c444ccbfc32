"""Linear layers on a CPU with weights laid out once for oneDNN.

torch's own bfloat16 linear reorders the weights into oneDNN's blocked layout on every call. Doing
that once, and computing siblings that read one input as one product, saves 40 % of the time of a
decode step's products. Both round once from float32 sums; oneDNN may order those sums differently
(on a CPU with AVX-512 the bits were equal, on one with AMX some were not), so run.json says which
ran.

In float32 torch asks MKL, whose sums are other ones and twice as near to the exact; oneDNN's take
about half the time. They are for layers whose rounding is their own anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# An operator of our own: Inductor takes oneDNN's for one whose packed weights are constants of its
# graph, and here one graph serves all layers.
_OPERATORS = torch.library.Library("trace_audit", "FRAGMENT")
_OPERATORS.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.impl(_OPERATORS, "packed_linear", "CompositeExplicitAutograd")
def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[..., in] -> [..., out], by weights [out, in] that oneDNN has laid out."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@torch.library.register_fake("trace_audit::packed_linear")  # type: ignore[untyped-decorator]
def _shape(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


class _Product:
    """One packed product behind one or several linear layers of the same input."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.data for linear in linears])
        biases = [linear.bias.data for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The product of `x` with the linear `index`; each output is handed out once."""
        if len(self._sizes) == 1:
            return self._product(x)
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self._product(x).split(self._sizes, -1))
        out = self._outputs[index]
        assert out is not None
        self._outputs[index] = None
        if not any(o is not None for o in self._outputs):
            self._input = None
        return out

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.trace_audit.packed_linear(x, self._packed, self._bias)  # type: ignore[no-any-return]
        return _packed_linear(x, self._packed, self._bias)


class PackedLinear(torch.nn.Module):
    """A linear layer over packed weights: [..., in_features] -> [..., out_features]."""

    def __init__(self, linear: torch.nn.Linear, product: _Product, index: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._product = product
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Linear`."""
        return self._product.output(x, self._index)


def can_pack(device: torch.device, dtype: torch.dtype, *, own_rounding: bool = False) -> bool:
    """Whether linear layers of this dtype can be packed here.

    Args:
        device, dtype: of the layers.
        own_rounding: whether they may sum in another order than torch's own linear here.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return own_rounding and dtype == torch.float32


def pack_linears(model: torch.nn.Module, dtype: torch.dtype, *, merge: bool = True) -> int:
    """Replace every linear layer of `model` that is in `dtype` by a packed one; returns how many.

    Subclasses of `torch.nn.Linear` are left alone: their forward may do more.

    Args:
        model: on a CPU.
        dtype: one that `can_pack`.
        merge: compute siblings as one product; not in a graph, for they remember their input.
    """
    packed = 0
    with torch.inference_mode():
        for module in list(model.modules()):
            for names in _groups(module, dtype, _SIBLINGS if merge else ()):
                linears = [getattr(module, name) for name in names]
                product = _Product(linears)
                for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
                    setattr(module, name, PackedLinear(linear, product, index))
                packed += len(names)
    return packed


def _groups(
    module: torch.nn.Module, dtype: torch.dtype, siblings: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Names of the module's linear children, those that read one input together."""
    linears = {name: child for name, child in module.named_children() if _is_plain(child, dtype)}
    groups: list[tuple[str, ...]] = []
    for names in siblings:
        biases = {linears[name].bias is None for name in names if name in linears}
        if len(biases) == 1 and all(name in linears for name in names):
            groups.append(names)
    grouped = {name for names in groups for name in names}
    return groups + [(name,) for name in linears if name not in grouped]


def _is_plain(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    if type(module) is not torch.nn.Linear or module.weight.dtype != dtype:
        return False
    # A quantized checkpoint's weights are tensors that bring their own product.
    return type(module.weight.data) is torch.Tensor
