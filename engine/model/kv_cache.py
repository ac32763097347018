"""The paged KV cache (PagedAttention, Kwon et al. 2023): fixed blocks, shared out by block id.

A layer's cache is one matrix with a row a block. A row holds `block_size` slots; a slot holds the K and
then the V of one token, all heads. So one `index_copy_` writes a step's tokens and one `index_select`
gathers a request's context, K and V together and in long contiguous runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.config import ModelConfig


class KVCache:
    """Storage only: which block belongs to whom is the block pool's business.

    One block more than `num_blocks` is allocated, `dummy_block`, which no request ever owns: rows
    that only pad a batch to a fixed size write there.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """num_blocks: usable blocks; block_size: tokens a block. Raises ValueError if either is below 1."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.dummy_block = num_blocks
        row = block_size * 2 * config.num_kv_heads * config.head_dim
        # Zeros, not whatever memory held: masked slots are multiplied by 0, and 0 * NaN is NaN.
        self.layers = [
            torch.zeros(num_blocks + 1, row, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.written_sums = torch.zeros(0, device=device)
        self._gathered = self.layers[0].new_empty(0, row)

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, K and V."""
        values = config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim
        return values * dtype.itemsize

    def begin_step(self, num_tokens: int) -> None:
        """Before the first layer writes a step's T tokens: their sums, float32 [T], begin at 0."""
        self.written_sums = torch.zeros(num_tokens, device=self.written_sums.device)

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store keys_values [T, 2, kv_heads, head_dim] at slots, int64 [T]."""
        rows = self.layers[layer].view(-1, 2 * self.num_kv_heads * self.head_dim)
        written = keys_values.reshape(len(slots), -1)
        rows.index_copy_(0, slots, written)
        self.written_sums += written.sum(dim=-1, dtype=torch.float32)

    def is_finite(self) -> Tensor:
        """Whether K and V of the T tokens that the last pass wrote are finite, in every layer: bool [T].

        A sum over them tells: a NaN or an infinity in it never goes away again.
        """
        return self.written_sums.isfinite()

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to)."""
        sources, targets = (list(blocks) for blocks in zip(*copies, strict=True))
        for layer in self.layers:
            layer[targets] = layer[sources]

    def clear(self, blocks: list[int]) -> None:
        """Zero these blocks: for those of a request whose numbers overflowed, before anyone reuses them."""
        for layer in self.layers:
            layer[blocks] = 0

    def gather(self, layer: int, blocks: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """K and V of `requests` requests, each [requests, kv_heads, context, head_dim].

        blocks: int64 [requests * blocks of each], request after request; context is whole blocks. Valid
        until the next call, which reuses the memory: fresh pages for every layer of every step would cost
        more than the copying.
        """
        if self._gathered.is_cpu:
            if len(blocks) > len(self._gathered):
                self._gathered = self._gathered.new_empty(len(blocks), self._gathered.shape[1])
            rows = self._gathered[: len(blocks)]
            torch.index_select(self.layers[layer], 0, blocks, out=rows)
        else:  # PyTorch pools a GPU's memory, and a CUDA graph must keep to what it captured
            rows = self.layers[layer].index_select(0, blocks)
        context = rows.view(requests, -1, 2, self.num_kv_heads, self.head_dim)
        keys, values = context.unbind(2)
        return keys.transpose(1, 2), values.transpose(1, 2)
