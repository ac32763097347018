"""Exercise 7: what follows from reading the weights once for everybody."""

from __future__ import annotations

import pytest

MODEL = (400e6, 100e6)  # a hundred million weights in float32
READS_SLOWLY = (20e9, 400e9)  # bytes, and multiplications and additions, in a second
COMPUTES_SLOWLY = (20e9, 5e9)  # so slowly that reading is never the limit


def arguments(exercise, machine):
    return exercise.Model(*MODEL), exercise.Machine(*machine)


def test_a_small_batch_takes_as_long_as_reading_the_weights(exercise):
    assert exercise.step_seconds(*arguments(exercise, READS_SLOWLY), 1) == pytest.approx(0.02)
    assert exercise.step_seconds(*arguments(exercise, READS_SLOWLY), 40) == pytest.approx(0.02)


def test_a_large_batch_takes_as_long_as_computing(exercise):
    assert exercise.step_seconds(*arguments(exercise, READS_SLOWLY), 80) == pytest.approx(0.04)


def test_speed_up_grows_with_the_batch_until_it_does_not(exercise):
    given = arguments(exercise, READS_SLOWLY)
    assert exercise.speed_up(*given, 1) == pytest.approx(1)
    assert exercise.speed_up(*given, 15) == pytest.approx(15)
    assert exercise.speed_up(*given, 40) == pytest.approx(40)
    assert exercise.speed_up(*given, 400) == pytest.approx(40)


def test_it_turns_where_computing_takes_as_long_as_reading(exercise):
    given = arguments(exercise, READS_SLOWLY)
    turn = exercise.turning_point(*given)
    assert turn == pytest.approx(40)
    assert exercise.step_seconds(*given, 2 * round(turn)) == pytest.approx(
        2 * exercise.step_seconds(*given, 1)
    )


def test_where_computing_is_the_limit_from_the_start_batching_gains_nothing(exercise):
    given = arguments(exercise, COMPUTES_SLOWLY)
    assert exercise.turning_point(*given) == pytest.approx(0.5)
    assert exercise.speed_up(*given, 1) == pytest.approx(1)
    assert exercise.speed_up(*given, 32) == pytest.approx(1)
