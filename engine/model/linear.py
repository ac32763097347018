"""Linear layers: one small class a backend, all with the same call.

On a CPU the cost of a decode step is mostly reading weights, and the layout in which they lie decides how
fast. oneDNN lays a matrix out for the processor's tile or vector instructions; `F.linear` does so again at
every call, `PackedLinear` once. Only the packed copy is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]


class PlainLinear(nn.Module):
    """x [T, in] -> x @ weight.T + bias, [T, out]; works on every device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in], kept as it is and not copied; bias: [out] or None."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """The same product on a CPU, bfloat16 or float32, from a weight laid out once for oneDNN.

    The operators are private to PyTorch (its compiler emits them), so `packing_works` tries them first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in], not kept; bias: [out] or None."""
        super().__init__()
        # An opaque oneDNN tensor is no Parameter: it cannot be moved, cast or saved, only multiplied by.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch, on this CPU, multiplies by a packed weight of this dtype."""
    if dtype not in (torch.bfloat16, torch.float32) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        product = PackedLinear(weight)(weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(product, weight)


def choose_linear(dtype: torch.dtype, device: torch.device) -> LinearFactory:
    """The fastest backend for weights of this dtype on this device."""
    return PackedLinear if device.type == "cpu" and packing_works(dtype) else PlainLinear
