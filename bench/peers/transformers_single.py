"""`transformers` `generate`, one request after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from bench.peers.transformers_model import Stopwatch, TransformersPeer
from bench.peers.worker import Answer, Item, main, now


class Single(TransformersPeer):
    def run(self, items: Sequence[Item]) -> list[Answer]:
        start = now()
        answers = []
        for item in items:
            time.sleep(max(0.0, item.due - (now() - start)))
            answers.append(self._generate(item))
        return answers

    def _generate(self, item: Item) -> Answer:
        prompt = torch.tensor([item.prompt], device=self.job.device)
        stopwatch = Stopwatch()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            use_cache=True,
            min_new_tokens=item.num_output,
            max_new_tokens=item.num_output,
            pad_token_id=0,
            streamer=stopwatch,
        )
        return Answer(prompt.shape[1], stopwatch.times[: output.shape[1] - prompt.shape[1]])


if __name__ == "__main__":
    main(Single)
