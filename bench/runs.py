"""Run the work: on an engine in one of its modes, and on `transformers`, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.measures import Arm, InvalidRun, measure_usage
from bench.workload import WorkItem, num_output_tokens
from engine import ContinuousEngine, SamplingParams
from engine.events import Event, EventBus, Mode

WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8
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
    _drive(engine, f"{mode}-warm-up", warm_up, clock, lambda count: None)
    set_up_seconds = clock.now() - started
    seconds, token_times, events = _drive(engine, mode, work, clock, progress)
    usage = measure_usage(events, engine.info)
    return Arm(mode, engine.info.dtype, work, seconds, token_times, set_up_seconds, usage)


def check_fits(engine: ContinuousEngine, work: Sequence[WorkItem]) -> None:
    """Raises InvalidRun if a request is too long for the engine, which would cut it short."""
    longest = max(len(item.prompt) + item.num_output for item in work)
    if longest > engine.info.context_limit:
        raise InvalidRun(
            f"the longest request has {longest} tokens, but the context limit is "
            f"{engine.info.context_limit}: raise --max-model-len or --num-blocks"
        )


def _drive(
    engine: ContinuousEngine, name: str, work: Sequence[WorkItem], clock: Clock, progress: Progress
) -> tuple[float, list[list[float]], list[Event]]:
    """Submit each request when it is due and step until all are done.

    Times count from when a request was due, not from when the busy engine got to see it. A token is
    there when `step` returns it as a Python number, which on a GPU is after its device has finished.
    """
    token_times: list[list[float]] = [[] for _ in work]
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
        deltas = engine.step()
        now = clock.now() - start
        for delta in deltas:
            index = int(delta.request_id.rpartition("-")[2])
            token_times[index] += [now - work[index].due] * len(delta.outputs[0].token_ids)
            if delta.finished and (reason := delta.outputs[0].finish_reason) != "length":
                raise InvalidRun(
                    f"{name}: request {index} ended with {reason!r}: {delta.error or 'no error given'}"
                )
        progress(sum(len(delta.outputs[0].token_ids) for delta in deltas))
        log.read_if_many()
    seconds = clock.now() - start
    log.read()
    return seconds, token_times, log.events


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


def run_transformers(
    model_path: Path,
    dtype: str,
    device: str,
    work: Sequence[WorkItem],
    clock: Clock = REAL_CLOCK,
    progress: Progress = lambda count: None,
) -> Arm:
    """`transformers` `generate` on the same weights, one request after the other, with its KV cache on."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the benchmark has one of its own
    started = clock.now()
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    model.to(device).eval()

    class Stopwatch(BaseStreamer):
        """Notes when each token comes. Its first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(clock.now())

        def end(self) -> None:
            pass

    def generate(item: WorkItem) -> list[float]:
        prompt = torch.tensor([item.prompt], device=device)
        stopwatch = Stopwatch()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            use_cache=True,
            min_new_tokens=item.num_output,
            max_new_tokens=item.num_output,
            pad_token_id=0,
            streamer=stopwatch,
        )
        num_new = output.shape[1] - prompt.shape[1]
        if num_new != item.num_output:
            raise InvalidRun(f"transformers: {num_new} of {item.num_output} tokens were generated")
        return stopwatch.times[1:]

    generate(work[0]._replace(num_output=WARM_UP_TOKENS))
    set_up_seconds = clock.now() - started
    token_times = []
    start = clock.now()
    for item in work:
        clock.sleep(max(0.0, item.due - (clock.now() - start)))
        token_times.append([at - start - item.due for at in generate(item)])
        progress(item.num_output)
    seconds = clock.now() - start
    return Arm("transformers", dtype, work, seconds, token_times, set_up_seconds)


def describe_work(work: Sequence[WorkItem]) -> str:
    """The work in one line."""
    arrival = f"arriving over {work[-1].due:.1f} s" if work[-1].due else "all at once"
    num_prompt = sum(len(item.prompt) for item in work)
    return (
        f"{len(work)} requests {arrival}: {num_prompt} prompt tokens, {num_output_tokens(work)} output tokens"
    )
