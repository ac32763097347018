"""Long work in Python beside an engine, in small portions.

Python runs one thread at a time. PyTorch gives way at every operation, and then waits for its turn again:
up to 5 ms (`sys.getswitchinterval`) if another thread computes in Python all the while. A decode step has
hundreds of operations, so one such thread was measured to slow an engine from 17 steps a second to 0.4.
A thread that sleeps gives way at once; so long work sleeps often.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Breathe = Callable[[], None]


def hold() -> None:
    """Never pause: for work in a process without an engine."""


class Breath:
    """Call it between small pieces of work: it sleeps as soon as a portion is done.

    share: the part of the time that the work gets; portion: seconds of work between two pauses.
    """

    def __init__(self, share: float = 0.3, portion: float = 0.002):
        self._rest = 1 / share - 1
        self._portion = portion
        self._since = time.monotonic()

    def __call__(self) -> None:
        worked = time.monotonic() - self._since
        if worked >= self._portion:
            time.sleep(worked * self._rest)
            self._since = time.monotonic()
