"""The model: weights in, logits out, over a packed batch and a paged KV cache.

Reading order: `config` (what a model is), `transformer` (the forward pass), `kernels`, `rope`, `linear`,
`kv_cache` and `attention` (its parts, in PyTorch), `native` (the same in C++, for a CPU),
`attention_backends` and `triton_attention` (another way to attend, on a GPU), then `loader`, `gguf` and
`gguf_tokenizer` (how it gets here).
"""

from engine.model.loader import LoadedModel, ModelLoadError, load_model

__all__ = ["LoadedModel", "ModelLoadError", "load_model"]
