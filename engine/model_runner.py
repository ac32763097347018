"""From a schedule to logits: packs the granted tokens of all requests into one batch and runs it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig
from engine.cuda_graphs import DecodeBatch, DecodeGraphs, choose_capture
from engine.model import LoadedModel
from engine.model.attention_backends import choose_attention
from engine.model.kv_cache import KVCache
from engine.request import Request
from engine.scheduler import Grant


class ModelRunner:
    """Owns the model and the KV cache tensors. Knows nothing of queues, slots or modes."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, num_blocks: int, context_limit: int):
        """context_limit: most tokens of a request. Raises ValueError if a setting does not work here."""
        device, block_size = loaded.device, config.block_size
        self._model = loaded.model
        self._block_size = block_size
        self._attention = choose_attention(
            config.attention_backend, loaded.config, loaded.dtype, device, self._model.kernels
        )
        self._kv_cache = KVCache(loaded.config, num_blocks, block_size, loaded.dtype, device)
        self._sampled_rows: dict[Request, int] = {}  # whose newest token is on the device, and in which row
        self._graphs: DecodeGraphs | None = None
        if capture := choose_capture(device, config.enforce_eager):
            self._graphs = DecodeGraphs(
                self._model,
                self._kv_cache,
                self._attention,
                config.max_num_seqs,
                max_blocks=-(-context_limit // block_size),
                capture=capture,
            )

    def prepare(self, grants: list[Grant]) -> Batch | DecodeBatch:
        """Pack the grants, in their order, into one batch, on the host.

        A step in which everybody decodes goes to the CUDA graphs, if there is one for it.
        """
        if self._graphs is not None and all(grant.num_tokens == 1 and grant.samples for grant in grants):
            decode_batch = self._graphs.prepare([grant.request for grant in grants], self._sampled_rows)
            if decode_batch is not None:
                return decode_batch
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
        # A request's own first block pads its table: what is masked still meets a weight of 0, and should
        # another request's numbers overflow, 0 * NaN would be NaN here too.
        block_tables = torch.tensor([table + table[:1] * (num_blocks - len(table)) for table in tables])

        lengths = torch.tensor([query_lens, context_lens])
        rows = torch.repeat_interleave(torch.arange(len(requests)), lengths[0])
        first_packed = lengths[0].cumsum(0) - lengths[0]
        positions = torch.arange(len(token_ids)) + (torch.tensor(starts) - first_packed)[rows]
        blocks = block_tables[rows, positions // self._block_size]
        last_packed = first_packed + lengths[0] - 1
        sampled = torch.tensor([grant.samples for grant in grants])
        return Batch(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            block_tables=block_tables,
            query_lens=query_lens,
            context_lens=context_lens,
            lengths=lengths,
            logits_rows=last_packed[sampled],
        )

    def forward(self, batch: Batch | DecodeBatch) -> tuple[Tensor, Tensor]:
        """Compute the batch, writing its K and V. The batch and what comes out are on the device.

        Returns float32 logits [rows to sample, vocabulary], and for each token whether its K and V, just
        written, are finite in every layer, bool [T]. That finds in time what the logits show only when a
        prompt is done, when the blocks of its first chunks would have been offered to others, and what they
        may never show: an infinite key that its own request gives no weight is NaN to the block's next owner.
        """
        if isinstance(batch, DecodeBatch):
            assert self._graphs is not None
            return self._graphs.run(batch)
        logits = self._model(batch, self._kv_cache, self._attention)
        return logits, self._kv_cache.is_finite()

    def keep_sampled(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Leave the tokens just sampled, int64 [S], on the device for a next step that needs them there."""
        if self._graphs is not None:
            self._graphs.keep_sampled(tokens)
            self._sampled_rows = {request: row for row, request in enumerate(requests)}

    @staticmethod
    def find_broken(query_lens: list[int], finite: list[bool]) -> set[int]:
        """Places in the batch of the requests with a token that is not finite, of those [T]."""
        if all(finite):
            return set()
        ends = list(itertools.accumulate(query_lens))
        return {bisect.bisect_right(ends, row) for row, is_finite in enumerate(finite) if not is_finite}

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole KV blocks, each (from, to), in every layer."""
        if copies:
            self._kv_cache.copy(copies)

    def scrub(self, blocks: list[int]) -> None:
        """Zero the blocks of a request that failed: a NaN left there would reach whoever comes next,

        since attention gives places beyond a request's context the weight 0, and 0 * NaN is NaN.
        """
        self._kv_cache.clear(blocks)
