"""`transformers` `generate` in static batches: the next begins when all of the last have finished.

Prompts are padded on the left to the longest of their batch. A batch runs until its longest answer is done;
what the others get beyond their own length is thrown away, so it counts as time and not as output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.peers.transformers_model import Stopwatch, TransformersPeer
from bench.peers.worker import Answer, Item, main


class Static(TransformersPeer):
    def run(self, items: Sequence[Item]) -> list[Answer]:
        size = self.job.max_num_seqs
        return [answer for i in range(0, len(items), size) for answer in self._generate(items[i : i + size])]

    def _generate(self, batch: Sequence[Item]) -> list[Answer]:
        width = max(len(item.prompt) for item in batch)
        padding = [width - len(item.prompt) for item in batch]
        rows = [[0] * pad + item.prompt for pad, item in zip(padding, batch, strict=True)]
        prompts = torch.tensor(rows, device=self.job.device)
        is_real = torch.arange(width) >= torch.tensor(padding)[:, None]
        longest = max(item.num_output for item in batch)
        stopwatch = Stopwatch()
        output = self.model.generate(
            prompts,
            attention_mask=is_real.long().to(self.job.device),
            do_sample=False,
            use_cache=True,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
            streamer=stopwatch,
        )
        times = stopwatch.times[: output.shape[1] - width]
        return [Answer(len(item.prompt), times[: item.num_output]) for item in batch]


if __name__ == "__main__":
    main(Static)
