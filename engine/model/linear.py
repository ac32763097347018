"""Linear layers: one small class a backend, all with the same call.

On a CPU the cost of a decode step is mostly reading weights, and the layout in which they lie decides how
fast. oneDNN and MKL lay a matrix out for the processor's tile or vector instructions; `F.linear` does so
again at every call, the packed backends once. Only the packed copy is kept. Eight-bit weights are a quarter
of the reading, and eight-bit products four times the arithmetic of float32, for a loss that is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Quantization


class Linear(nn.Module):
    """x [T, in] -> x @ weight.T + bias, [T, out] in x's dtype; weight is [out, in], bias [out] or None."""

    def in_float32(self, x: Tensor) -> Tensor:
        """The same product in float32, and not rounded before where that can be helped."""
        return self(x).float()


LinearFactory = Callable[[Tensor, Tensor | None], Linear]


class PlainLinear(Linear):
    """x [T, in] -> x @ weight.T + bias, [T, out]; works on every device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in], kept as it is and not copied; bias: [out] or None."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear(Linear):
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


class MklLinear(Linear):
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


class Int8Linear(Linear):
    """The same product in 8-bit integers on a CPU: int8 weights, inputs quantized token by token.

    A weight row and an input row each have one scale, their largest magnitude over 127, so no row's
    outliers cost another row precision, and a result depends on no batch-mate (the vector-wise scales of
    LLM.int8(), Dettmers et al. 2022). Columns whose weights are small tend to have large inputs, which
    would leave the other columns few steps; dividing the former and multiplying the latter by the square
    root of the weights' size balances them (SmoothQuant, Xiao et al. 2023, but without calibration data).
    Sums are int32, exact. Zeros stay zero; a NaN stays in its row.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in], not kept; bias: [out] or None."""
        super().__init__()
        weight = weight.float()
        balance = weight.square().mean(0).sqrt_().clamp_(min=1e-6).sqrt_()
        self.balance = balance / balance.mean()
        weight = weight / self.balance
        self.scale = (weight.abs().amax(1) / 127).clamp_(min=SMALLEST_SCALE)
        rows = (weight / self.scale.unsqueeze(1)).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rows, None)
        self.zero_points = torch.zeros(len(rows), dtype=torch.int32)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, len(self.scale))
        dtype = x.dtype
        x = x.float() * self.balance
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_(min=SMALLEST_SCALE)
        # The operator wants unsigned inputs: 128 stands for 0, and the half makes the cast round.
        rows = (x / scale).add_(128.5).to(torch.uint8)
        product = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, self.packed, self.scale, self.zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        product = product.mul_(scale).to(dtype)
        return product if self.bias is None else product.add_(self.bias)


SMALLEST_SCALE = 1e-30  # of a row of zeros


def works(backend: Callable, dtype: torch.dtype, tolerance: float = 0.0) -> bool:
    """Whether this build of PyTorch, on this CPU, multiplies right by this backend in this dtype.

    tolerance: the error allowed, as a share of the largest result.
    """
    # Small whole numbers, which every dtype computes exactly, and in a row of their own the largest that
    # int8 has: processors without VNNI add such products up in 16 bits, which is too few.
    weight = torch.arange(48 * 16).view(48, 16).remainder(7).to(dtype)
    weight[0] = 127
    bias = torch.arange(48).to(dtype)
    try:
        layer = backend(weight, bias)
        for x in (weight[:1], weight[:5]):
            expected = F.linear(x, weight, bias).float()
            if (layer(x).float() - expected).abs().max() > tolerance * expected.abs().max():
                return False
        return True
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def choose_linear(
    dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None, native: bool = False
) -> LinearFactory:
    """The fastest backend for weights of this dtype on this device, or the one for int8 weights.

    native: our own kernels are among the choice. Raises ValueError if int8 products are not to be had here.
    """
    if quantization == "int8":
        if device.type == "cpu" and works(Int8Linear, dtype, tolerance=0.02):
            return Int8Linear
        raise ValueError(
            f"quantization='int8' needs a CPU with 8-bit products (AVX512-VNNI or AMX) and a PyTorch built "
            f"with oneDNN; {device.type} has none here. Leave it at None"
        )
    if native and dtype == torch.bfloat16 and (linear := _amx_linear()) is not None:
        return linear
    candidates = {torch.float32: (MklLinear, OneDnnLinear), torch.bfloat16: (OneDnnLinear,)}.get(dtype, ())
    if device.type == "cpu":
        for backend in candidates:
            if works(backend, dtype):
                return backend
    return PlainLinear


def _amx_linear() -> LinearFactory | None:
    """AMX products by our kernel, for matrices that fit it, by PyTorch's for others; None without AMX."""
    from engine.model.native import AmxLinear, has_amx

    if not has_amx():
        return None
    others = choose_linear(torch.bfloat16, torch.device("cpu"))

    def build(weight: Tensor, bias: Tensor | None) -> Linear:
        return AmxLinear(weight, bias) if AmxLinear.fits(weight) else others(weight, bias)

    return build
