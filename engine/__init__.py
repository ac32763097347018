"""Glass Engine: an LLM inference engine you can see through.

To read it, follow a request: `llm.py` or `runner.py` -> `continuous_engine.py` (the step) ->
`request_factory.py`, `request.py` -> `scheduler.py` -> `memory.py` -> `model_runner.py`, `batch.py` ->
`model/` -> `sampling_plan.py`, `sampler.py` -> `detokenizer.py` -> `journal.py`, `events.py`, `trace.py`.
For a GPU, `transfer.py` and `cuda_graphs.py`; on a CPU they do nothing.
"""

import os

# How long OpenMP's threads spin before they sleep, when they wait for each other. The default, some
# milliseconds, is made for a machine of one's own: with a web server or a browser on the same cores, the
# waiting threads take the time of those they wait for, and a decode step was seen to take ten times as long.
# It is read when torch loads, so it must be set before; a value of the user's own is left alone.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from engine.config import EngineConfig
from engine.continuous_engine import ContinuousEngine
from engine.llm import LLM
from engine.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from engine.runner import EngineRunner, RequestHandle
from engine.sampling_params import SamplingParams
from engine.turns import Turns

__all__ = [
    "LLM",
    "CompletionOutput",
    "ContinuousEngine",
    "EngineConfig",
    "EngineRunner",
    "EngineStats",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Turns",
]
