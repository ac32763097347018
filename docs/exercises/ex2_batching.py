"""Exercise 2: count idle slot-steps.

.venv/bin/python -m pytest docs/exercises/test_ex2_batching.py
"""

from __future__ import annotations

from typing import NamedTuple


class Count(NamedTuple):
    steps: int
    idle: int  # slot-steps in which a slot had no request, of steps * num_slots


def count(lengths: list[int], num_slots: int, mode: str) -> Count:
    """How many steps it takes to serve requests that all wait at the start, and how many slot-steps are idle.

    lengths: tokens of each request's answer, in the order of arrival. A request sits in a slot for as many
        steps as its answer has tokens, for each step gives it one, the first step too.
    mode: "naive": one request at a time, in one slot; the other slots stay idle.
        "static": as many as there are slots enter together; the next enter when all of them are done.
        "continuous": whoever is first in the queue enters a slot that is free, at the step after it got free.
    """
    raise NotImplementedError("exercise 2: count")
