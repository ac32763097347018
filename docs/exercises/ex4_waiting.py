"""Exercise 4: divide a step's token budget among prompts.

.venv/bin/python -m pytest docs/exercises/test_ex4_waiting.py
"""

from __future__ import annotations


def grant(missing: list[int], budget: int) -> list[int]:
    """How many tokens of each prompt are computed in the next step.

    missing: for each prompt, oldest first, how many of its tokens are not computed yet.
    budget: most tokens of all of them together.

    1. Half of the budget, rounded up, goes to the oldest prompts: each gets all it misses until that half
       is used up. So none starves.
    2. What is left of the whole budget goes to the prompts that miss the fewest tokens (as given in
       `missing`; of equals, the older first), each up to all it misses. So a short prompt does not wait for
       a long one.
    """
    raise NotImplementedError("exercise 4: grant")
