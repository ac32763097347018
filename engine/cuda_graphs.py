"""Decode steps as CUDA graphs: a whole forward pass replayed by one call.

A small model's decode step is some hundreds of kernels of a few microseconds each, and starting them from
Python takes longer than running them. A CUDA graph records them once and starts them all together. But it
repeats exactly what was recorded, on the same memory. Therefore:

* inputs lie in buffers that never move; a step copies its own into them;
* what differs from step to step is in those buffers, not in Python: lengths are tensors;
* shapes are fixed, so that there is a graph for each of a few batch sizes (*buckets*), and the batch is
  padded to the next one. Padding rows write to `KVCache.dummy_block`, which nobody reads but they.

A token that was sampled in the step before is taken from where the sampler left it on the device.

On a CPU there is nothing to record; with `run_directly` in the place of `record_graph`, everything but the
recording works there too, which is how it is tested.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch
from engine.model.attention import GATHER_BYTES
from engine.model.attention_backends import Attention
from engine.model.kv_cache import KVCache
from engine.model.transformer import Transformer
from engine.request import Request

MOST_ROWS = 512  # larger batches run without a graph: by then the kernels take longer than their start
SMALLEST_WIDTH = 16  # blocks; the widths of tables are this, its doubles, and the widest
Capture = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(slots=True)
class DecodeBatch:
    """A step in which every request computes and samples one token.

    inputs: int64 [bucket, 3 + table width], a row a request and then the padding; its columns are a token
        (or, below 0, -1 - r for the one that row r of the last step sampled), its position, its slot in the
        cache, and the block table.
    query_lens: R ones.
    """

    inputs: Tensor
    query_lens: list[int]


class DecodeGraphs:
    """A graph for each bucket, and the buffers that all of them share.

    `capture` makes a function that runs on the buffers into one that replays it.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: type[Attention],
        max_num_seqs: int,
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """max_blocks: those of the longest context allowed."""
        self._model, self._cache, self._attention = model, cache, attention
        self._buckets = batch_buckets(min(max_num_seqs, MOST_ROWS))
        self._widths = table_widths(max_blocks) if attention.pads_contexts else [max_blocks]
        largest, device = self._buckets[-1], model.device
        self._padding = [0, 0, cache.dummy_block * cache.block_size]
        self.inputs = torch.tensor(
            [self._padding + [cache.dummy_block] * max_blocks], dtype=torch.int64, device=device
        ).repeat(largest, 1)
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.logits = torch.zeros(largest, model.config.vocab_size, dtype=torch.float32, device=device)
        self.finite = torch.zeros(largest, dtype=torch.bool, device=device)
        self._rows = torch.arange(largest, device=device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        # The largest first: the memory that its capture sets aside serves the others too.
        for bucket in reversed(self._buckets):
            for width in reversed(self._widths):
                if self._fits_memory(bucket, width):
                    self._replays[bucket, width] = capture(self._computation(bucket, width))

    def find(self, num_rows: int, num_blocks: int) -> tuple[int, int] | None:
        """The smallest (bucket, table width) with room for a batch; None if it must run without a graph."""
        bucket = bisect.bisect_left(self._buckets, num_rows)
        width = bisect.bisect_left(self._widths, num_blocks)
        if bucket == len(self._buckets) or width == len(self._widths):
            return None
        found = self._buckets[bucket], self._widths[width]
        return found if found in self._replays else None

    def prepare(self, requests: Sequence[Request], sampled_rows: dict[Request, int]) -> DecodeBatch | None:
        """Write down one token a request, on the host; None if there is no graph for so many, or so long.

        sampled_rows: the requests whose newest token `keep_sampled` was given, and in which row.
        """
        block_size = self._cache.block_size
        num_blocks = [request.num_computed_tokens // block_size + 1 for request in requests]
        columns = max(num_blocks)
        found = self.find(len(requests), columns)
        if found is None:
            return None
        bucket, width = found
        if self._attention.pads_contexts:
            columns = width  # masked or not, it will be read: stale blocks of others must not be left there
        rows = []
        for request, used in zip(requests, num_blocks, strict=True):
            position, table = request.num_computed_tokens, request.block_table
            row = sampled_rows.get(request)
            token = request.token_ids[position] if row is None else -1 - row
            slot = table[used - 1] * block_size + position % block_size
            # A row's own first block pads its table: see `ModelRunner.prepare`.
            rows.append([token, position, slot, *table[:used], *table[:1] * (columns - used)])
        rows += [self._padding + [self._cache.dummy_block] * columns] * (bucket - len(rows))
        return DecodeBatch(torch.tensor(rows), [1] * len(requests))

    def keep_sampled(self, tokens: Tensor) -> None:
        """Keep a step's sampled tokens, int64 [S] on the device, for the next one."""
        self.sampled[: len(tokens)].copy_(tokens)

    @torch.inference_mode()
    def run(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """As `ModelRunner.forward`, for R rows; valid until the next run, which reuses the memory."""
        (bucket, columns), num_rows = batch.inputs.shape, len(batch.query_lens)
        width = self._widths[bisect.bisect_left(self._widths, columns - len(self._padding))]
        self.inputs[:bucket, :columns].copy_(batch.inputs)
        self._replays[bucket, width]()
        return self.logits[:num_rows], self.finite[:num_rows]

    def _computation(self, bucket: int, width: int) -> Callable[[], None]:
        """The forward pass of a bucket, from the input buffers to the output buffers."""
        inputs = self.inputs[:bucket]
        block_tables = inputs[:, len(self._padding) : len(self._padding) + width]

        def compute() -> None:
            tokens, positions, slots = inputs[:, : len(self._padding)].T.contiguous()
            sampled = self.sampled[(-1 - tokens).clamp(min=0)]
            batch = Batch(
                token_ids=torch.where(tokens < 0, sampled, tokens),
                positions=positions,
                slot_mapping=slots,
                block_tables=block_tables,
                query_lens=[1] * bucket,
                # Only room: how much of it each row sees, the positions say.
                context_lens=[width * self._cache.block_size] * bucket,
                lengths=torch.stack([torch.ones_like(positions), positions + 1]),
                logits_rows=self._rows[:bucket],
            )
            self.logits[:bucket].copy_(self._model(batch, self._cache, self._attention))
            self.finite[:bucket].copy_(self._cache.is_finite())

        return compute

    def _fits_memory(self, bucket: int, width: int) -> bool:
        """Gathering whole tables is for short contexts; beyond, grouping rows by length costs less."""
        layer = self._cache.layers[0]
        bytes_gathered = bucket * width * layer.shape[1] * layer.element_size()
        return not self._attention.pads_contexts or bytes_gathered <= GATHER_BYTES.get(
            layer.device.type, GATHER_BYTES["cuda"]
        )


def batch_buckets(largest: int) -> list[int]:
    """1, 2, 4, 8 and then every eighth: fewer buckets mean more padding, more of them a longer start."""
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest})


def table_widths(largest: int) -> list[int]:
    """Table widths in blocks, each twice the one before, up to the largest."""
    widths = [SMALLEST_WIDTH]
    while widths[-1] < largest:
        widths.append(2 * widths[-1])
    return [*widths[:-1], largest]


def choose_capture(device: torch.device, enforce_eager: bool) -> Capture | None:
    """How to capture graphs on this device; None if it has none, or is not to."""
    return GraphRecorder() if device.type == "cuda" and not enforce_eager else None


def run_directly(compute: Callable[[], None]) -> Callable[[], None]:
    """No graph at all: a replay computes anew, on the same buffers."""
    return torch.inference_mode()(compute)


class GraphRecorder:
    """Records CUDA graphs that share one pool of memory, since no two of them ever run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError, with the way out, if something in `compute` cannot be recorded."""
        try:
            with torch.inference_mode():
                # What libraries set up at a first call (handles, workspaces, compiled kernels) must be there
                # before, and on a stream of its own, as PyTorch's notes on CUDA graphs ask for.
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        compute()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph, pool=self._pool):
                    compute()
        except Exception as error:
            raise RuntimeError(
                f"capturing a decode step as a CUDA graph failed: {error}; enforce_eager=True does without"
            ) from error
        return graph.replay
