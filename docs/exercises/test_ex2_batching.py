"""Exercise 2 against the engine: the same requests, served for real."""

from __future__ import annotations

import random

import pytest

from docs.runs import MODES, Ask, make_engine, serve, steps_of, tokens
from tests.support import tiny_loaded


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_as_the_engine_does(exercise, mode, seed):
    rng = random.Random(seed)
    num_slots = rng.randint(1, 5)
    lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 12))]
    asks = [Ask(f"r{i}", tokens(rng, 4), length) for i, length in enumerate(lengths)]
    steps = steps_of(
        serve(make_engine(tiny_loaded(), mode, max_num_seqs=num_slots, num_blocks=256), asks).trace
    )
    idle = sum(num_slots - len(event.slots) for event in steps)
    assert exercise.count(lengths, num_slots, mode) == (len(steps), idle)


def test_static_waits_for_the_longest(exercise):
    assert exercise.count([1, 10, 1, 1], 2, "static") == (11, 2 * 11 - 13)


def test_continuous_does_not(exercise):
    assert exercise.count([1, 10, 1, 1], 2, "continuous") == (10, 2 * 10 - 13)
