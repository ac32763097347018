"""Exercise 7: what follows from reading the weights once for everybody."""

from __future__ import annotations

import pytest

MODEL = (400e6, 100e6)  # a hundred million weights in float32
SLOW = (20e9, 400e9)  # a machine that computes fast and reads slowly
EVEN = (20e9, 10e9)  # one that computes so slowly that reading never matters


def arguments(exercise, machine):
    return exercise.Model(*MODEL), exercise.Machine(*machine)


def test_a_small_batch_takes_as_long_as_reading_the_weights(exercise):
    assert exercise.step_seconds(*arguments(exercise, SLOW), 1) == pytest.approx(0.02)
    assert exercise.step_seconds(*arguments(exercise, SLOW), 40) == pytest.approx(0.02)


def test_a_large_batch_takes_as_long_as_computing(exercise):
    assert exercise.step_seconds(*arguments(exercise, SLOW), 80) == pytest.approx(0.04)


def test_speed_up_grows_with_the_batch_until_it_does_not(exercise):
    given = arguments(exercise, SLOW)
    assert exercise.speed_up(*given, 1) == pytest.approx(1)
    assert exercise.speed_up(*given, 15) == pytest.approx(15)
    assert exercise.speed_up(*given, 40) == pytest.approx(40)
    assert exercise.speed_up(*given, 400) == pytest.approx(40)


def test_it_turns_where_computing_takes_as_long_as_reading(exercise):
    given = arguments(exercise, SLOW)
    turn = exercise.turning_point(*given)
    assert turn == pytest.approx(40)
    assert exercise.step_seconds(*given, 2 * round(turn)) == pytest.approx(
        2 * exercise.step_seconds(*given, 1)
    )


def test_where_computing_is_the_limit_from_the_start_batching_gains_nothing(exercise):
    assert exercise.turning_point(*arguments(exercise, EVEN)) == pytest.approx(1)
    assert exercise.speed_up(*arguments(exercise, EVEN), 32) == pytest.approx(1)
