"""Solution of exercise 1."""

from __future__ import annotations

from engine.model.config import ModelConfig


def bytes_per_token(config: ModelConfig, bytes_per_number: int) -> int:
    keys_and_values = 2
    return config.num_layers * config.num_kv_heads * keys_and_values * config.head_dim * bytes_per_number


def tokens_computed(num_prompt: int, num_output: int, with_cache: bool) -> int:
    if with_cache:
        return num_prompt + num_output - 1
    return sum(num_prompt + already for already in range(num_output))
