"""What the three `transformers` peers share: the model, and a stopwatch for its tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from bench.peers.worker import Job, now


class TransformersPeer:
    """The model as `transformers` loads it, with its default attention (SDPA)."""

    def __init__(self, job: Job) -> None:
        disable_progress_bar()
        torch.set_num_threads(job.threads)
        self.job = job
        model: Any = AutoModelForCausalLM.from_pretrained(job.model_path, dtype=getattr(torch, job.dtype))
        self.model = model.to(job.device).eval()
        self.dtype = self.weights = str(self.model.dtype).removeprefix("torch.")
        self.threads = torch.get_num_threads()
        self.software = f"transformers {transformers.__version__}, torch {torch.__version__}"


class Stopwatch(BaseStreamer):
    """Notes when each step's tokens come. The first call brings the prompts."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(now())

    def end(self) -> None:
        pass

    @property
    def times(self) -> list[float]:
        return self.calls[1:]
