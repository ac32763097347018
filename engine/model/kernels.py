"""What a layer computes between its matrix products: two classes with the same methods.

`TorchKernels` is the definition, in PyTorch's operations, on any device. `engine.model.native` does the same
on a CPU in C++, one pass over memory each.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import KernelsName
from engine.model.kv_cache import KVCache
from engine.model.rope import apply_rope, rope_cos_sin


class Kernels(Protocol):
    """The class itself is the backend: it has no state."""

    @staticmethod
    def rope(
        positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What `rotate_and_store` needs to know of the positions, int64 [T]: once a step, for all layers."""

    @staticmethod
    def add_norm(hidden: Tensor, delta: Tensor | None, eps: float) -> Tensor:
        """hidden [T, hidden_size] += delta, in place, if any -> its RMSNorm (Zhang and Sennrich 2019)."""

    @staticmethod
    def rotate_and_store(
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cache: KVCache,
        layer: int,
        slots: Tensor,
    ) -> None:
        """Turn queries and keys by their positions, in place; store keys and values at slots, int64 [T].

        qkv: [T, heads + 2 * kv_heads, head_dim], queries, keys, values. norms: weights [head_dim] of the
        norms before the turn, of queries and of keys, if the model has them.
        """

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * intermediate_size] -> silu(gate) * up (SwiGLU, Shazeer 2020)."""


class TorchKernels:
    """See `Kernels`."""

    @staticmethod
    def rope(
        positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions, frequencies, factor, dtype)

    @staticmethod
    def add_norm(hidden: Tensor, delta: Tensor | None, eps: float) -> Tensor:
        if delta is not None:
            hidden.add_(delta)
        return F.rms_norm(hidden, hidden.shape[-1:], None, eps)

    @staticmethod
    def rotate_and_store(
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cache: KVCache,
        layer: int,
        slots: Tensor,
    ) -> None:
        first_key, first_value = qkv.shape[1] - 2 * cache.num_kv_heads, qkv.shape[1] - cache.num_kv_heads
        if norms is not None:
            for part, weight in zip((qkv[:, :first_key], qkv[:, first_key:first_value]), norms, strict=True):
                part.copy_(F.rms_norm(part, weight.shape, weight, eps))
        apply_rope(qkv[:, :first_value], *rope)
        # K heads and V heads lie side by side in the product, as they do in a cache slot.
        cache.write(layer, slots, qkv[:, first_key:])

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def choose_kernels(name: KernelsName, dtype: torch.dtype, device: torch.device) -> type[Kernels]:
    """The kernels called "torch" or "native", or for "auto" the faster that can be had.

    Raises ValueError with the cause if "native" is asked for and cannot be had.
    """
    if name == "torch":
        return TorchKernels
    from engine.model.native import DTYPES, NativeError, NativeKernels, has_amx

    try:
        if device.type != "cpu" or dtype not in DTYPES:
            raise NativeError(f"they are for float32 and bfloat16 on a CPU, not for {dtype} on {device.type}")
        has_amx()  # compiles and loads them
        return NativeKernels
    except NativeError as error:
        if name == "auto":
            return TorchKernels
        raise ValueError(f'kernels="native": {error}. kernels="torch" works everywhere') from error
