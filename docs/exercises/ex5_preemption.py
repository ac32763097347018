"""Exercise 5: out of blocks; who has to go?

.venv/bin/python -m pytest docs/exercises/test_ex5_preemption.py
"""

from __future__ import annotations

from engine.request import Request


def choose_victim(running: list[Request]) -> Request:
    """The running request that gives back its slot and its blocks, and will compute its tokens again later.

    running: at least one, in no particular order. `request.sort_key` orders requests as they are served: the
        smallest is served first (see `Request.sort_key`).

    The victim must be the one that is served last. Then the one that is served first is never put out while
    there is another, so at least one request always comes to its end, and all the others after it.
    """
    raise NotImplementedError("exercise 5: choose_victim")
