"""Glass Engine: an LLM inference engine you can see through.

To read it, follow a request: `llm.py` or `runner.py` -> `continuous_engine.py` (the step) ->
`request_factory.py`, `request.py` -> `scheduler.py` -> `memory.py` -> `model_runner.py`, `batch.py` ->
`model/` -> `sampling_plan.py`, `sampler.py` -> `detokenizer.py` -> `journal.py`, `events.py`, `trace.py`.
For a CPU, `threads.py`; for a GPU, `transfer.py` and `cuda_graphs.py`.
"""

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
