"""The feed: one reader of the engine's events for all the viewers of the page.

A thread drains the event bus about seven times a second and turns what happened into one *frame*,
serialised once, whoever is watching. A viewer polls with the number of the last frame it has and
gets the frames since. If it is new, or fell behind, it gets a keyframe: a frame that, applied to
nothing, gives the whole picture, with the timeline and the throughput curve of the last minutes.

Frames say what the engine holds, in ids, numbers and lengths. They never carry a word of text.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from engine.events import BlockDelta, Event, EventBus, LifecycleEvent, Replica, StepEvent
from visualizer.measures import Measures
from visualizer.tracks import Tracks

PERIOD = 0.15  # seconds between two frames
WINDOW_STEPS = 300  # steps of the timeline that a late joiner sees
KEPT_FRAMES = 120  # deltas kept for viewers that poll slowly (18 s)
MARKED = ("injected", "preempted", "resumed")  # transitions that the timeline marks


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class Frame(NamedTuple):
    number: int
    json: str


class RequestState(NamedTuple):
    """What the events say about one request now. For the card of the visitor who owns it."""

    key: int | None
    state: str  # "waiting" | "prefill" | "decode" | "finished"
    slot: int | None
    place: int  # in the waiting queue, from 1; 0 when it has a slot
    num_prompt: int
    num_computed: int
    num_total: int
    num_output: int
    rate: float | None  # output tokens per second since its first token
    ttft: float | None
    cached: int
    preemptions: int
    start_step: int | None
    injected: bool


class Feed:
    """Frames for viewers and states for cards. `tick` advances it; `start` ticks from a thread."""

    def __init__(self, bus: EventBus):
        self._bus = bus
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # A cursor is "<epoch>.<frame>": after a restart of the server old cursors get a keyframe.
        self.epoch = secrets.token_hex(4)
        self._frames: deque[Frame] = deque(maxlen=KEPT_FRAMES)
        self._number = 0
        self._keyframe = Frame(-1, "")
        self._steps: deque[str] = deque(maxlen=WINDOW_STEPS)
        self._marks: deque[list] = deque(maxlen=4 * WINDOW_STEPS)
        self._measures = Measures(bus.info)
        self._tracks = Tracks()
        self._cursor: int | None = None
        self._replica = Replica.empty(bus.info, "continuous", 0.0)
        self._event_seen = time.monotonic()
        self._strip = ""
        self._places: dict[str, int] = {}
        self._wait_reason = ""
        self.tick()

    # -- ticking ------------------------------------------------------------------------------

    def start(self) -> Feed:
        self._thread = threading.Thread(target=self._run, name="glass-feed", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(PERIOD):
            self.tick()

    def tick(self) -> None:
        """Read what happened since the last tick and make a frame of it, if anything did."""
        with self._lock:
            keyframe, events, self._cursor = self._bus.read(self._cursor)
            if keyframe is not None:
                self._restart(Replica(keyframe))
            if events:
                self._event_seen = time.monotonic()
            self._advance(events)

    def _restart(self, replica: Replica) -> None:
        """Start from a keyframe: at first, or because the ring ran over. Old cursors become invalid."""
        self._replica = replica
        self._tracks.follow(replica)
        self._number += 1
        self._frames.clear()
        self._steps.clear()
        self._marks.clear()

    def _advance(self, events: list[Event]) -> None:
        steps: list[str] = []
        marks: list[list] = []
        written: dict[int, bool] = {}
        bins_before = self._measures.num_bins
        for event in events:
            for delta in event.blocks:
                before = self._replica.blocks[delta.block]
                written[delta.block] = written.get(delta.block, False) or (
                    delta.state == "used" and delta.filled > (before.filled if before.owners else 0)
                )
            slot = self._slot_before(event)
            self._replica.apply(event)
            if isinstance(event, StepEvent):
                self._measures.step(event)
                self._tracks.step(event)
                self._wait_reason = event.wait_reason
                steps.append(self._column(event))
            else:
                self._tracks.transition(event, self._replica)
                if event.kind == "first_token" and (track := self._tracks.get(event.request_id)):
                    self._measures.first_token(self._replica.mode, track.ttft or 0.0)
                if event.kind in MARKED and event.reason != "mode" and slot is not None:
                    marks.append([event.step, slot, event.kind, self._tracks.key(event.request_id)])
        self._places = {
            view.request_id: place
            for place, view in enumerate((v for v in self._replica.requests.values() if v.slot is None), 1)
        }
        self._steps.extend(steps)
        self._marks.extend(marks)
        strip = dumps(self._strip_now())
        if not events and strip == self._strip:
            return
        self._strip = strip
        self._number += 1
        new_bins = self._measures.num_bins - bins_before
        blocks = [self._block(self._replica.blocks[b], new) for b, new in sorted(written.items())]
        body = self._body(steps, marks, blocks, list(self._measures.bins)[-new_bins:] if new_bins else [])
        self._frames.append(Frame(self._number, body))

    def _slot_before(self, event: Event) -> int | None:
        """The slot that a transition is about: a preempted request has lost it once it is applied."""
        if not isinstance(event, LifecycleEvent):
            return None
        if event.slot is not None:
            return event.slot
        view = self._replica.requests.get(event.request_id)
        return view.slot if view else None

    # -- what a frame holds -------------------------------------------------------------------

    def _body(self, steps: list[str], marks: list, blocks: list, bins: list) -> str:
        return (
            f'{{"n":{self._number},"steps":[{",".join(steps)}],"marks":{dumps(marks)},'
            f'"blocks":{dumps(blocks)},"slots":{dumps(self._slots())},"bins":{dumps(bins)},'
            f'"strip":{self._strip}}}'
        )

    def _column(self, event: StepEvent) -> str:
        """One column of the timeline: who sat where, how much each computed, who waited, and the time.

        A cell is three numbers in a flat list: slot, key, and tokens computed, negative in prefill.
        A slot that got no budget in this step has 0 tokens.
        """
        cells: list[int] = []
        for use in event.slots:
            tokens = -use.num_tokens if use.phase == "prefill" else use.num_tokens
            cells += (use.slot, self._tracks.key(use.request_id), tokens)
        times = [round(1000 * seconds, 2) for seconds in event.times]
        return dumps([event.step, event.mode, event.num_waiting, event.wait_reason, times, cells])

    def _block(self, delta: BlockDelta, written: bool) -> list:
        owners = [self._tracks.key(owner) for owner in delta.owners]
        counts = (delta.table_index, delta.ref_count, delta.filled)
        return [delta.block, delta.state, owners, *counts, int(written)]

    def _slots(self) -> list[list]:
        """Who sits where now: slot, key, tokens of prompt, computed, total, preemptions, cached."""
        rows = []
        for view in self._replica.requests.values():
            track = self._tracks.get(view.request_id)
            if view.slot is None or track is None:
                continue
            lengths = (view.num_prompt, view.num_computed, view.num_total)
            rows.append([view.slot, track.key, *lengths, track.preemptions, track.cached])
        return rows

    def _strip_now(self) -> dict[str, Any]:
        replica = self._replica
        quiet = time.monotonic() - self._event_seen
        states = [block.state for block in replica.blocks]
        size = replica.info.block_size
        empty = sum(size - block.filled for block in replica.blocks if block.owners)
        return {
            **self._measures.numbers(replica.mode, quiet),
            "running": len(replica.requests) - len(self._places),
            "waiting": len(self._places),
            "reason": self._wait_reason if self._places else "",
            "held": states.count("used") + states.count("reserved"),
            "cached": states.count("cached"),
            "free": states.count("free"),
            "empty_tokens": empty,
        }

    def _full_frame(self) -> str:
        """The whole picture as a frame: what a delta holds, for all blocks and the whole window."""
        if self._keyframe.number != self._number:
            blocks = [self._block(b, False) for b in self._replica.blocks if b.state != "free"]
            body = self._body(list(self._steps), list(self._marks), blocks, list(self._measures.bins))
            info = dumps(self._replica.info._asdict())
            self._keyframe = Frame(self._number, f'{{"info":{info},{body[1:]}')
        return self._keyframe.json

    # -- what viewers ask ---------------------------------------------------------------------

    def read(self, cursor: str | None) -> str:
        """JSON members (no braces) of an answer to a poll: the new cursor and the frames since."""
        with self._lock:
            have = self._have(cursor)
            if have is None:
                frames = [self._full_frame()]
            else:
                frames = [frame.json for frame in self._frames if frame.number > have]
            return f'"cursor":"{self.epoch}.{self._number}","frames":[{",".join(frames)}]'

    def _have(self, cursor: str | None) -> int | None:
        """The frame number in a cursor if the frames kept lead on from it, else None."""
        epoch, _, number = (cursor or "").partition(".")
        if epoch != self.epoch or not number.isascii() or not number.isdigit() or len(number) > 15:
            return None
        have = int(number)
        oldest = self._frames[0].number - 1 if self._frames else self._number
        return have if oldest <= have <= self._number else None

    def request(self, request_id: str) -> RequestState | None:
        """What the events say about one request; None if they have not told of it yet."""
        with self._lock:
            track = self._tracks.get(request_id)
            if track is None:
                return None
            view = self._replica.requests.get(request_id)
            now = track.end_time or self._replica.time
            rate = None
            if track.first_token_time is not None and now > track.first_token_time and track.num_output > 1:
                rate = round((track.num_output - 1) / (now - track.first_token_time), 1)
            if view is None:
                state = "finished"
            elif view.slot is None:
                state = "waiting"
            else:  # once all but the newest token are computed, the next step decodes
                state = "prefill" if view.num_computed < view.num_total - 1 else "decode"
            return RequestState(
                key=track.key,
                state=state,
                slot=view.slot if view else None,
                place=self._places.get(request_id, 0),
                num_prompt=track.num_prompt,
                num_computed=view.num_computed if view else 0,
                num_total=view.num_total if view else track.num_prompt + track.num_output,
                num_output=track.num_output,
                rate=rate,
                ttft=None if track.ttft is None else round(track.ttft, 3),
                cached=track.cached,
                preemptions=track.preemptions,
                start_step=track.start_step,
                injected=track.injected,
            )

    @property
    def wait_reason(self) -> str:
        return self._wait_reason
