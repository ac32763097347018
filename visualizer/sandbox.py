"""Sandboxes: an engine for one visitor alone, which can really be paused and stepped.

The live engine is everybody's, so nobody may stop it. A sandbox has the same weights and a small KV pool
of its own. It starts paused, belongs to one visitor's token, and nobody else can look into it: its feed
is read through that token only. There are only a few; one that nobody uses for some minutes is closed.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from engine import EngineRunner
from engine.config import check_mode
from visualizer.feed import Feed
from visualizer.siblings import Siblings

MOST = 4  # at a time, of all visitors
IDLE = 300.0  # seconds without a command or a prompt after which a sandbox is closed
POOL_TOKENS, SLOTS, MODEL_LEN = 1024, 8, 512  # of a sandbox's engine, at most
MOST_STEPS = 32  # of one command
MOST_SECONDS = 8.0  # of one command, all its steps together: it holds one of the server's threads


class SandboxRefused(ValueError):
    """A sandbox that cannot be had, or cannot do that. The message is for the page."""


class Sandbox:
    """One visitor's engine, with its feed. `used` is when its visitor last did something with it."""

    def __init__(self, siblings: Siblings, now: float):
        engine = siblings.make("continuous", POOL_TOKENS, SLOTS, MODEL_LEN)
        self.runner = EngineRunner(engine, siblings.turns)
        self.runner.pause()
        self.paused = True
        # One reader only, who polls: the feed needs no thread, it moves when it is read.
        self.feed = Feed(engine.events)
        self.used = now
        self._commanded = threading.Lock()  # held by the command that is carried out

    def read(self, cursor: str | None) -> str:
        """JSON members of an answer to a poll, as `Feed.read`."""
        self.feed.tick()
        return self.feed.read(cursor)

    def command(self, action: str, value: Any = None) -> None:
        """pause, resume, step (value: how many, default 1), mode (value: which), one at a time.

        Raises SandboxRefused.
        """
        if not self._commanded.acquire(blocking=False):
            raise SandboxRefused("Your sandbox is still busy with your last command. Please wait for it.")
        try:
            match action:
                case "pause":
                    self._pause()
                case "resume":
                    self.runner.resume()
                    self.paused = False
                case "step":
                    self._step(1 if value is None else value)
                case "mode":
                    self._set_mode(value)
                case _:
                    raise SandboxRefused(f"A sandbox cannot {action[:40]!r}.")
        except RuntimeError as error:  # shut down meanwhile, or unhealthy
            raise SandboxRefused(f"The sandbox does not work any more: {error}.") from error
        finally:
            self._commanded.release()

    def _pause(self) -> None:
        self.runner.pause()
        self.paused = True

    def _set_mode(self, mode: Any) -> None:
        try:
            check_mode(mode)
        except (ValueError, TypeError):
            raise SandboxRefused("Unknown mode; choose naive, static or continuous.") from None
        self.runner.set_mode(mode)

    def _step(self, count: Any) -> None:
        if type(count) is not int or not 1 <= count <= MOST_STEPS:
            raise SandboxRefused(f"Choose 1 to {MOST_STEPS} steps.")
        self._pause()
        before = self.runner.stats().step
        end = time.monotonic() + MOST_SECONDS
        for done in range(count):
            try:
                self.runner.step_once(max(0.0, end - time.monotonic()))
            except FutureTimeout:  # what was begun is not taken back
                raise SandboxRefused(
                    f"These steps take long: {done} of {count} were taken in {MOST_SECONDS:.0f} seconds, "
                    "and one more is under way."
                ) from None
        if self.runner.stats().step == before:
            raise SandboxRefused("There is nothing to step: send the sandbox a prompt first.")

    def status(self, now: float) -> dict[str, Any]:
        """As JSON data: is it paused, its mode and step, and in how many seconds it is closed."""
        stats = self.runner.stats()
        return {
            "paused": self.paused,
            "mode": stats.mode,
            "step": stats.step,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "healthy": self.runner.healthy,
            "closes_in": max(0, round(self.used + IDLE - now)),
        }

    def close(self) -> None:
        """End its requests and its thread; its memory is free once nobody holds it any more."""
        self.runner.shutdown(drain=False)


class Sandboxes:
    """All sandboxes, by their visitors' tokens. Safe to use from any thread."""

    def __init__(self, siblings: Siblings, clock=time.monotonic):
        self._siblings = siblings
        self._clock = clock
        self._lock = threading.Lock()
        self._sandboxes: dict[str, Sandbox | None] = {}  # None: being made

    def open(self, token: str) -> Sandbox:
        """The token's sandbox, a new one if there is none. Raises SandboxRefused if there are too many."""
        with self._lock:
            if token in self._sandboxes:
                sandbox = self._sandboxes[token]
                if sandbox is None:
                    raise SandboxRefused("Your sandbox is being made.")
                return sandbox
            if len(self._sandboxes) >= MOST:
                raise SandboxRefused(
                    f"All {MOST} sandboxes are taken. One that is not used is closed after "
                    f"{IDLE / 60:.0f} minutes; please try again then."
                )
            self._sandboxes[token] = None
        try:
            sandbox = Sandbox(self._siblings, self._clock())
        except BaseException:
            with self._lock:
                self._sandboxes.pop(token, None)
            raise
        with self._lock:
            if token in self._sandboxes:
                self._sandboxes[token] = sandbox
                return sandbox
        sandbox.close()  # its visitor left meanwhile
        raise SandboxRefused("Your page was closed.")

    def get(self, token: str, use: bool = False) -> Sandbox | None:
        """The token's sandbox if it has one. use: its visitor does something with it now."""
        with self._lock:
            sandbox = self._sandboxes.get(token)
        if sandbox and use:
            sandbox.used = self._clock()
        return sandbox

    def status(self, token: str) -> dict[str, Any] | None:
        sandbox = self.get(token)
        return sandbox.status(self._clock()) if sandbox else None

    def close(self, token: str) -> None:
        """Free the token's sandbox, if it has one."""
        with self._lock:
            sandbox = self._sandboxes.pop(token, None)
        if sandbox:
            sandbox.close()

    def reap(self) -> None:
        """Close those that were not used for a while."""
        late = self._clock() - IDLE
        with self._lock:
            idle = [token for token, box in self._sandboxes.items() if box and box.used < late]
        for token in idle:
            self.close(token)

    def close_all(self) -> None:
        for token in list(self._sandboxes):
            self.close(token)
