"""bfloat16 linear layers on a CPU with weights laid out once for oneDNN.

torch's own linear reorders the weights into oneDNN's blocked layout on every call. Doing that once
changes no bit of the result (a test compares them) and saves a third of a decode step's products.
"""

from __future__ import annotations

import torch


class PackedLinear(torch.nn.Module):
    """A linear layer over packed weights: [..., in_features] -> [..., out_features]."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Linear`."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own linear would use oneDNN for this dtype here."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every bfloat16 linear layer of `model` by a packed one; returns how many.

    Subclasses of `torch.nn.Linear` are left alone: their forward may do more.
    """
    packed = 0
    with torch.inference_mode():
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear and child.weight.dtype == torch.bfloat16:
                    setattr(module, name, PackedLinear(child))
                    packed += 1
    return packed
