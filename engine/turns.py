"""Whose step it is: several engines over one model, one step at a time.

Engines that compute at the same time slow each other down, by an amount that nobody can tell. If they
take turns instead, a step takes as long as it would alone, and can be measured. `threading.Lock` would
not do: who releases it and wants it again at once mostly gets it, and the others starve.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A fair lock: whoever asks first is next. Use as a context manager, around one step."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # one closed gate for each who waits
        self._taken = False

    def __enter__(self) -> Turns:
        with self._door:
            if not self._taken:
                self._taken = True
                return self
            gate = threading.Lock()
            gate.acquire()
            self._queue.append(gate)
        gate.acquire()  # opened by the one before, who leaves the turn to us
        return self

    def __exit__(self, *exc) -> None:
        with self._door:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False
