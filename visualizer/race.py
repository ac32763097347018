"""The race: the same requests, served in two modes, and how long each took.

The requests are drawn from a seed: lengths of prompts and answers, and when each arrives. Prompts are
random token ids, so there is no text, and a result may be shown to everybody. The answers' lengths are
fixed beforehand, so that both arms do the same work; if they did not, no speed-up is given.

**Each alone.** The arms run one after the other, on an engine of their own with the live engine's
weights. The live engine goes on meanwhile; the two take turns, step by step (`engine.turns`). An arm's
clock counts only its own steps and stands still while others have theirs: a race shows what it would
on a machine of its own, and takes longer in real time if there is traffic. While an arm has nothing to
do, its clock jumps to the next arrival.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine import ContinuousEngine, SamplingParams, Turns
from engine.events import Event, Mode
from engine.trace import Trace
from visualizer.siblings import Siblings
from visualizer.summary import difference, summarise

SIZES = (8, 16, 32)
SEED = 2026
POOL_TOKENS, SLOTS, MODEL_LEN = 2048, 16, 512  # of an arm's engine, at most
MOST_SECONDS = 300.0  # on an arm's clock

_PROMPTS = (12, 20, 32, 48, 80, 120)
_ANSWERS = (8, 12, 20, 28, 40, 48, 64, 72)
_SHARED = 48  # tokens that every third prompt begins with
_FIRST_WAVE = 0.5  # the part of the requests that is there from the start
_GAP = 2.0  # beats between later arrivals, on average
_NUM_IDS = 250  # token ids to draw from: there is no tokenizer with fewer


class RaceError(RuntimeError):
    """A race that did not come to its end. The message says why."""


@dataclass(frozen=True)
class RaceRequest:
    """One request. arrival: in beats; a beat is what a step with one request takes on this machine."""

    request_id: str
    arrival: float
    prompt: tuple[int, ...]
    num_output: int


@dataclass(frozen=True)
class Arm:
    """One mode's run. Its trace's times are on the arm's own clock, from 0."""

    mode: Mode
    trace: Trace
    summary: dict[str, Any]


@dataclass(frozen=True)
class Race:
    """Both arms. refused: why there is no speed-up; empty if there is one."""

    size: int
    seed: int
    beat: float  # seconds
    requests: tuple[RaceRequest, ...]
    arms: tuple[Arm, Arm]
    refused: str

    @property
    def speedup(self) -> float | None:
        """How many times longer the slower arm took."""
        seconds = [arm.summary["seconds"] for arm in self.arms]
        return None if self.refused or min(seconds) <= 0 else max(seconds) / min(seconds)

    @property
    def winner(self) -> Mode | None:
        if self.speedup is None:
            return None
        return min(self.arms, key=lambda arm: arm.summary["seconds"]).mode


def race_requests(size: int, context_limit: int, seed: int = SEED) -> tuple[RaceRequest, ...]:
    """The requests of a race, the same for the same arguments. context_limit: tokens of a request."""
    rng = random.Random(seed)
    longest = max(1, context_limit // 2)
    shared = [rng.randrange(_NUM_IDS) for _ in range(_SHARED)]
    requests, arrival = [], 0.0
    for number in range(size):
        if number >= size * _FIRST_WAVE:
            arrival += rng.expovariate(1 / _GAP)
        prompt = [rng.randrange(_NUM_IDS) for _ in range(rng.choice(_PROMPTS))]
        if number % 3 == 2:
            prompt = shared + prompt
        num_output = min(rng.choice(_ANSWERS), longest)
        requests.append(RaceRequest(f"q{number}", arrival, tuple(prompt[:longest]), num_output))
    return tuple(requests)


# (which arm runs, output tokens so far, of so many in both arms); may raise, to end the race
Progress = Callable[[int, int, int], None]


def run_race(
    siblings: Siblings,
    modes: tuple[Mode, Mode],
    size: int,
    seed: int = SEED,
    progress: Progress = lambda arm, done, total: None,
) -> Race:
    """Run both arms. Raises RaceError if one takes too long, and whatever `progress` raises."""

    def make(mode: Mode) -> ContinuousEngine:
        return siblings.make(mode, POOL_TOKENS, SLOTS, MODEL_LEN)

    engine = make(modes[0])
    requests = race_requests(size, engine.info.context_limit, seed)
    beat = _warm_up(engine, siblings.turns)
    tokens = sum(request.num_output for request in requests)

    def first_progress(done: int) -> None:
        progress(0, done, 2 * tokens)

    def second_progress(done: int) -> None:
        progress(1, tokens + done, 2 * tokens)

    first = _run_arm(engine, requests, beat, siblings.turns, first_progress)
    del engine  # and its KV cache, before there is another
    engine = make(modes[1])
    _warm_up(engine, siblings.turns)
    second = _run_arm(engine, requests, beat, siblings.turns, second_progress)
    return Race(size, seed, beat, requests, (first, second), difference(first.trace, second.trace))


def _warm_up(engine: ContinuousEngine, turns: Turns) -> float:
    """Take the first steps, which are slow, before the clock starts; what a step takes, in seconds.

    The prompt is shorter than a block, so that nothing of it stays in the prefix cache.
    """
    params = SamplingParams(
        max_tokens=min(8, engine.info.context_limit - 1), temperature=0.0, ignore_eos=True
    )
    engine.add_request("warm-up", [1], params)
    seconds = []
    while engine.has_unfinished():
        with turns:
            start = time.monotonic()
            engine.step()
            seconds.append(time.monotonic() - start)
    return statistics.median(seconds)


class _Clock:
    """Rewrites the times of an engine's events to the arm's own clock."""

    def __init__(self, engine: ContinuousEngine):
        self._bus = engine.events
        keyframe, _, self._cursor = self._bus.read()
        assert keyframe is not None  # whoever has no cursor gets one
        self.now = 0.0
        self.keyframe = replace(keyframe, time=0.0)
        self.events: list[Event] = []

    def take(self, started: float | None = None) -> None:
        """Take what the engine told: in a step that started then, or else now."""
        _, events, self._cursor = self._bus.read(self._cursor)
        for event in events:
            ran = 0.0 if started is None else event.time - started
            self.events.append(replace(event, time=self.now + ran))


def _run_arm(
    engine: ContinuousEngine,
    requests: tuple[RaceRequest, ...],
    beat: float,
    turns: Turns,
    progress: Callable[[int], None],
) -> Arm:
    clock = _Clock(engine)
    pending = list(requests)
    num_tokens = 0
    while pending or engine.has_unfinished():
        if not engine.has_unfinished():
            clock.now = max(clock.now, pending[0].arrival * beat)
        while pending and pending[0].arrival * beat <= clock.now:
            request = pending.pop(0)
            params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
            engine.add_request(request.request_id, list(request.prompt), params)
        clock.take()
        with turns:
            started = time.monotonic()
            outputs = engine.step()
            ended = time.monotonic()
        clock.take(started)
        clock.now += ended - started
        num_tokens += sum(len(delta.outputs[0].token_ids) for delta in outputs)
        progress(num_tokens)
        if clock.now > MOST_SECONDS:
            raise RaceError(f"the {engine.mode} arm took more than {MOST_SECONDS:.0f} seconds")
    trace = Trace(clock.keyframe, clock.events)
    arrivals = {request.request_id: request.arrival * beat for request in requests}
    return Arm(engine.mode, trace, summarise(trace, arrivals))
