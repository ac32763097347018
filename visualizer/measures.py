"""What the page says in numbers, measured from events alone.

Every figure is defined here, in one place, because a number on a projector must be one that can be
defended: a mean is output tokens over *busy* time, the wall time in which the engine had two or more
requests to serve, kept for each mode apart; a speed-up is the quotient of two such means. Time with a
single request does not count: there is nothing to schedule then, and all modes do the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from engine.events import EngineInfo, StepEvent

WINDOW = 2.0  # seconds that "tokens per second now" looks back on
BIN = 0.5  # seconds of busy time behind one point of the throughput chart
MAX_BINS = 600
MIN_TOKENS = 100  # below this a mode's mean is not good enough for a speed-up
LONGEST_GAP = 0.25  # between two steps of a busy engine; a longer one is a pause, and not counted
LATENCY_PERIOD = 0.5  # seconds between two looks at the percentiles
SLOWEST_RATE_AGE = 1.0  # after so many seconds without a step, the engine makes 0 tokens per second


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None of none."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None


@dataclass
class ModeTotals:
    """What the engine did in one mode since the page was started."""

    tokens: int = 0  # while there were two requests or more, as is `busy`, in seconds
    busy: float = 0.0
    idle_slot_steps: int = 0  # of these, somebody was waiting
    slot_steps: int = 0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=512))  # between tokens of one request
    latency: list[float | None] = field(default_factory=list)  # as shown: see `Measures._latency`
    latency_time: float = -math.inf

    @property
    def mean(self) -> float:
        """Output tokens per second of busy time."""
        return self.tokens / self.busy if self.busy else 0.0


class Measures:
    """Running totals, the throughput curve and the metric strip. Fed with every step, in order."""

    def __init__(self, info: EngineInfo):
        self._info = info
        self._recent: deque[tuple[float, float, int]] = deque()  # end of step, busy seconds, tokens
        self._recent_busy, self._recent_tokens = 0.0, 0  # their sums
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._last: StepEvent | None = None
        self._bin_mode = ""
        self._bin_tokens = 0
        self._bin_busy = 0.0
        self._busy = 0.0
        self.totals: dict[str, ModeTotals] = {}
        # (busy seconds since the start, tokens per second, mode): the throughput curve
        self.bins: deque[tuple[float, float, str]] = deque(maxlen=MAX_BINS)
        self.num_bins = 0  # ever made
        self.tokens = 0  # ever made, in all modes, as is `wasted`
        self.wasted = 0  # slot-steps idle while somebody waited

    def of(self, mode: str) -> ModeTotals:
        return self.totals.setdefault(mode, ModeTotals())

    def step(self, event: StepEvent) -> None:
        """Count one step."""
        tokens = sum(use.num_sampled for use in event.slots)
        busy = self._busy_seconds(event)
        totals = self.of(event.mode)
        if len(event.slots) + event.num_waiting > 1:
            totals.tokens += tokens
            totals.busy += busy
        totals.slot_steps += self._info.max_num_seqs
        wasted = self._info.max_num_seqs - len(event.slots) if event.num_waiting else 0
        totals.idle_slot_steps += wasted
        self.tokens += tokens
        self.wasted += wasted
        self._step_seconds.append(event.times.total)
        self._note_recent(event.time, busy, tokens)
        self._add_to_bin(event.mode, tokens, busy)
        self._last = event

    def _note_recent(self, time: float, busy: float, tokens: int) -> None:
        self._recent.append((time, busy, tokens))
        self._recent_busy += busy
        self._recent_tokens += tokens
        while self._recent[0][0] < time - WINDOW:
            _, busy, tokens = self._recent.popleft()
            self._recent_busy -= busy
            self._recent_tokens -= tokens

    def pause(self) -> None:
        """The next step does not follow on the last one: the time between them is nobody's."""
        self._last = None

    def first_token(self, mode: str, seconds: float) -> None:
        self.of(mode).ttft.append(seconds)

    def gaps(self, mode: str, seconds: list[float]) -> None:
        """Note the time between tokens: one for each token that is not its request's first."""
        self.of(mode).gaps.extend(seconds)

    def _latency(self, totals: ModeTotals) -> list[float | None]:
        """TTFT median and 95th percentile, time between tokens likewise, in seconds; None if unknown.

        They are of the last 64 requests and 512 tokens. Sorting takes time, so twice a second must do.
        """
        now = self._last.time if self._last else 0.0
        if now >= totals.latency_time + LATENCY_PERIOD or None in totals.latency:
            parts = [
                percentile(values, share) for values in (totals.ttft, totals.gaps) for share in (0.5, 0.95)
            ]
            totals.latency = [None if part is None else round(part, 4) for part in parts]
            totals.latency_time = now
        return totals.latency

    def _busy_seconds(self, event: StepEvent) -> float:
        """Time since the last step if there was work all the while, else the step's own time."""
        last = self._last
        if last is None or not last.num_running + last.num_waiting:
            return event.times.total
        return min(event.time - last.time, event.times.total + LONGEST_GAP)

    def _add_to_bin(self, mode: str, tokens: int, busy: float) -> None:
        if mode != self._bin_mode:
            self._bin_mode, self._bin_tokens, self._bin_busy = mode, 0, 0.0
        self._bin_tokens += tokens
        self._bin_busy += busy
        self._busy += busy
        if self._bin_busy >= BIN:
            rate = self._bin_tokens / self._bin_busy
            self.bins.append((round(self._busy, 2), round(rate, 1), mode))
            self.num_bins += 1
            self._bin_tokens, self._bin_busy = 0, 0.0

    def rate(self, quiet: float) -> float:
        """Tokens per second over the last two seconds. `quiet`: seconds since the last step was seen."""
        if quiet > SLOWEST_RATE_AGE or self._recent_busy < 1e-9:  # sums of fractions do not come back to 0
            return 0.0
        return self._recent_tokens / self._recent_busy

    def speedup(self, mode: str) -> tuple[str, float] | None:
        """(mode, how many times the naive mean), for `mode` or, in naive mode, for the fastest other."""
        naive = self.totals.get("naive")
        if naive is None or naive.tokens < MIN_TOKENS:
            return None
        others = {
            name: totals.mean / naive.mean
            for name, totals in self.totals.items()
            if name != "naive" and totals.tokens >= MIN_TOKENS
        }
        if mode in others:
            return mode, others[mode]
        return max(others.items(), key=lambda item: item[1]) if mode == "naive" and others else None

    def numbers(self, mode: str, quiet: float) -> dict[str, Any]:
        """The numbers of the metric strip, as JSON data. `wasted` and `slot_steps` are of this mode."""
        last, totals = self._last, self.of(mode)
        fast = self.speedup(mode)
        steps = self._step_seconds
        return {
            "mode": mode,
            "step": last.step if last else 0,
            "rate": round(self.rate(quiet), 1),
            "ttft": round(median(totals.ttft), 3) if totals.ttft else None,
            "latency": {name: self._latency(t) for name, t in self.totals.items()},
            "step_ms": round(1000 * sum(steps) / len(steps), 1) if steps else None,
            "wasted": totals.idle_slot_steps,
            "slot_steps": totals.slot_steps,
            "all_tokens": self.tokens,
            "all_wasted": self.wasted,
            "means": {
                name: [round(t.mean, 1), t.tokens, round(t.busy, 1)]
                for name, t in self.totals.items()
                if t.tokens
            },
            "least": MIN_TOKENS,
            "speedup": [fast[0], round(fast[1], 1)] if fast else None,
        }
