"""A trace in the Chrome Trace Event Format, to be opened in Perfetto (https://ui.perfetto.dev).

    python -m visualizer.chrome_trace TRACE.jsonl -o trace.json

Tracks: a process "Engine" with the steps and, inside each, its stages, and the counters; a process
"Slots" with a thread for each slot, on which every stay of a request is a slice, and its prefill and
decode are slices inside it; a process "Queue" with one slice for each wait, which may overlap.
Transitions are instants where they happen. Times are whole microseconds since the trace began, so that
what lies inside something else in time also does so in numbers.

The format: "Trace Event Format", Google, 2016; of its event types X, i, C, b, e and M are used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.events import Event, LifecycleEvent, Replica, SlotUse, StepEvent
from engine.trace import Trace, TraceError, read_trace
from visualizer.breath import Breathe, hold
from visualizer.frames import dumps
from visualizer.letters import slot_letter
from visualizer.measures import Measures
from visualizer.tracks import Tracks

ENGINE, SLOTS, QUEUE = 1, 2, 3  # process ids
STEPS = 1  # the engine's thread id; a slot's is its number + 1
STAGES = ("schedule", "prepare", "forward", "sample", "postprocess")

Entry = dict[str, Any]


@dataclass
class _Stay:
    """A request in a slot, from its first step there to its last."""

    request_id: str
    start: int
    end: int
    phase: str
    phase_start: int
    tokens: int = 0  # of the phase
    chunks: int = 0  # steps of the phase


class _Exporter:
    def __init__(self, trace: Trace):
        self._trace = trace
        self._replica = Replica(trace.keyframe)
        self._tracks = Tracks()
        self._tracks.follow(self._replica)
        self._measures = Measures(trace.keyframe.info)
        first = trace.events[0] if trace.events else None
        spent = first.times.total if isinstance(first, StepEvent) else 0.0
        self._began = min(trace.keyframe.time, first.time - spent) if first else trace.keyframe.time
        self._stays: dict[int, _Stay] = {}
        self._queued: dict[str, int] = {}  # request id -> since when
        self._entries: list[Entry] = []
        self._now = 0
        self._step_end = 0

    def entries(self) -> Iterator[list[Entry]]:
        """All entries, in portions."""
        yield list(self._metadata())
        for view in self._replica.requests.values():
            if view.slot is None:
                self._queued[view.request_id] = 0
        for event in self._trace.events:
            self._event(event)
            yield self._drain()
        for slot in list(self._stays):
            self._leave(slot)
        for request_id in list(self._queued):
            self._wait_ends(request_id, self._now)
        yield self._drain()

    def _drain(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries

    def _event(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._step(event)
            self._replica.apply(event)
        else:
            slot = self._slot_of(event)
            self._replica.apply(event)
            self._tracks.transition(event, self._replica)
            self._transition(event, slot)
        self._now = max(self._now, self._micros(event.time))

    def _micros(self, time: float) -> int:
        return round(1e6 * (time - self._began))

    def _name(self, request_id: str) -> str:
        key = self._tracks.key(request_id)
        return f"request #{key}" if key else "a request"

    def _metadata(self) -> Iterator[Entry]:
        info = self._replica.info
        title = f"Engine: {info.model}, {info.dtype}, {info.device}"
        for order, (pid, name) in enumerate([(ENGINE, title), (SLOTS, "Slots"), (QUEUE, "Queue")]):
            yield _meta("process_name", pid, 0, {"name": name})
            yield _meta("process_sort_index", pid, 0, {"sort_index": order})
        yield _meta("thread_name", ENGINE, STEPS, {"name": "Steps"})
        for slot in range(info.max_num_seqs):
            yield _meta("thread_name", SLOTS, slot + 1, {"name": f"Slot {slot_letter(slot)}"})
            yield _meta("thread_sort_index", SLOTS, slot + 1, {"sort_index": slot})

    # -- steps --------------------------------------------------------------------------------

    def _step(self, event: StepEvent) -> None:
        end = self._micros(event.time)
        # The event is made a moment after the last stage; a stage cannot begin before the step before ended.
        start = max(self._step_end, end - round(1e6 * event.times.total))
        self._step_end = end
        args: dict[str, Any] = {
            "mode": event.mode,
            "tokens": sum(use.num_tokens for use in event.slots),
            "requests": len(event.slots),
            "waiting": event.num_waiting,
        }
        if event.wait_reason:
            args["wait reason"] = event.wait_reason
        self._slice(f"step {event.step}", "step", ENGINE, STEPS, start, end, args)
        self._stages(event, start, end)
        for use in event.slots:
            self._use(use, start, end)
        present = {use.slot for use in event.slots}
        for slot in [slot for slot in self._stays if slot not in present]:
            self._leave(slot)
        self._measures.step(event)
        self._tracks.step(event)
        self._counter("requests", end, {"running": event.num_running, "waiting": event.num_waiting})
        blocks = {"used": event.num_used, "cached": event.num_cached, "free": event.num_free}
        self._counter("KV blocks", end, blocks)
        self._counter("tokens per second", end, {event.mode: round(self._measures.rate(0.0), 1)})

    def _stages(self, event: StepEvent, start: int, end: int) -> None:
        """The stages one after the other, ending with the step's last; shortened evenly if need be."""
        total = event.times.total
        scale = min(1e6, (end - start) / total) if total > 0 else 0.0
        done, begin = 0.0, start
        for stage, seconds in zip(STAGES, event.times, strict=True):
            done += seconds
            until = min(end, start + round(scale * done))
            self._slice(stage, "stage", ENGINE, STEPS, begin, until, {})
            begin = until

    def _use(self, use: SlotUse, start: int, end: int) -> None:
        stay = self._stays.get(use.slot)
        if stay and stay.request_id != use.request_id:
            self._leave(use.slot)
            stay = None
        if stay is None:
            stay = self._stays[use.slot] = _Stay(use.request_id, start, end, use.phase, start)
        if use.phase != stay.phase and use.num_tokens:
            self._end_phase(use.slot, stay)
            stay.phase, stay.phase_start, stay.tokens, stay.chunks = use.phase, start, 0, 0
        stay.end = end
        stay.tokens += use.num_tokens
        stay.chunks += use.num_tokens > 0

    def _end_phase(self, slot: int, stay: _Stay) -> None:
        args = {"tokens": stay.tokens, "steps": stay.chunks}
        self._slice(stay.phase, stay.phase, SLOTS, slot + 1, stay.phase_start, stay.end, args)

    def _leave(self, slot: int) -> None:
        stay = self._stays.pop(slot)
        track = self._tracks.get(stay.request_id)
        args = {"prompt tokens": track.num_prompt, "output tokens": track.num_output} if track else {}
        self._slice(self._name(stay.request_id), "request", SLOTS, slot + 1, stay.start, stay.end, args)
        self._end_phase(slot, stay)

    # -- transitions --------------------------------------------------------------------------

    def _slot_of(self, event: LifecycleEvent) -> int | None:
        if event.slot is not None:
            return event.slot
        view = self._replica.requests.get(event.request_id)
        return view.slot if view else None

    def _transition(self, event: LifecycleEvent, slot: int | None) -> None:
        time = max(self._now, self._micros(event.time))
        if event.kind == "submitted" or event.kind == "preempted":
            self._queued.setdefault(event.request_id, time)
        elif event.kind in ("admitted", "injected", "resumed", "aborted", "finished"):
            self._wait_ends(event.request_id, time)
        if event.kind in ("preempted", "aborted") and slot in self._stays:
            self._leave(slot)
        if event.kind == "mode":
            self._instant(f"mode: {event.reason}", ENGINE, STEPS, time, "p", {})
            return
        args = {"request": self._name(event.request_id), "tokens": event.num_tokens}
        if event.reason:
            args["reason"] = event.reason
        if slot is not None:
            self._instant(event.kind, SLOTS, slot + 1, time, "t", args)
        else:
            self._instant(event.kind, QUEUE, 0, time, "p", args)

    def _wait_ends(self, request_id: str, end: int) -> None:
        start = self._queued.pop(request_id, None)
        if start is None:
            return
        key = self._tracks.key(request_id)
        common = {
            "cat": "queue",
            "name": self._name(request_id),
            "pid": QUEUE,
            "tid": 0,
            "id": f"{key}.{start}",
        }
        self._entries.append({"ph": "b", "ts": start, **common})
        self._entries.append({"ph": "e", "ts": end, **common})

    # -- entries ------------------------------------------------------------------------------

    def _slice(self, name: str, cat: str, pid: int, tid: int, start: int, end: int, args: dict) -> None:
        place = {"pid": pid, "tid": tid, "ts": start, "dur": end - start}
        self._entries.append({"ph": "X", "name": name, "cat": cat, **place, "args": args})

    def _instant(self, name: str, pid: int, tid: int, time: int, scope: str, args: dict) -> None:
        place = {"pid": pid, "tid": tid, "ts": time, "s": scope}
        self._entries.append({"ph": "i", "name": name, "cat": "transition", **place, "args": args})

    def _counter(self, name: str, time: int, values: dict) -> None:
        self._entries.append({"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": time, "args": values})


def _meta(name: str, pid: int, tid: int, args: dict) -> Entry:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def chrome_json(trace: Trace, breathe: Breathe = hold) -> str:
    """The trace as a JSON object of the Trace Event Format. See the module for what is in it."""
    entries: list[str] = []
    for portion in _Exporter(trace).entries():
        entries += map(dumps, portion)
        breathe()
    about = dumps({"made by": "Glass Engine", **trace.keyframe.info._asdict()})
    listed = ",\n".join(entries)
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{listed}\n]}}\n'


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Turn a trace into JSON that Perfetto and Chrome open.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="default: the trace's name with .chrome.json")
    args = parser.parse_args(argv)
    output = args.output or args.trace.with_suffix(".chrome.json")
    try:
        output.write_text(chrome_json(read_trace(args.trace)), encoding="utf-8")
    except (TraceError, OSError) as error:
        parser.exit(1, f"{args.trace}: {error}\n")
    print(f"{output}: open it at https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
