"""attention_backend="triton": decode rows read the paged cache in place, by a kernel of our own.

The default backend first gathers each context from its blocks into one piece, padded to the longest of
the group, and masks the padding. This kernel follows the block table itself and stops at each row's own
length: nothing is copied, nothing padded, and a CUDA graph of it serves contexts of any length. The
online softmax is FlashAttention's (Dao et al. 2022), the split of one context among several programs
FlashDecoding's (Dao et al. 2023), the block table PagedAttention's (Kwon et al. 2023).

With the environment variable TRITON_INTERPRET=1, set before this module is imported, Triton runs the
kernel on the CPU, line by line: slow, and how it is tested on machines without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import Batch
from engine.model.attention import AttentionMetadata
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache

TILE = 32  # context tokens that a program works on at a time
# Programs that keep a GPU busy: a few for each of its 40 (T4) to 132 (H100) multiprocessors.
WANTED_PROGRAMS = 256


@triton.jit
def flash_decode_kernel(
    queries,  # [rows, heads, head_dim]
    cache,  # one layer's blocks, each [block_size, 2, kv_heads, head_dim]: K, then V
    tables,  # int64 [rows, width]
    lengths,  # int64 [rows]
    partial,  # float32 [rows, heads, splits, head_dim]: what each split saw, normalised
    weights,  # float32 [rows, heads, splits]: the logarithm of each split's sum of exponentials
    scale,
    query_stride,  # from one row of `queries` to the next, in elements
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,  # at least 16, which tl.dot asks for
    PADDED_DIM: tl.constexpr,  # a power of two
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,  # what tl.dot multiplies
):
    """One program: one row, one key head with all its query heads, one split of the context."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    start = split * share
    stop = tl.minimum(start + share, length)

    group, dims = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + group
    is_head, is_dim = group < GROUP, dims < HEAD_DIM
    query_places = row * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + query_places, mask=is_head[:, None] & is_dim[None, :], other=0.0).to(DOT_TYPE)

    # Online softmax: the largest score so far, and sums that are rescaled whenever it grows.
    largest = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    seen = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for first in range(start, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        is_token = tokens < stop
        blocks = tl.load(tables + row * table_stride + tokens // BLOCK_SIZE, mask=is_token, other=0)
        slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
        places = slots[:, None] * (2 * KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dims[None, :]
        # Slots beyond the length are not read at all: whatever they hold, even NaN, changes nothing.
        is_read = is_token[:, None] & is_dim[None, :]
        keys = tl.load(cache + places, mask=is_read, other=0.0).to(DOT_TYPE)
        values = tl.load(cache + places + KV_HEADS * HEAD_DIM, mask=is_read, other=0.0).to(DOT_TYPE)
        # "ieee": float32 stays float32, where the default would round it to 10 bits of mantissa.
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        exponentials = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(exponentials, 1)
        update = tl.dot(exponentials.to(DOT_TYPE), values, input_precision="ieee")
        seen = seen * shrink[:, None] + update
        largest = new_largest

    # A split without tokens (and a row of length 0) weighs nothing, but must not divide by 0.
    is_empty = stop <= start
    weight = tl.where(is_empty, -1e30, largest + tl.log(tl.where(is_empty, 1.0, total)))
    seen = seen / tl.where(is_empty, 1.0, total)[:, None]
    outputs = (row * KV_HEADS * GROUP + heads) * SPLITS + split
    tl.store(weights + outputs, weight, mask=is_head)
    partial_places = outputs[:, None] * HEAD_DIM + dims[None, :]
    tl.store(partial + partial_places, seen, mask=is_head[:, None] & is_dim[None, :])


IS_INTERPRETED = not isinstance(flash_decode_kernel, triton.JITFunction)
DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
if IS_INTERPRETED:  # NumPy has no bfloat16, and the interpreter would multiply the bits as integers
    DOT_TYPES[torch.bfloat16] = tl.float32


def flash_decode(
    queries: Tensor,
    layer: Tensor,
    tables: Tensor,
    lengths: Tensor,
    kv_heads: int,
    block_size: int,
    splits: int,
) -> Tensor:
    """Attend from one query a row to the row's first `lengths` tokens; zeros where that is 0.

    queries: [rows, heads, head_dim], heads and dimensions contiguous, rows not necessarily. layer: one
    layer of a `KVCache`. tables: int64 [rows, width], the rows' blocks; lengths: int64 [rows]. splits:
    programs that share a row's context. Returns [rows, heads, head_dim].
    """
    rows, heads, head_dim = queries.shape
    partial = queries.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
    weights = queries.new_empty(rows, heads, splits, dtype=torch.float32)
    group = heads // kv_heads
    flash_decode_kernel[(rows, kv_heads, splits)](
        queries,
        layer,
        tables,
        lengths,
        partial,
        weights,
        head_dim**-0.5,
        queries.stride(0),
        tables.stride(0),
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        PADDED_GROUP=max(16, triton.next_power_of_2(group)),
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE=TILE,
        DOT_TYPE=DOT_TYPES[queries.dtype],
    )
    if splits == 1:
        return partial.squeeze(2).to(queries.dtype)
    shares = weights.softmax(dim=-1).unsqueeze(2)
    return (shares @ partial).squeeze(2).to(queries.dtype)


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """How many programs share a context of at most `longest` tokens: enough in all to keep a GPU busy,

    but none with less than four tiles. A power of two, so that few kernels have to be compiled.
    """
    wanted = min(WANTED_PROGRAMS // (rows * kv_heads), longest // (4 * TILE))
    return 1 << max(0, wanted.bit_length() - 1)


@dataclass(slots=True)
class TritonAttention:
    """A step's plan: the leading rows that decode go to the kernel, prompts to the default backend."""

    slot_mapping: Tensor
    tables: Tensor  # int64 [decode rows, width]
    lengths: Tensor  # int64 [decode rows]; on the device, so that a CUDA graph reads each step's own
    splits: int
    prefill: AttentionMetadata | None

    pads_contexts = False  # every row reads its own length

    @classmethod
    def build(cls, batch: Batch, config: ModelConfig, block_size: int, dtype: torch.dtype) -> TritonAttention:
        """Split the batch where its decode rows end."""
        rows = len(batch.query_lens)
        decode_rows = next((r for r, length in enumerate(batch.query_lens) if length != 1), rows)
        longest = batch.block_tables.shape[1] * block_size
        return cls(
            slot_mapping=batch.slot_mapping,
            tables=batch.block_tables[:decode_rows],
            lengths=batch.positions[:decode_rows] + 1,
            splits=choose_splits(max(1, decode_rows), config.num_kv_heads, longest),
            prefill=None
            if decode_rows == rows
            else AttentionMetadata.build(_without_first(batch, decode_rows), config, block_size, dtype),
        )

    def attend(self, queries: Tensor, cache: KVCache, layer: int) -> Tensor:
        """As `AttentionMetadata.attend`."""
        decode_rows = len(self.lengths)
        parts = []
        if decode_rows:
            parts.append(
                flash_decode(
                    queries[:decode_rows],
                    cache.layers[layer],
                    self.tables,
                    self.lengths,
                    cache.num_kv_heads,
                    cache.block_size,
                    self.splits,
                )
            )
        if self.prefill is not None:
            parts.append(self.prefill.attend(queries[decode_rows:], cache, layer))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _without_first(batch: Batch, rows: int) -> Batch:
    """The batch without its first `rows` requests, of one token each."""
    return Batch(
        token_ids=batch.token_ids[rows:],
        positions=batch.positions[rows:],
        slot_mapping=batch.slot_mapping[rows:],
        block_tables=batch.block_tables[rows:],
        query_lens=batch.query_lens[rows:],
        context_lens=batch.context_lens[rows:],
        lengths=batch.lengths[:, rows:],
        logits_rows=batch.logits_rows,  # of the whole batch: attention does not look at it
    )
