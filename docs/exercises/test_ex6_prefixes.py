"""Exercise 6: keys of a hash chain, and hits as the engine counts them."""

from __future__ import annotations

import random

import pytest

from docs.runs import Ask, make_engine, serve, tokens, transitions
from tests.support import tiny_loaded

SIZE = 16


def test_one_key_for_each_full_block(exercise):
    assert [len(exercise.block_keys(list(range(n)), 4)) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_equal_beginnings_equal_keys(exercise):
    a, b = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]
    first, second = exercise.block_keys(a, 4), exercise.block_keys(b, 4)
    assert first[0] == second[0] and first[1] != second[1]


def test_the_same_tokens_behind_another_beginning_are_another_block(exercise):
    same = [5, 6, 7, 8]
    assert exercise.block_keys([1, 2, 3, 4, *same], 4)[1] != exercise.block_keys([4, 3, 2, 1, *same], 4)[1]
    assert exercise.block_keys([*same, *same], 4)[0] != exercise.block_keys([*same, *same], 4)[1]


def test_a_difference_far_back_counts_too(exercise):
    """The third blocks are the same, and so are the second ones. The first are not."""
    same = [7] * 8
    assert exercise.block_keys([1] * 4 + same, 4)[2] != exercise.block_keys([2] * 4 + same, 4)[2]


def test_no_hits_beyond_a_gap(exercise):
    prompt = list(range(1, 20))
    known = set(exercise.block_keys(prompt, 4))
    assert exercise.num_cached_tokens(known, prompt, 4) == 16
    assert exercise.num_cached_tokens(known - {exercise.block_keys(prompt, 4)[1]}, prompt, 4) == 4


@pytest.mark.parametrize("length", [5, 16, 17, 32, 40, 64])
def test_as_many_hits_as_in_the_engine(exercise, length):
    """The same prompt once more, and one that shares a part of it."""
    rng = random.Random(length)
    first = tokens(rng, length)
    part = first[: length // 2] + tokens(rng, 20)
    trace = serve(
        make_engine(tiny_loaded()), [Ask("a", first, 1), Ask("b", first, 1, at=3), Ask("c", part, 1, at=5)]
    )
    hits = {event.request_id: event.num_tokens for event in transitions(trace.trace, "prefix_hit")}
    known = set(exercise.block_keys(first, SIZE))
    assert exercise.num_cached_tokens(known, first, SIZE) == hits.get("b", 0)
    assert exercise.num_cached_tokens(known, part, SIZE) == hits.get("c", 0)
