"""How much visitors may ask of the engine, at home and in public."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


class Refused(ValueError):
    """A request that is not accepted. The message says why and what to do, in words for the page."""


@dataclass(frozen=True)
class Limits:
    """The defaults are for a machine of one's own, in a room where people know each other.

    active: requests of all visitors that run or wait. active_per_visitor: those of one page.
    per_minute: requests of one client address in the long run, `burst` of them at once; None: any number.
    """

    active: int = 256
    active_per_visitor: int = 64
    per_minute: float | None = None
    burst: int = 64


# Strangers share two slow cores: a full queue should be worked off in a minute or two, and nobody should be
# able to keep it full alone. All 32 examples, and some prompts more, still go at once.
PUBLIC = Limits(active=128, active_per_visitor=40, per_minute=40, burst=64)


class RateLimiter:
    """A token bucket for each client: it holds `burst` requests and refills at the rate of the limits.

    A client is an address, as far as it can be known. One that lies about it gets a bucket of its own, so
    this keeps order among the honest; what the engine takes at all is bounded by `Limits.active`.
    """

    def __init__(self, limits: Limits, clock=time.monotonic):
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # client -> (requests left, when that was)

    def take(self, client: str, count: int) -> None:
        """Count requests of a client. Raises Refused, and counts none, if they are too many."""
        rate = self._limits.per_minute
        if rate is None:
            return
        with self._lock:
            now = self._clock()
            left = self._left(client, now)
            if left < count:
                seconds = max(1, round((min(count, self._limits.burst) - left) * 60 / rate))
                raise Refused(
                    f"That is more than {rate:.0f} requests a minute from one place. This page is shared: "
                    f"please try again in {seconds} seconds, or run it on a machine of your own."
                )
            self._buckets[client] = (left - count, now)
            if len(self._buckets) > 1000:  # those that have refilled need not be remembered
                full = [c for c in self._buckets if self._left(c, now) >= self._limits.burst]
                for other in full:
                    del self._buckets[other]

    def _left(self, client: str, now: float) -> float:
        left, since = self._buckets.get(client, (float(self._limits.burst), now))
        return min(float(self._limits.burst), left + (now - since) * (self._limits.per_minute or 0) / 60)
