"""The one packed batch of a step: what the model sees, with nothing said about phases.

Prefill chunks and decode tokens lie side by side in the same flat tensors. A request's part is its
`query_lens` entry; everything before that part is already in the KV cache (the idea of a batch
without padding is Orca's, the paged addressing PagedAttention's).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """R requests, T tokens, S rows to sample.

    token_ids: int64 [T]; positions: int64 [T], the position of each token in its own request.
    slot_mapping: int64 [T], where each token's K and V go: `block_id * block_size + offset`.
    block_tables: int64 [R, most blocks of any request]; row r lists request r's blocks, padded with
        the first of them.
    query_lens: R ints, tokens of each request in this step (their sum is T), in packed order.
    context_lens: R ints, tokens of each request visible once this step is done (computed + query).
    lengths: int64 [2, R], the same two once more, where the other tensors are.
    logits_rows: int64 [S], the packed rows whose logits are wanted: a request's last one, and only
        if its grant ends there.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: list[int]
    context_lens: list[int]
    lengths: Tensor
    logits_rows: Tensor
