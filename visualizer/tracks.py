"""One record per request, as its events tell it: what a card or a tooltip says about its way."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.events import LifecycleEvent, Replica, RequestView, StepEvent

KEEP_FINISHED = 2048


@dataclass
class Track:
    """The way of one request. `key` is its public number: the order in which requests arrived."""

    key: int
    num_prompt: int
    submitted_time: float
    start_step: int | None = None
    injected: bool = False
    cached: int = 0
    preemptions: int = 0
    first_token_time: float | None = None
    last_token_time: float | None = None
    end_time: float | None = None
    num_output: int = 0
    reason: str = ""

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.submitted_time


class Tracks:
    """All live requests and the latest finished ones, by request id."""

    def __init__(self) -> None:
        self._tracks: OrderedDict[str, Track] = OrderedDict()
        self._count = 0

    def get(self, request_id: str) -> Track | None:
        return self._tracks.get(request_id)

    def key(self, request_id: str) -> int:
        """The public number of a request; 0 for one that was forgotten."""
        track = self._tracks.get(request_id)
        return track.key if track else 0

    def follow(self, replica: Replica) -> None:
        """Take up the live requests of a keyframe."""
        for view in replica.requests.values():
            track = self._tracks.get(view.request_id) or self._open(view)
            track.first_token_time = view.first_token_time
            track.preemptions = view.num_preemptions
        for request_id, track in self._tracks.items():
            if track.end_time is None and request_id not in replica.requests:
                track.end_time = replica.time

    def _open(self, view: RequestView) -> Track:
        self._count += 1
        track = Track(self._count, view.num_prompt, view.submitted_time)
        self._tracks[view.request_id] = track
        return track

    def step(self, event: StepEvent) -> list[float]:
        """Count a step's tokens. Seconds between each of them and its request's token before."""
        gaps = []
        for use in event.slots:
            track = self._tracks.get(use.request_id)
            if track is None or not use.num_sampled:
                continue
            if track.end_time is None:  # one that ended in this step said how many it has
                track.num_output += use.num_sampled
            if track.last_token_time is not None:
                gaps.append(event.time - track.last_token_time)
            track.last_token_time = event.time
        return gaps

    def transition(self, event: LifecycleEvent, replica: Replica) -> None:
        """Note one transition. `replica` is the state just after it."""
        if event.kind == "submitted":
            self._open(replica.requests[event.request_id])
            self._forget()
            return
        track = self._tracks.get(event.request_id)
        if track is None:
            return
        match event.kind:
            case "admitted" | "injected":
                track.start_step, track.injected = event.step, event.kind == "injected"
            case "prefix_hit":
                track.cached = event.num_tokens
            case "first_token":
                track.first_token_time = event.time
            case "preempted":
                track.preemptions += event.reason != "mode"
            case "finished" | "aborted":
                track.end_time, track.num_output = event.time, event.num_tokens
                track.reason = event.reason if event.kind == "finished" else "abort"

    def _forget(self) -> None:
        while len(self._tracks) > KEEP_FINISHED:
            oldest = next(iter(self._tracks))
            if self._tracks[oldest].end_time is None:
                break
            del self._tracks[oldest]
