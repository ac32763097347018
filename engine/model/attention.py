"""Attention over the paged cache, for decode tokens and prefill chunks alike.

A step's requests are sorted into groups that share one call: equal query length, and context lengths
close enough that padding the shorter ones costs less than another call would. Decoding is the group
whose query length is 1; prompts, chunks of prompts and drafts to verify are groups of longer ones. Which
rows, blocks and masks a group has is the same in every layer, so it is worked out once a step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache

# Another group costs a few more calls a layer. Measured as the padded context (query tokens x context
# tokens) that takes as long: about 25 microseconds on a CPU, a few kernel launches on a GPU.
SPLIT_SAVES = {"cpu": 512, "cuda": 16384}
# Bytes of K and V that one call gathers at most, unless a single request has more, so that gathering takes
# bounded memory. Smaller bounds, down to what a core's own cache holds, measured no faster.
GATHER_BYTES = {"cpu": 12 << 20, "cuda": 256 << 20}


@dataclass(slots=True)
class AttentionGroup:
    """n requests (`size`) with query_len tokens each, and context room for the longest of them.

    rows: int64 [n * query_len], their rows in the packed batch; None if they are the batch in order.
    blocks: int64 [n * blocks of the longest], what `KVCache.gather` reads.
    mask: [n, 1, query_len * G, context], 0 where a key is visible and -inf where not, in the model's dtype;
        G is the number of query heads that share a key head.
    """

    size: int
    rows: Tensor | None
    blocks: Tensor
    mask: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """attention_backend="sdpa": PyTorch's own kernels, on any device.

    Everything about a step that all layers share; see `attention_backends.Attention`.
    """

    slot_mapping: Tensor
    groups: list[AttentionGroup]

    pads_contexts = True

    @classmethod
    def build(
        cls, batch: Batch, config: ModelConfig, block_size: int, dtype: torch.dtype
    ) -> AttentionMetadata:
        """Plan from the lengths, Python ints; build indices and masks on the batch's device.

        Which requests are in a group is not copied there: sorted by the same lengths, they lie side by side.
        """
        device = batch.token_ids.device
        split_saves = SPLIT_SAVES.get(device.type, SPLIT_SAVES["cuda"])
        bytes_per_token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        most_gathered = GATHER_BYTES.get(device.type, GATHER_BYTES["cuda"]) // bytes_per_token
        query_lens, context_lens = batch.lengths
        order = (query_lens << 32 | context_lens).argsort(stable=True)
        starts = query_lens.cumsum(0) - query_lens
        groups, placed = [], 0
        for members in group_requests(batch.query_lens, batch.context_lens, split_saves, most_gathered):
            query_len = batch.query_lens[members[0]]
            longest = max(batch.context_lens[r] for r in members)
            blocks_each = -(-longest // block_size)
            rows = None
            positions, tables = batch.positions, batch.block_tables
            if len(members) < len(batch.query_lens):
                requests = order[placed : placed + len(members)]
                placed += len(members)
                rows = (starts[requests].unsqueeze(1) + torch.arange(query_len, device=device)).flatten()
                positions, tables = positions[rows], tables[requests]
            visible = torch.arange(blocks_each * block_size, device=device) <= positions.unsqueeze(1)
            mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
            shared = config.num_heads // config.num_kv_heads
            mask = mask.view(len(members), 1, query_len, 1, -1).expand(-1, -1, -1, shared, -1).flatten(2, 3)
            groups.append(AttentionGroup(len(members), rows, tables[:, :blocks_each].flatten(), mask))
        return cls(batch.slot_mapping, groups)

    def attend(self, queries: Tensor, cache: KVCache, layer: int) -> Tensor:
        """What the queries [T, heads, head_dim] see in their own contexts: the same shape."""
        return paged_attention(queries, cache, layer, self)


def group_requests(
    query_lens: list[int], context_lens: list[int], split_saves: int, most_gathered: int
) -> list[list[int]]:
    """Request indices by group: equal query length, split by context wherever that saves enough padding,

    and never more than `most_gathered` tokens of (padded) context in a group of several. In the order of
    query length, then context, then index; or a single group of all, as they are.
    """
    by_query_len: dict[int, list[int]] = defaultdict(list)
    for request, length in enumerate(query_lens):
        by_query_len[length].append(request)
    groups: list[list[int]] = []
    for query_len, requests in sorted(by_query_len.items()):
        fits = max(context_lens) * len(context_lens) <= most_gathered
        if len(by_query_len) == 1 and fits and _padding(context_lens) * query_len <= split_saves:
            return [requests]  # the common decode step: the batch in its own order, no rows to pick
        requests.sort(key=context_lens.__getitem__)
        contexts = [context_lens[r] for r in requests]
        for start, stop in _split(contexts, 0, len(contexts), split_saves / query_len):
            size = max(1, most_gathered // contexts[stop - 1])
            groups += [requests[i : min(i + size, stop)] for i in range(start, stop, size)]
    return groups


def _padding(contexts: list[int]) -> int:
    return max(contexts) * len(contexts) - sum(contexts)


def _split(contexts: list[int], start: int, stop: int, worth: float) -> list[tuple[int, int]]:
    """Cut the ascending contexts[start:stop] where it saves most padding, as long as it saves > worth."""
    saved, cut = max(
        ((cut - start) * (contexts[stop - 1] - contexts[cut - 1]), cut) for cut in range(start + 1, stop + 1)
    )
    if saved <= worth:
        return [(start, stop)]
    return _split(contexts, start, cut, worth) + _split(contexts, cut, stop, worth)


def paged_attention(queries: Tensor, cache: KVCache, layer: int, metadata: AttentionMetadata) -> Tensor:
    """Attend from queries [T, heads, head_dim] to each request's own context; returns the same shape.

    The step's K and V must be in the cache already. Query heads that share a key head are treated as
    more query tokens, so grouped-query attention needs no repeated keys (idea: FlashDecoding kernels).
    """
    tokens, heads, width = queries.shape
    output = queries.new_empty(tokens, heads, width)
    for group in metadata.groups:
        mine = queries if group.rows is None else queries.index_select(0, group.rows)
        keys, values = cache.gather(layer, group.blocks, group.size)
        shared = heads // cache.num_kv_heads
        # [n, query_len, kv_heads, G, d] -> [n, kv_heads, query_len * G, d]
        mine = mine.view(group.size, -1, cache.num_kv_heads, shared, width).transpose(1, 2).flatten(2, 3)
        seen = F.scaled_dot_product_attention(mine, keys, values, attn_mask=group.mask)
        seen = seen.unflatten(2, (-1, shared)).transpose(1, 2).reshape(-1, heads, width)
        if group.rows is None:
            return seen
        output.index_copy_(0, group.rows, seen)
    return output
