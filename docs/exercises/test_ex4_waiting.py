"""Exercise 4 against the engine's scheduler: the grants of its first step."""

from __future__ import annotations

import random

import pytest

from docs.runs import Ask, make_engine, serve, steps_of, tokens
from tests.support import tiny_loaded


def test_a_short_prompt_does_not_wait_for_a_long_one(exercise):
    assert exercise.grant([448, 12], 64) == [52, 12]


def test_the_oldest_always_moves(exercise):
    assert exercise.grant([100, 5, 5, 5, 5], 10) == [5, 5, 0, 0, 0]


def test_nothing_is_wasted_and_nothing_is_made_up(exercise):
    rng = random.Random(4)
    for _ in range(200):
        missing = [rng.randint(1, 50) for _ in range(rng.randint(0, 6))]
        budget = rng.randint(1, 120)
        granted = exercise.grant(missing, budget)
        assert sum(granted) == min(budget, sum(missing))
        assert all(0 <= some <= all_of_it for some, all_of_it in zip(granted, missing, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_as_the_scheduler_does(exercise, seed):
    rng = random.Random(seed)
    missing = [rng.randint(1, 60) for _ in range(rng.randint(1, 6))]
    budget = rng.randint(1, 100)
    engine = make_engine(
        tiny_loaded(), max_num_seqs=6, max_num_batched_tokens=budget, enable_prefix_caching=False
    )
    asks = [Ask(f"r{i}", tokens(rng, length), 1) for i, length in enumerate(missing)]
    first = steps_of(serve(engine, asks).trace)[0]
    granted = {use.request_id: use.num_tokens for use in first.slots}
    assert exercise.grant(missing, budget) == [granted[ask.name] for ask in asks]
