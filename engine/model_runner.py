"""From a schedule to logits: packs the granted tokens of all requests into one batch and runs it."""

from __future__ import annotations

import bisect
import itertools

import torch
from torch import Tensor

from engine.batch import Batch
from engine.model import LoadedModel
from engine.model.kv_cache import KVCache
from engine.scheduler import Grant


class ModelRunner:
    """Owns the model and the KV cache tensors. Knows nothing of queues, slots or modes."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int):
        self._model = loaded.model
        self._device = loaded.device
        self._block_size = block_size
        self._kv_cache = KVCache(loaded.config, num_blocks, block_size, loaded.dtype, loaded.device)

    def prepare(self, grants: list[Grant]) -> Batch:
        """Pack the grants, in their order, into one `Batch`."""
        requests = [grant.request for grant in grants]
        query_lens = [grant.num_tokens for grant in grants]
        starts = [request.num_computed_tokens for request in requests]
        context_lens = [start + length for start, length in zip(starts, query_lens, strict=True)]
        token_ids = [
            token
            for request, start, end in zip(requests, starts, context_lens, strict=True)
            for token in request.token_ids[start:end]
        ]
        num_blocks = -(-max(context_lens) // self._block_size)
        tables = [request.block_table[:num_blocks] for request in requests]
        # Padding points to a block that nobody owns: what is masked still meets a weight of 0, and should
        # another request's numbers overflow, 0 * NaN would be NaN here too.
        nobodys = [self._kv_cache.dummy_block]
        block_tables = torch.tensor([table + nobodys * (num_blocks - len(table)) for table in tables])

        lengths = torch.tensor(query_lens)
        rows = torch.repeat_interleave(torch.arange(len(requests)), lengths)
        first_packed = lengths.cumsum(0) - lengths
        positions = torch.arange(len(token_ids)) + (torch.tensor(starts) - first_packed)[rows]
        blocks = block_tables[rows, positions // self._block_size]
        last_packed = first_packed + lengths - 1
        sampled = torch.tensor([grant.samples for grant in grants])
        return Batch(
            token_ids=torch.tensor(token_ids).to(self._device),
            positions=positions.to(self._device),
            slot_mapping=(blocks * self._block_size + positions % self._block_size).to(self._device),
            block_tables=block_tables.to(self._device),
            query_lens=query_lens,
            context_lens=context_lens,
            logits_rows=last_packed[sampled].to(self._device),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch, writing its K and V; float32 logits [rows to sample, vocabulary]."""
        return self._model(batch, self._kv_cache)

    def find_broken(self, batch: Batch) -> set[int]:
        """Places in the batch of the requests whose K or V, just written, are not finite.

        Looking at the last layer is enough, since a NaN or infinity in one layer is a NaN in all later
        ones. It finds in time what the logits show only when a prompt is done: by then, the blocks of its
        first chunks would have been offered to others.
        """
        broken_rows = (~self._kv_cache.is_finite(batch.slot_mapping)).nonzero().flatten().tolist()
        ends = list(itertools.accumulate(batch.query_lens))
        return {bisect.bisect_right(ends, row) for row in broken_rows}

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole KV blocks, each (from, to), in every layer."""
        if copies:
            self._kv_cache.copy(copies)

    def scrub(self, blocks: list[int]) -> None:
        """Zero the blocks of a request that failed: a NaN left there would reach whoever comes next,

        since attention gives places beyond a request's context the weight 0, and 0 * NaN is NaN.
        """
        self._kv_cache.clear(blocks)
