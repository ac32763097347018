"""Run the work on the engine, in one of its modes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.measures import Arm, InvalidRun, Terms, measure_usage
from bench.workload import WARM_UP_REQUESTS, WARM_UP_TOKENS, WorkItem, num_prompt_tokens
from engine import ContinuousEngine, SamplingParams
from engine.events import Event, EventBus, Mode

READ_EVENTS_EVERY = 1024  # well before the bus's ring drops the oldest

Progress = Callable[[int], object]  # told how many output tokens just came


class Clock:
    """Seconds, and waiting. Tests bring one of their own."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


REAL_CLOCK = Clock()


def run_mode(
    engine: ContinuousEngine,
    mode: Mode,
    work: Sequence[WorkItem],
    clock: Clock = REAL_CLOCK,
    progress: Progress = lambda count: None,
) -> Arm:
    """Warm up, then run the work in a mode and measure it. Raises InvalidRun if any of it goes wrong."""
    check_fits(engine, work)
    engine.set_mode(mode)
    started = clock.now()
    warm_up = [item._replace(num_output=WARM_UP_TOKENS, due=0.0) for item in work[:WARM_UP_REQUESTS]]
    drive(engine, f"{mode}-warm-up", warm_up, clock, lambda count: None)
    warm_up_seconds = clock.now() - started
    run = drive(engine, mode, work, clock, progress)
    return Arm(
        name=mode,
        terms=engine_terms(engine),
        work=work,
        seconds=run.seconds,
        token_times=run.token_times,
        num_prompt=num_prompt_tokens(work),
        warm_up_seconds=warm_up_seconds,
        usage=measure_usage(run.events, engine.info, run.step_seconds),
        software=f"torch {torch.__version__}",
        slots=engine.info.max_num_seqs,
    )


def engine_terms(engine: ContinuousEngine) -> Terms:
    return Terms(engine.info.dtype, engine.weights, torch.get_num_threads())


def check_fits(engine: ContinuousEngine, work: Sequence[WorkItem]) -> None:
    """Raises InvalidRun if a request is too long for the engine, which would cut it short."""
    longest = max(len(item.prompt) + item.num_output for item in work)
    if longest > engine.info.context_limit:
        raise InvalidRun(
            f"the longest request has {longest} tokens, but the context limit is "
            f"{engine.info.context_limit}: raise --max-model-len or --num-blocks"
        )


@dataclass(slots=True)
class Run:
    """What came of a drive. step_seconds: inside `step`, publishing its events included."""

    token_times: list[list[float]]
    seconds: float = 0.0
    step_seconds: float = 0.0
    events: list[Event] = field(default_factory=list)


def drive(
    engine: ContinuousEngine, name: str, work: Sequence[WorkItem], clock: Clock, progress: Progress
) -> Run:
    """Submit each request when it is due and step until all are done.

    Times count from when a request was due, not from when the busy engine got to see it. A token is
    there when `step` returns it as a Python number, which on a GPU is after its device has finished.
    """
    run = Run([[] for _ in work])
    log = EventLog(engine.events)
    num_submitted = 0
    start = clock.now()
    while num_submitted < len(work) or engine.has_unfinished():
        while num_submitted < len(work) and work[num_submitted].due <= clock.now() - start:
            item = work[num_submitted]
            params = SamplingParams(temperature=0.0, max_tokens=item.num_output, ignore_eos=True)
            engine.add_request(f"{name}-{num_submitted}", item.prompt, params)
            num_submitted += 1
            log.read_if_many()
        if not engine.has_unfinished():
            clock.sleep(max(0.0, work[num_submitted].due - (clock.now() - start)))
            continue
        before = clock.now()
        deltas = engine.step()
        now = clock.now() - start
        run.step_seconds += start + now - before
        for delta in deltas:
            index = int(delta.request_id.rpartition("-")[2])
            run.token_times[index] += [now - work[index].due] * len(delta.outputs[0].token_ids)
            if delta.finished and (reason := delta.outputs[0].finish_reason) != "length":
                raise InvalidRun(
                    f"{name}: request {index} ended with {reason!r}: {delta.error or 'no error given'}"
                )
        progress(sum(len(delta.outputs[0].token_ids) for delta in deltas))
        log.read_if_many()
    run.seconds = clock.now() - start
    log.read()
    run.events = log.events
    return run


class EventLog:
    """Every event from now on. Read in large pieces, and added up only after the run."""

    def __init__(self, bus: EventBus):
        self.events: list[Event] = []
        self._bus = bus
        self._cursor = bus.next_seq

    def read_if_many(self) -> None:
        if self._bus.next_seq - self._cursor >= READ_EVENTS_EVERY:
            self.read()

    def read(self) -> None:
        reading = self._bus.read(self._cursor)
        if reading.keyframe:
            raise InvalidRun("the event bus lost events before they were read")
        self.events += reading.events
        self._cursor = reading.cursor
