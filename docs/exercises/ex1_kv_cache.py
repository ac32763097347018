"""Exercise 1: what the KV cache costs, and what it saves.

.venv/bin/python -m pytest docs/exercises/test_ex1_kv_cache.py
"""

from __future__ import annotations

from engine.model.config import ModelConfig


def bytes_per_token(config: ModelConfig, bytes_per_number: int) -> int:
    """Bytes that one token takes in the KV cache.

    Each layer (`config.num_layers`) keeps, for each of its key/value heads (`config.num_kv_heads`), one key
    and one value of `config.head_dim` numbers each.
    """
    raise NotImplementedError("exercise 1: bytes_per_token")


def tokens_computed(num_prompt: int, num_output: int, with_cache: bool) -> int:
    """How many tokens go through the model to answer a prompt of `num_prompt` tokens with `num_output`.

    The first token of the answer comes from computing the prompt. Each later one comes from computing the
    token before it: only that one with a cache, and everything that is before the new token without.
    The answer's last token is never computed, for nothing follows it. num_output is at least 1.
    """
    raise NotImplementedError("exercise 1: tokens_computed")
