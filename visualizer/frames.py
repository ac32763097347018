"""Frames: what a viewer is told. One frame is one *moment*: the engine after one more step.

Live feed, recorded trace, race and sandbox all speak in the same frames, so the page's panels draw
all of them, and a player can go through a sequence of frames one step at a time. A frame is JSON:

    n       its number, growing by one
    t       seconds since the feed or the trace began
    steps   [[step, mode, waiting, wait reason, [ms by stage], cells, t], ...]; one, unless steps came too
            fast (see `moments`), none if something happened between two steps.
            cells: flat [slot, key, tokens, ...]; tokens are negative in prefill, 0 if held without budget
    marks   [[step, slot, kind, key], ...]; kinds as in `MARKED`
    blocks  [[block, state, [owner keys], index in their tables, reference count, filled, written], ...]:
            the blocks that changed; written is 1 if tokens were written in this moment
    slots   [[slot, key, prompt, computed, total, preemptions, cached], ...]: who sits where now
    bins    [[busy seconds, tokens a second, mode], ...]: new points of the throughput curve
    strip   the numbers of the metric strip (`Measures.numbers`, and `Framer.strip` here)

A *keyframe* has `info` (the engine's, see `EngineInfo`) too and starts from nothing: its blocks are all
that are not free, its steps, marks and bins those of the last minutes. Keys are public numbers of
requests, in order of arrival. No frame carries a word of text.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from engine.events import BlockDelta, Event, Keyframe, LifecycleEvent, Replica, StepEvent
from engine.trace import Trace, TraceError
from visualizer.breath import Breathe, hold
from visualizer.measures import Measures
from visualizer.tracks import Tracks

WINDOW_STEPS = 300  # steps of the timeline that a keyframe brings
MARKED = ("injected", "preempted", "resumed", "prefix_hit", "finished", "aborted")
REST = 0.25  # seconds without an event after which what happens next is a moment of its own


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def moments(events: list[Event], most: int | None = None) -> Iterator[list[Event]]:
    """Cut events into moments, each ending with a step, or where nothing happened for a while.

    most: join neighbouring moments evenly so that there are no more than so many.
    """
    cuts = [0]
    for place, event in enumerate(events, 1):
        rests = place < len(events) and events[place].time - event.time > REST
        if isinstance(event, StepEvent) or rests or place == len(events):
            cuts.append(place)
    stride = -(-(len(cuts) - 1) // most) if most else 1
    kept = cuts[::stride] if stride > 1 else cuts
    if kept[-1] != cuts[-1]:
        kept = [*kept, cuts[-1]]
    for start, end in itertools.pairwise(kept):
        yield events[start:end]


def is_written(before: BlockDelta, delta: BlockDelta, hits: dict[str, int], block_size: int) -> bool:
    """Whether a block got new tokens, given its state before and who found how many tokens in the cache."""
    if delta.state != "used":
        return False
    if not set(before.owners).isdisjoint(delta.owners):
        return delta.filled > before.filled
    end = (delta.table_index + 1) * block_size
    return all(hits.get(owner, 0) < end for owner in delta.owners)


class Framer:
    """Turns events into frames. It holds the visible state, and the records and totals behind it."""

    def __init__(self, keyframe: Keyframe):
        self.replica = Replica(keyframe)
        self.tracks = Tracks()
        self.measures = Measures(keyframe.info)
        self.wait_reason = ""
        self._number = 0
        self._began = keyframe.time
        self._steps: deque[str] = deque(maxlen=WINDOW_STEPS)
        self._marks: deque[list] = deque(maxlen=4 * WINDOW_STEPS)
        self._states: Counter[str] = Counter()
        self._empty = 0  # places for tokens in owned blocks that hold none
        self._running: dict[str, int] = {}  # request id -> slot
        self._num_finished = 0
        self.restart(keyframe)

    @property
    def number(self) -> int:
        """Of the newest frame; 0 before the first."""
        return self._number

    def restart(self, keyframe: Keyframe) -> None:
        """Go on from another keyframe, as after a gap. Frames so far do not lead on to those that come."""
        self.replica = Replica(keyframe)
        self.tracks.follow(self.replica)
        self._number += 1
        self._steps.clear()
        self._marks.clear()
        self._states = Counter(block.state for block in keyframe.blocks)
        self._empty = sum(self._empty_in(block) for block in keyframe.blocks)
        self._running = {view.request_id: view.slot for view in keyframe.requests if view.slot is not None}

    def _empty_in(self, block: BlockDelta) -> int:
        return self.replica.info.block_size - block.filled if block.owners else 0

    def advance(self, moment: list[Event], strip: str | None = None) -> str:
        """Apply a moment's events; the frame that says what changed."""
        steps: list[str] = []
        marks: list[list] = []
        written: dict[int, bool] = {}
        hits: dict[str, int] = {}
        bins_before = self.measures.num_bins
        for event in moment:
            for delta in event.blocks:
                self._note_block(delta, written, hits)
            # A request that is preempted has lost its slot once the event is applied.
            slot = self._running.get(event.request_id) if isinstance(event, LifecycleEvent) else None
            self.replica.apply(event)
            if isinstance(event, StepEvent):
                self.measures.step(event)
                self.measures.gaps(event.mode, self.tracks.step(event))
                self.wait_reason = event.wait_reason
                steps.append(self._column(event))
            else:
                if event.kind == "prefix_hit":
                    hits[event.request_id] = event.num_tokens
                self._transition(event, event.slot if slot is None else slot, marks)
        self._steps.extend(steps)
        self._marks.extend(marks)
        self._number += 1
        num_bins = self.measures.num_bins - bins_before
        bins = list(self.measures.bins)[-num_bins:] if num_bins else []
        blocks = [self._block(self.replica.blocks[b], new) for b, new in sorted(written.items())]
        return self._body(steps, marks, blocks, bins, strip or dumps(self.strip()))

    def _note_block(self, delta: BlockDelta, written: dict[int, bool], hits: dict[str, int]) -> None:
        before = self.replica.blocks[delta.block]
        new = is_written(before, delta, hits, self.replica.info.block_size)
        written[delta.block] = written.get(delta.block, False) or new
        self._states[before.state] -= 1
        self._states[delta.state] += 1
        self._empty += self._empty_in(delta) - self._empty_in(before)

    def _transition(self, event: LifecycleEvent, slot: int | None, marks: list[list]) -> None:
        self.tracks.transition(event, self.replica)
        if event.kind in ("admitted", "injected", "resumed") and event.slot is not None:
            self._running[event.request_id] = event.slot
        elif event.kind in ("preempted", "finished", "aborted"):
            self._running.pop(event.request_id, None)
            self._num_finished += event.kind == "finished"
        if event.kind == "first_token" and (track := self.tracks.get(event.request_id)):
            self.measures.first_token(self.replica.mode, track.ttft or 0.0)
        if event.kind in MARKED and event.reason != "mode" and slot is not None:
            marks.append([event.step, slot, event.kind, self.tracks.key(event.request_id)])

    # -- what a frame holds -------------------------------------------------------------------

    def keyframe(self, strip: str | None = None) -> str:
        """The whole picture as a frame: what a delta holds, for all blocks and the whole window."""
        blocks = [self._block(b, False) for b in self.replica.blocks if b.state != "free"]
        marks, bins = list(self._marks), list(self.measures.bins)
        body = self._body(list(self._steps), marks, blocks, bins, strip or dumps(self.strip()))
        return f'{{"info":{dumps(self.replica.info._asdict())},{body[1:]}'

    def _body(self, steps: list[str], marks: list, blocks: list, bins: list, strip: str) -> str:
        return (
            f'{{"n":{self._number},"t":{self._since_began(self.replica.time)},"steps":[{",".join(steps)}],'
            f'"marks":{dumps(marks)},"blocks":{dumps(blocks)},"slots":{dumps(self._slots())},'
            f'"bins":{dumps(bins)},"strip":{strip}}}'
        )

    def _since_began(self, time: float) -> float:
        return round(time - self._began, 4)

    def _column(self, event: StepEvent) -> str:
        """One column of the timeline: who sat where, how much each computed, who waited, and the time."""
        cells: list[int] = []
        for use in event.slots:
            tokens = -use.num_tokens if use.phase == "prefill" else use.num_tokens
            cells += (use.slot, self.tracks.key(use.request_id), tokens)
        times = [round(1000 * seconds, 2) for seconds in event.times]
        ended = self._since_began(event.time)
        return dumps([event.step, event.mode, event.num_waiting, event.wait_reason, times, cells, ended])

    def _block(self, delta: BlockDelta, written: bool) -> list:
        owners = [self.tracks.key(owner) for owner in delta.owners]
        counts = (delta.table_index, delta.ref_count, delta.filled)
        return [delta.block, delta.state, owners, *counts, int(written)]

    def _slots(self) -> list[list]:
        rows = []
        for request_id, slot in self._running.items():
            view, track = self.replica.requests[request_id], self.tracks.get(request_id)
            if track is not None:
                lengths = (view.num_prompt, view.num_computed, view.num_total)
                rows.append([slot, track.key, *lengths, track.preemptions, track.cached])
        return rows

    def strip(self, quiet: float = 0.0) -> dict[str, Any]:
        """The numbers of the metric strip. `quiet`: seconds since the last event was seen."""
        replica, states = self.replica, self._states
        waiting = len(replica.requests) - len(self._running)
        return {
            **self.measures.numbers(replica.mode, quiet),
            "running": len(self._running),
            "waiting": waiting,
            "reason": self.wait_reason if waiting else "",
            "held": states["used"] + states["reserved"],
            "cached": states["cached"],
            "free": states["free"],
            "finished": self._num_finished,
            "empty_tokens": self._empty,
        }


def trace_frames(trace: Trace, most_chars: int | None = None, breathe: Breathe = hold) -> list[str]:
    """A trace as frames: the keyframe it starts from, then every moment.

    most_chars: raises TraceError once the frames have more.
    """
    framer = Framer(trace.keyframe)
    frames = [framer.keyframe()]
    size = len(frames[0])
    for moment in moments(trace.events):
        frames.append(framer.advance(moment))
        size += len(frames[-1])
        if most_chars is not None and size > most_chars:
            raise TraceError(f"too long to be shown here: its pictures take more than {most_chars:,} bytes")
        breathe()
    return frames
