"""Races for everybody: at most one runs at a time, its progress and its result are there for all.

A result is one JSON object, built and compressed once:

    id, modes [a, b], size, seed
    requests   [[arrival in seconds, prompt tokens, answer tokens], ...]
    arms       [{mode, summary, frames}, ...]: see `summary.summarise` and `frames`; `t` in the frames is on
               the arm's own clock, so both play side by side from 0
    winner     mode; null if there is no speed-up
    speedup    how many times longer the other took; null if `refused`
    refused    why there is no speed-up; empty if there is one

A status is {id, modes, size, state, arm, done, total, seconds, error}: state is "running", "done" or
"failed"; arm is the one that runs (0 or 1), done and total are output tokens of both arms together,
seconds is how long it has been running.
"""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections import OrderedDict
from typing import Any, get_args

from engine.events import Mode
from engine.trace import Trace
from visualizer.breath import Breath
from visualizer.frames import dumps, trace_frames
from visualizer.race import SIZES, Race, RaceError, run_race
from visualizer.siblings import Siblings

logger = logging.getLogger(__name__)

KEPT = 6  # finished races
PAUSE = 30.0  # seconds before the same race may be run anew


class RaceRefused(ValueError):
    """A race that cannot be started, or not now. The message is for the page."""


class _Stopped(Exception):
    """The server closes."""


class _Entry:
    def __init__(self, race_id: str, modes: tuple[Mode, Mode], size: int):
        self.race_id, self.modes, self.size = race_id, modes, size
        self.state = "running"
        self.arm = self.done = self.total = 0
        self.error = ""
        self.started = time.monotonic()
        self.ended: float | None = None
        self.race: Race | None = None
        self.body = b""  # the result, gzipped

    def status(self) -> dict[str, Any]:
        return {
            "id": self.race_id,
            "modes": self.modes,
            "size": self.size,
            "state": self.state,
            "arm": self.arm,
            "done": self.done,
            "total": self.total,
            "seconds": round((self.ended or time.monotonic()) - self.started, 1),
            "error": self.error,
        }


class Races:
    """Starts races and keeps the latest results. Safe to use from any thread."""

    def __init__(self, siblings: Siblings):
        self._siblings = siblings
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._count = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, first: Any, second: Any, size: Any, again: bool = False) -> dict[str, Any]:
        """The status of this race: one that is under way or done, or else a new one.

        again: run it anew though there is a result, unless that one is fresh. Raises RaceRefused if the
        arguments are wrong, or while another race runs.
        """
        modes, size = _check(first, second, size)
        with self._lock:
            if self._closing:
                raise RaceRefused("The server is closing.")
            running = next((e for e in self._entries.values() if e.state == "running"), None)
            known = [e for e in self._entries.values() if (e.modes, e.size) == (modes, size)]
            if running in known and running is not None:
                return running.status()
            finished = [e for e in known if e.state == "done"]
            if finished and (not again or time.monotonic() - (finished[-1].ended or 0.0) < PAUSE):
                return finished[-1].status()
            if running is not None:
                raise RaceRefused(
                    f"A race of {running.modes[0]} against {running.modes[1]} is being run, "
                    f"{running.done} of {running.total} tokens done. Only one runs at a time: "
                    "watch this one, or try again when it is over."
                )
            self._count += 1
            entry = _Entry(f"{modes[0]}-{modes[1]}-{size}-{self._count}", modes, size)
            self._entries[entry.race_id] = entry
            while len(self._entries) > KEPT:
                self._entries.popitem(last=False)
            self._thread = threading.Thread(target=self._run, args=(entry,), name="glass-race", daemon=True)
            self._thread.start()
            return entry.status()

    def _run(self, entry: _Entry) -> None:
        def progress(arm: int, done: int, total: int) -> None:
            if self._closing:
                raise _Stopped
            entry.arm, entry.done, entry.total = arm, done, total

        try:
            race = run_race(self._siblings, entry.modes, entry.size, progress=progress)
            entry.body = gzip.compress(_result(entry, race).encode(), compresslevel=6)
            entry.race, entry.state = race, "done"
        except _Stopped:
            entry.error, entry.state = "The server is closing.", "failed"
        except RaceError as error:
            entry.error, entry.state = f"The race was ended: {error}.", "failed"
        except Exception:
            logger.exception("race %s failed", entry.race_id)
            entry.error, entry.state = "The race failed (see the terminal).", "failed"
        finally:
            entry.ended = time.monotonic()

    def status(self, race_id: str | None = None) -> dict[str, Any] | None:
        """The status of a race, or of the latest; None if there is none."""
        with self._lock:
            if race_id is None:
                return next((e.status() for e in reversed(self._entries.values())), None)
            entry = self._entries.get(race_id)
            return entry.status() if entry else None

    def result(self, race_id: str) -> bytes | None:
        """The result of a finished race as gzipped JSON; None if there is none."""
        with self._lock:
            entry = self._entries.get(race_id)
        return entry.body if entry and entry.state == "done" else None

    def trace(self, race_id: str, arm: int) -> Trace | None:
        """The trace of one arm (0 or 1) of a finished race."""
        with self._lock:
            entry = self._entries.get(race_id)
        race = entry.race if entry else None
        return race.arms[arm].trace if race and arm in (0, 1) else None

    def close(self) -> None:
        """End a race that runs."""
        self._closing = True
        if self._thread:
            self._thread.join()


def _check(first: Any, second: Any, size: Any) -> tuple[tuple[Mode, Mode], int]:
    known = get_args(Mode)
    for mode in (first, second):
        if not isinstance(mode, str) or mode not in known:
            raise RaceRefused(f"Unknown mode {mode!r:.40}; choose two of {', '.join(known)}.")
    if first == second:
        raise RaceRefused("Choose two different modes: a race of one against itself has no winner.")
    if type(size) is not int or size not in SIZES:
        raise RaceRefused(f"Choose one of {', '.join(map(str, SIZES))} requests.")
    return (first, second), size  # type: ignore[return-value]


def _result(entry: _Entry, race: Race) -> str:
    breathe = Breath()
    requests = [[round(r.arrival * race.beat, 4), len(r.prompt), r.num_output] for r in race.requests]
    arms = []
    for arm in race.arms:
        frames = ",".join(trace_frames(arm.trace, breathe=breathe))
        arms.append(f'{{"mode":"{arm.mode}","summary":{dumps(arm.summary)},"frames":[{frames}]}}')
    speedup = race.speedup
    members = {
        "id": entry.race_id,
        "modes": entry.modes,
        "size": race.size,
        "seed": race.seed,
        "requests": requests,
        "winner": race.winner,
        "speedup": None if speedup is None else round(speedup, 2),
        "refused": race.refused,
    }
    return f'{dumps(members)[:-1]},"arms":[{",".join(arms)}]}}'
