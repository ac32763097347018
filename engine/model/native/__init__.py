"""kernels="native": what a CPU computes between and in the matrix products, in C++ of our own.

In PyTorch a decode step is a thousand operations on tensors so small that starting one costs as much as
doing it, and attention can read only what was gathered for it. The kernels beside this file do a layer in
nine calls, and read the paged cache where it lies. They are compiled for this very processor when first
needed, in some two seconds, and kept.

Read `layer.cpp`, then `attention.cpp`, then `linear.cpp`; this file says what each is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.batch import Batch
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache
from engine.model.linear import Linear
from engine.model.native.build import NativeError, load_library

DTYPES = (torch.float32, torch.bfloat16)
TILE_ROWS = (
    8  # query tokens that share a walk over their context: more share what is read, fewer waste less of it
)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin, which must lie one after the other."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class NativeKernels:
    """As `engine.model.kernels.TorchKernels`, each method one pass over memory."""

    @staticmethod
    def rope(
        positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine, both float32 [T, head_dim / 2]."""
        angles = positions.float().unsqueeze(-1) * frequencies
        return angles.cos().mul_(factor), angles.sin().mul_(factor)

    @staticmethod
    def add_norm(hidden: Tensor, delta: Tensor | None, eps: float) -> Tensor:
        normed = torch.empty_like(hidden)
        rows, width = hidden.shape
        _library().glass_add_norm(
            hidden.dtype == torch.bfloat16, address(hidden), address(delta), address(normed), rows, width,
            eps, torch.get_num_threads(),
        )  # fmt: skip
        return normed

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
        rows, heads, head_dim = qkv.shape
        q_norm, k_norm = norms or (None, None)
        _library().glass_rotate_store(
            qkv.dtype == torch.bfloat16, address(qkv), address(rope[0]), address(rope[1]), address(slots),
            address(q_norm), address(k_norm), eps, address(cache.layers[layer]), address(cache.written_sums),
            rows, heads - 2 * cache.num_kv_heads, cache.num_kv_heads, head_dim, torch.get_num_threads(),
        )  # fmt: skip

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        _library().glass_silu_mul(
            gate_up.dtype == torch.bfloat16, address(gate_up), address(out), rows, width // 2,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


@dataclass(slots=True)
class NativeAttention:
    """A step's plan: every request's rows in tiles of a few, each of which walks its own block table.

    tiles: int64 [n, 4]: request, first row, rows, tokens that the first row sees.
    """

    slot_mapping: Tensor
    tables: Tensor
    tiles: Tensor

    pads_contexts = False  # every row reads its own length

    @classmethod
    def build(cls, batch: Batch, config: ModelConfig, block_size: int, dtype: torch.dtype) -> NativeAttention:
        """The longest contexts first: what comes last should not keep one thread busy alone."""
        tiles, start = [], 0
        for request, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            for done in range(0, length, TILE_ROWS):
                rows = min(TILE_ROWS, length - done)
                tiles.append((request, start + done, rows, context - length + done + 1))
            start += length
        tiles.sort(key=lambda tile: -tile[2] * tile[3])
        return cls(batch.slot_mapping, batch.block_tables.contiguous(), torch.tensor(tiles))

    def attend(self, queries: Tensor, cache: KVCache, layer: int) -> Tensor:
        """As `AttentionMetadata.attend`; the rows of `queries` may lie apart, as those of Q, K and V do."""
        rows, heads, head_dim = queries.shape
        assert queries.stride()[1:] == (head_dim, 1)
        out = queries.new_empty(rows, heads, head_dim)
        _library().glass_attend(
            queries.dtype == torch.bfloat16, queries.data_ptr(), queries.stride(0), address(out),
            address(cache.layers[layer]), address(self.tables), self.tables.shape[1], address(self.tiles),
            len(self.tiles), TILE_ROWS, heads, cache.num_kv_heads, head_dim, cache.block_size,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


class AmxLinear(Linear):
    """x [T, in] -> x @ weight.T + bias, [T, out] in bfloat16, on a CPU with AMX; in and out in whole 32s."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in] that `fits`, not kept; bias: [out] or None."""
        super().__init__()
        assert self.fits(weight)
        self.outputs, self.inputs = weight.shape
        tiles = weight.view(self.outputs // 16, 16, self.inputs // 32, 16, 2)
        self.packed = tiles.permute(0, 2, 3, 1, 4).contiguous()
        self.bias = bias

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the kernel multiplies by such a matrix."""
        return weight.dtype == torch.bfloat16 and all(size % 32 == 0 for size in weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.bfloat16)

    def in_float32(self, x: Tensor) -> Tensor:
        """The sums as they are."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self.outputs, dtype=dtype)
        _library().glass_linear(
            address(x), address(self.packed), address(self.bias), address(out), dtype == torch.float32, rows,
            self.inputs, self.outputs, torch.get_num_threads(),
        )  # fmt: skip
        return out


@cache
def has_amx() -> bool:
    """Whether products by AMX are to be had here. Raises NativeError if nothing native is."""
    return bool(_library().glass_has_amx())


_library = cache(load_library)

__all__ = ["DTYPES", "AmxLinear", "NativeAttention", "NativeError", "NativeKernels", "has_amx"]
