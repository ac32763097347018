"""Exercise 1 against the engine: its cache's size, and the tokens that it computed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from docs.runs import Ask, make_engine, serve, steps_of, tokens
from engine.model.kv_cache import KVCache
from tests.support import tiny_loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_engines_cache(exercise, dtype):
    config = tiny_loaded().config
    assert 16 * exercise.bytes_per_token(config, dtype.itemsize) == KVCache.bytes_per_block(config, 16, dtype)


def test_bytes_of_the_model_in_the_chapter(exercise):
    """SmolLM2-135M: nine heads make queries, and share three heads of keys and values."""
    config = replace(tiny_loaded().config, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    assert exercise.bytes_per_token(config, 4) == 46_080


@pytest.mark.parametrize(("num_prompt", "num_output"), [(5, 1), (1, 7), (20, 12)])
def test_with_a_cache_as_many_as_the_engine_computes(exercise, num_prompt, num_output):
    prompt = tokens(random.Random(0), num_prompt)
    trace = serve(make_engine(tiny_loaded()), [Ask("a", prompt, num_output)]).trace
    computed = sum(use.num_tokens for event in steps_of(trace) for use in event.slots)
    assert exercise.tokens_computed(num_prompt, num_output, with_cache=True) == computed


def test_without_a_cache_everything_is_computed_again(exercise):
    assert exercise.tokens_computed(3, 1, with_cache=False) == 3
    assert exercise.tokens_computed(3, 4, with_cache=False) == 3 + 4 + 5 + 6


def test_ten_times_the_answer_is_nearly_a_hundred_times_the_work(exercise):
    without = [exercise.tokens_computed(1, n, with_cache=False) for n in (100, 1000)]
    with_cache = [exercise.tokens_computed(1, n, with_cache=True) for n in (100, 1000)]
    assert without[1] / without[0] > 90
    assert with_cache[1] / with_cache[0] == 10
