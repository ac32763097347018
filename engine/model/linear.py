"""Linear layers: one small class a backend, all with the same call.

On a CPU the cost of a decode step is mostly reading weights, and the layout in which they lie decides how
fast. oneDNN and MKL lay a matrix out for the processor's tile or vector instructions; `F.linear` does so
again at every call, the packed backends once. Only the packed copy is kept.
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


class OneDnnLinear(nn.Module):
    """The same product on a CPU, bfloat16 or float32, from a weight laid out once for oneDNN.

    Like `MklLinear`'s, its operators are private to PyTorch (whose compiler emits them), so `works` tries
    them before they are relied on.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in], not kept; bias: [out] or None."""
        super().__init__()
        # An opaque oneDNN tensor is no Parameter: it cannot be moved, cast or saved, only multiplied by.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class MklLinear(nn.Module):
    """The same product on a CPU in float32, from a weight packed once for MKL.

    Measured against `OneDnnLinear` on AVX-512 without AMX: a fifth to a quarter faster from 1 to 64 rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in], not kept; bias: [out] or None."""
        super().__init__()
        # The number of rows is a hint for the layout; products of any number of rows are right.
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), 512)
        # The operator asks for the plain weight too, but reads only its shape: this one takes no memory.
        self.shape = weight.new_zeros(()).expand(weight.shape)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, len(self.shape))
        return torch.ops.mkl._mkl_linear(x.contiguous(), self.packed, self.shape, self.bias, len(x))


def works(backend: Callable, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch, on this CPU, multiplies right by this backend in this dtype."""
    weight = torch.arange(48 * 16).view(48, 16).remainder(7).to(dtype)
    bias = torch.arange(48).to(dtype)
    try:
        layer = backend(weight, bias)
        # Small whole numbers: every dtype computes them exactly.
        return all(torch.equal(layer(x), F.linear(x, weight, bias)) for x in (weight[:1], weight[:5]))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def choose_linear(dtype: torch.dtype, device: torch.device) -> LinearFactory:
    """The fastest backend for weights of this dtype on this device."""
    candidates = {torch.float32: (MklLinear, OneDnnLinear), torch.bfloat16: (OneDnnLinear,)}.get(dtype, ())
    if device.type == "cpu":
        for backend in candidates:
            if works(backend, dtype):
                return backend
    return PlainLinear
