"""Exercise 7: the roofline of a decode step.

.venv/bin/python -m pytest docs/exercises/test_ex7_speed.py
"""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """bandwidth: bytes it reads from memory in a second. flops: multiplications and additions in a second."""

    bandwidth: float
    flops: float


class Model(NamedTuple):
    """weight_bytes: of all weights. num_weights: how many; each is multiplied and added once a token."""

    weight_bytes: float
    num_weights: float


def step_seconds(model: Model, machine: Machine, batch: int) -> float:
    """The least time that a decode step for `batch` requests can take.

    All weights are read once, whatever the batch is, and used for every request in it. Reading and computing
    go on side by side, so the step takes as long as the slower of the two. (The KV cache is left out.)
    """
    raise NotImplementedError("exercise 7: step_seconds")


def speed_up(model: Model, machine: Machine, batch: int) -> float:
    """How many times as many tokens come out in a second as with one request at a time."""
    raise NotImplementedError("exercise 7: speed_up")


def turning_point(model: Model, machine: Machine) -> float:
    """The batch, not rounded, from which on computing takes longer than reading: more gains no more."""
    raise NotImplementedError("exercise 7: turning_point")
