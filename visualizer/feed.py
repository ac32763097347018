"""The feed: one reader of the engine's events for all the viewers of the page.

A thread drains the event bus about seven times a second and turns what happened into *frames* (see
`frames.py`), one for each step, serialised once, whoever is watching. A viewer polls with a cursor and
gets the frames since. If it is new, or fell behind, it gets a keyframe: a frame that, applied to nothing,
gives the whole picture, with the timeline and the throughput curve of the last minutes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from itertools import islice
from typing import NamedTuple

from engine.events import Event, EventBus
from visualizer.frames import Framer, dumps, moments

PERIOD = 0.15  # seconds between two looks at the bus
MOST_FRAMES = 24  # of one look; if more steps were taken, some share a frame
KEPT_FRAMES = 1500  # kept for viewers that poll slowly: more than 9 s, and 30 s at 50 steps a second


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
        self._keyframe = Frame(-1, "")
        keyframe, _, self._cursor = bus.read()
        assert keyframe is not None  # whoever has no cursor gets one
        self._framer = Framer(keyframe)
        self._event_seen = time.monotonic()
        self._strip = dumps(self._framer.strip())
        self._places: dict[str, int] | None = None  # in the queue, from 1; None till somebody asks

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
        """Read what happened since the last tick and make frames of it, if anything did."""
        with self._lock:
            keyframe, events, self._cursor = self._bus.read(self._cursor)
            if keyframe is not None:  # at first, or because the ring ran over: old cursors become invalid
                self._framer.restart(keyframe)
                self._frames.clear()
            if events:
                self._event_seen = time.monotonic()
            self._advance(events)
            self._places = None

    def _advance(self, events: list[Event]) -> None:
        for moment in moments(events, MOST_FRAMES):
            self._keep(self._framer.advance(moment))
        strip = dumps(self._framer.strip(time.monotonic() - self._event_seen))
        if not events and strip != self._strip:  # such as the rate, which falls when nothing happens
            self._keep(self._framer.advance([], strip))
        self._strip = strip

    def _keep(self, frame: str) -> None:
        self._frames.append(Frame(self._framer.number, frame))

    def _full_frame(self) -> str:
        if self._keyframe.number != self._framer.number:
            self._keyframe = Frame(self._framer.number, self._framer.keyframe(self._strip))
        return self._keyframe.json

    # -- what viewers ask ---------------------------------------------------------------------

    def read(self, cursor: str | None) -> str:
        """JSON members (no braces) of an answer to a poll: the new cursor and the frames since."""
        with self._lock:
            have = self._have(cursor)
            if have is None:
                frames = [self._full_frame()]
            else:
                count = self._framer.number - have
                frames = [frame.json for frame in islice(reversed(self._frames), count)][::-1]
            return f'"cursor":"{self.epoch}.{self._framer.number}","frames":[{",".join(frames)}]'

    def _have(self, cursor: str | None) -> int | None:
        """The frame number in a cursor if the frames kept lead on from it, else None."""
        epoch, _, number = (cursor or "").partition(".")
        if epoch != self.epoch or not number.isascii() or not number.isdigit() or len(number) > 15:
            return None
        have = int(number)
        oldest = self._frames[0].number - 1 if self._frames else self._framer.number
        return have if oldest <= have <= self._framer.number else None

    def request(self, request_id: str) -> RequestState | None:
        """What the events say about one request; None if they have not told of it yet."""
        with self._lock:
            replica = self._framer.replica
            track = self._framer.tracks.get(request_id)
            if track is None:
                return None
            view = replica.requests.get(request_id)
            now = track.end_time or replica.time
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
                place=self._place(request_id) if state == "waiting" else 0,
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

    def _place(self, request_id: str) -> int:
        if self._places is None:
            waiting = (view for view in self._framer.replica.requests.values() if view.slot is None)
            self._places = {view.request_id: place for place, view in enumerate(waiting, 1)}
        return self._places.get(request_id, 0)

    @property
    def wait_reason(self) -> str:
        return self._framer.wait_reason
