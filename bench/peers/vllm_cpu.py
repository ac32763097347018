"""vLLM, on its CPU backend where that is what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.worker import Answer, Item, Job, main, now


class Vllm:
    def __init__(self, job: Job) -> None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = sorted(os.sched_getaffinity(0) if has_affinity else range(job.threads))[: job.threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # As vLLM's manual advises for speed: Intel's OpenMP, which comes with it, in the processes it starts.
        for library in Path(sys.prefix, "lib").glob("libiomp5.so"):
            os.environ.setdefault("LD_PRELOAD", str(library))
        import torch
        import vllm
        from vllm import LLM

        self.llm = LLM(
            model=job.model_path,
            dtype=job.dtype,
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            enable_prefix_caching=False,
            seed=0,
        )
        config = self.llm.llm_engine.vllm_config.model_config
        self.dtype = self.weights = str(config.dtype).removeprefix("torch.")
        self.threads = len(cores)
        self.software = f"vLLM {vllm.__version__}, torch {torch.__version__}"
        self.num_runs = 0

    def run(self, items: Sequence[Item]) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.num_runs += 1
        engine = self.llm.llm_engine
        for place, item in enumerate(items):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=item.num_output,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{self.num_runs}-{place}", {"prompt_token_ids": item.prompt}, params)
        answers = [Answer(0) for _ in items]
        while engine.has_unfinished_requests():
            outputs = engine.step()
            at = now()
            for output in outputs:
                answer = answers[int(output.request_id.split("-")[1])]
                answer.num_prompt = len(output.prompt_token_ids)
                answer.times += [at] * len(output.outputs[0].token_ids)
        return answers


if __name__ == "__main__":
    main(Vllm)
