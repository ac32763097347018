"""The engine behind the page: loading in the background, then ready, or failed with a way out."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine import LLM, EngineRunner
from engine.request_factory import check_text, encode
from visualizer.feed import Feed
from visualizer.limits import Limits
from visualizer.mode_switch import ModeSwitch
from visualizer.races import Races
from visualizer.sandbox import Sandboxes
from visualizer.siblings import Siblings
from visualizer.visitors import Visitors

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class LiveEngine:
    """An engine that runs, and what the page needs around it."""

    runner: EngineRunner
    feed: Feed
    visitors: Visitors
    modes: ModeSwitch
    races: Races
    sandboxes: Sandboxes
    llm: LLM

    def chat_ids(self, text: str) -> list[int]:
        """Token ids of a one-message chat; of the bare text if the model has no chat template."""
        if not self.llm.tokenizer.chat_template:
            return encode(self.llm.tokenizer, text)
        check_text(text)
        return self.llm.chat_prompt([{"role": "user", "content": text}])


class EngineHost:
    """What a page is served from, also before there is an engine. limits: of what visitors may ask."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._hardware = ""
        self.state = "loading"  # "loading" | "ready" | "failed"
        self.stage = "starting"
        self.fraction = 0.0
        self.error = ""
        self.live: LiveEngine | None = None  # there exactly from "ready" on
        self._closing = threading.Event()

    @classmethod
    def of(cls, llm, limits: Limits | None = None) -> EngineHost:
        """A host for an engine that is already there."""
        host = cls(limits)
        host.attach(llm)
        return host

    def load(self, make_llm: Callable[[Progress], Any], on_progress: Progress | None = None) -> None:
        """Make the engine in a background thread. `make_llm` is given a progress callback."""

        def progress(stage: str, fraction: float) -> None:
            self.stage, self.fraction = stage, fraction
            if on_progress:
                on_progress(stage, fraction)

        def work() -> None:
            try:
                self.attach(make_llm(progress))
            except Exception as error:
                # A ValueError or OSError is about the model or the options, and says so by itself.
                if not isinstance(error, ValueError | OSError):
                    traceback.print_exc()
                self.error = str(error) or type(error).__name__
                self.state = "failed"
                progress(f"failed: {self.error}", 0.0)
            else:
                progress("ready", 1.0)

        threading.Thread(target=work, name="glass-loader", daemon=True).start()

    def attach(self, llm) -> None:
        self._hardware = llm.loaded.hardware
        siblings = Siblings(llm)
        runner = EngineRunner(llm.engine, siblings.turns)
        feed = Feed(llm.engine.events).start()
        sandboxes = Sandboxes(siblings)
        visitors = Visitors(runner, feed, sandboxes, self._limits)
        modes = ModeSwitch(runner.set_mode)
        self.live = LiveEngine(runner, feed, visitors, modes, Races(siblings), sandboxes, llm)
        threading.Thread(target=self._reap, args=(self.live,), name="glass-reaper", daemon=True).start()
        self.state = "ready"

    def _reap(self, live: LiveEngine) -> None:
        while not self._closing.wait(2.0):
            live.visitors.reap()
            live.sandboxes.reap()

    def status(self) -> dict[str, Any]:
        """How the engine is, as JSON data: what it runs on, how far it is loaded, or why there is none."""
        if self.live and not self.live.runner.healthy:
            return {"state": "failed", "error": "It stopped after an internal error (see the terminal)."}
        if self.live:
            return {"state": "ready", "hardware": self._hardware}
        if self.state == "failed":
            return {"state": "failed", "error": self.error}
        return {"state": "loading", "stage": self.stage, "fraction": round(self.fraction, 3)}

    def close(self) -> None:
        """Stop the threads. Running requests are ended."""
        self._closing.set()
        if self.live:
            self.live.modes.close()
            self.live.feed.close()
            self.live.races.close()
            self.live.sandboxes.close_all()
            self.live.runner.shutdown(drain=False)
