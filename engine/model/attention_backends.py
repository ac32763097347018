"""Which attention computes a step: one class a backend, chosen by `EngineConfig.attention_backend`."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.model.attention import AttentionMetadata
from engine.model.config import ModelConfig
from engine.model.kernels import Kernels, TorchKernels
from engine.model.kv_cache import KVCache


class Attention(Protocol):
    """One step's plan, shared by all layers; the class itself is the backend.

    pads_contexts: every row of a decode step costs as much as the widest block table has room for, so
        that CUDA graphs are captured for several widths; else a row costs its own length.
    """

    pads_contexts: bool
    slot_mapping: Tensor

    @classmethod
    def build(cls, batch: Batch, config: ModelConfig, block_size: int, dtype: torch.dtype) -> Attention:
        """Plan a step."""

    def attend(self, queries: Tensor, cache: KVCache, layer: int) -> Tensor:
        """What the queries [T, heads, head_dim] see in their own contexts: the same shape.

        The step's K and V must be in the cache already.
        """


def choose_attention(
    name: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: type[Kernels] = TorchKernels,
) -> type[Attention]:
    """The backend called "sdpa" or "triton", or for "auto" the one that goes with the model's kernels.

    Raises ValueError with the cause if it cannot work here.
    """
    if name == "auto" and kernels is not TorchKernels:
        from engine.model.native import NativeAttention

        return NativeAttention
    if name in ("auto", "sdpa"):
        return AttentionMetadata
    instead = 'attention_backend="sdpa" works everywhere'
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            'attention_backend="triton" needs the triton package, which is not installed '
            f"(on Linux: pip install triton); {instead}"
        )
    from engine.model.triton_attention import IS_INTERPRETED, TritonAttention, flash_decode

    if device.type != "cuda" and not IS_INTERPRETED:
        raise ValueError(
            f'attention_backend="triton" needs a CUDA device, not {device.type} '
            f"(or the environment variable TRITON_INTERPRET=1, for tests); {instead}"
        )
    try:  # compile it now: Triton may not know this GPU, and a first request is no good moment to find out
        queries = torch.zeros(1, config.num_heads, config.head_dim, dtype=dtype, device=device)
        layer = torch.zeros(1, 2 * config.num_kv_heads * config.head_dim, dtype=dtype, device=device)
        block, length = (
            torch.zeros(1, 1, dtype=torch.int64, device=device),
            torch.ones_like(queries[0, 0, :1]),
        )
        flash_decode(queries, layer, block, length.long(), config.num_kv_heads, block_size=1, splits=1)
    except Exception as error:  # the compiler's errors are of many kinds
        raise ValueError(
            f'attention_backend="triton" does not work on this {device.type} device with {dtype}: '
            f"{type(error).__name__}: {error}; {instead}"
        ) from error
    return TritonAttention
