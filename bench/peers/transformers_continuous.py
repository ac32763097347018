"""`transformers`' own continuous batching (what `generate_batch` runs on)."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.peers.transformers_model import TransformersPeer
from bench.peers.worker import Answer, Item, Job, main

NO_TOKEN = -1  # as the end token: none ends an answer
PAGE = 256  # its own default, tokens


class Continuous(TransformersPeer):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        # `generate_batch` has one length for all requests, so the manager beneath it is used. By default its
        # cache would take 60 % of all memory.
        pages = job.max_num_seqs * (-(-job.max_model_len // PAGE) + 1)
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages,
            max_requests_per_batch=job.max_num_seqs,
            allow_block_sharing=False,
        )
        self.manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0), config
        )
        self.manager.warmup()
        self.num_runs = 0

    def run(self, items: Sequence[Item]) -> list[Answer]:
        self.num_runs += 1
        if not self.manager.is_running():
            self.manager.start()
        places = {}
        for place, item in enumerate(items):
            request_id = f"{self.num_runs}-{place}"
            self.manager.add_request(
                item.prompt, request_id, max_new_tokens=item.num_output, record_timestamps=True
            )
            places[request_id] = place
        answers = [Answer(0) for _ in items]
        while places:
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError(f"its thread ended with {len(places)} requests unanswered")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                times = result.timestamps[: len(result.generated_tokens)]
                answers[places.pop(result.request_id)] = Answer(len(result.prompt_ids), times)
        return answers


if __name__ == "__main__":
    main(Continuous)
