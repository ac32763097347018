"""OpenVINO GenAI's continuous batching, on the GGUF file: its weights stay quantised.

Everything else is as it comes, so its KV cache too has the precision that it chooses for the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.worker import Answer, Item, Job, main, now

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVino:
    def __init__(self, job: Job) -> None:
        if job.gguf is None:
            raise ValueError("there is no GGUF file of this model to load; name one with --model")
        import openvino
        import openvino_genai

        self.api: Any = openvino_genai
        self.tensor = openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = job.max_num_seqs
        scheduler.cache_size = 2  # GB
        scheduler.enable_prefix_caching = False
        # Otherwise it takes in everybody at once, whatever max_num_seqs says.
        scheduler.dynamic_split_fuse = False
        properties = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[job.dtype],
            "INFERENCE_NUM_THREADS": job.threads,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(job.gguf, scheduler, "CPU", properties)
        self.dtype = job.dtype
        self.weights = Path(job.gguf).suffixes[0].lstrip(".")
        self.threads = job.threads
        self.software = f"OpenVINO GenAI {openvino_genai.__version__}"
        self.num_runs = 0

    def run(self, items: Sequence[Item]) -> list[Answer]:
        import numpy as np

        handles = []
        for place, item in enumerate(items):
            config = self.api.GenerationConfig(
                max_new_tokens=item.num_output, ignore_eos=True, do_sample=False, apply_chat_template=False
            )
            ids = self.tensor(np.array([item.prompt], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.num_runs + place, ids, config))
        self.num_runs += len(items)
        answers = [Answer(len(item.prompt)) for item in items]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            at = now()
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.times += [at] * len(output.generated_ids)
        return answers


if __name__ == "__main__":
    main(OpenVino)
