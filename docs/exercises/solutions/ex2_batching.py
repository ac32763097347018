"""Solution of exercise 2."""

from __future__ import annotations

from typing import NamedTuple


class Count(NamedTuple):
    steps: int
    idle: int


def count(lengths: list[int], num_slots: int, mode: str) -> Count:
    waiting, running, steps = list(lengths), [], 0
    most = 1 if mode == "naive" else num_slots
    while waiting or running:
        if mode == "continuous" or not running:
            while waiting and len(running) < most:
                running.append(waiting.pop(0))
        steps += 1
        running = [left - 1 for left in running if left > 1]
    return Count(steps, steps * num_slots - sum(lengths))
