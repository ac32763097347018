"""What figures are made from: a trace, however it is given."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from engine.events import Event, Keyframe, LifecycleEvent, Replica, StepEvent
from engine.trace import Trace, read_trace
from visualizer.frames import is_written
from visualizer.tracks import Tracks

# A path; a trace; a keyframe and the events since (as `EventBus.recording` returns them).
Source = str | os.PathLike | Trace | tuple[Keyframe, Iterable[Event]]


def load(source: Source) -> Trace:
    """The trace. Raises TraceError or OSError if a file cannot be read."""
    if isinstance(source, str | os.PathLike):
        return read_trace(Path(source))
    keyframe, events = source
    return Trace(keyframe, list(events))


def steps_of(trace: Trace) -> list[StepEvent]:
    return [event for event in trace.events if isinstance(event, StepEvent)]


def transitions_of(trace: Trace) -> list[LifecycleEvent]:
    return [event for event in trace.events if isinstance(event, LifecycleEvent)]


def keys_of(trace: Trace) -> dict[str, int]:
    """Public numbers of the requests, in order of arrival, as the page gives them."""
    keys: dict[str, int] = {}
    for view in trace.keyframe.requests:
        keys.setdefault(view.request_id, len(keys) + 1)
    for event in transitions_of(trace):
        if event.kind == "submitted":
            keys.setdefault(event.request_id, len(keys) + 1)
    return keys


def state_after(trace: Trace, step: int | None) -> tuple[Replica, Tracks, set[int]]:
    """The engine just after a step (None: at the end), and the blocks that got tokens in that step.

    Raises ValueError if the trace does not contain the step.
    """
    replica, tracks = Replica(trace.keyframe), Tracks()
    tracks.follow(replica)
    written: set[int] = set()
    hits: dict[str, int] = {}
    for event in trace.events:
        new = {
            delta.block
            for delta in event.blocks
            if is_written(replica.blocks[delta.block], delta, hits, replica.info.block_size)
        }
        replica.apply(event)
        if isinstance(event, LifecycleEvent):
            tracks.transition(event, replica)
            if event.kind == "prefix_hit":
                hits[event.request_id] = event.num_tokens
            continue
        written, hits = new, {}
        if event.step == step:
            return replica, tracks, written
    if step is not None:
        steps = [event.step for event in steps_of(trace)]
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise ValueError(f"step {step} is not in this trace: {known}")
    return replica, tracks, written
