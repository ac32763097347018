"""The mode toggle of a page that many people share: at most one switch a second, and the last wish counts.

A switch sends every running request back to the queue, to be computed again. Clicked or posted without
limit, it would leave nobody any progress, and no mode a figure that means anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.config import check_mode
from engine.events import Mode

PERIOD = 1.0  # seconds between two switches


class ModeSwitch:
    """Passes modes on to an engine. Safe to use from any thread."""

    def __init__(self, set_mode: Callable[[Mode], None], period: float = PERIOD):
        self._set_mode = set_mode
        self._period = period
        self._lock = threading.Lock()
        self._last = -period
        self._wish: Mode | None = None
        self._timer: threading.Timer | None = None

    def ask(self, mode: Mode) -> None:
        """Switch now, or as soon as the last switch is long enough ago. Raises ValueError if unknown."""
        check_mode(mode)
        with self._lock:
            self._wish = mode
            wait = self._last + self._period - time.monotonic()
            if wait <= 0:
                self._switch()
            elif self._timer is None:
                self._timer = threading.Timer(wait, self._later)
                self._timer.daemon = True
                self._timer.start()

    def _later(self) -> None:
        with self._lock:
            self._timer = None
            try:
                self._switch()
            except RuntimeError:  # the runner was shut down meanwhile
                self._wish = None

    def _switch(self) -> None:
        if self._wish is not None:
            wish, self._wish = self._wish, None
            self._last = time.monotonic()
            self._set_mode(wish)

    def close(self) -> None:
        """Forget what is still wished for."""
        with self._lock:
            self._wish = None
            if self._timer:
                self._timer.cancel()
