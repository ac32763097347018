"""The engine's side of the event bus: notes what happens and publishes it in the right order."""

from __future__ import annotations

import time
from dataclasses import replace

from engine.events import EventBus, LifecycleEvent, LifecycleKind, Mode, Phase, SlotUse, StepEvent, StepTimes
from engine.request import Request
from engine.scheduler import Schedule, Scheduler


class Journal:
    """Collects lifecycle events until they are published, with a step or between two steps.

    The blocks that changed go out with the last event of such a group: only then do slots, tables and
    counts all belong to the same moment.
    """

    def __init__(self, bus: EventBus, scheduler: Scheduler):
        self._bus = bus
        self._scheduler = scheduler
        self._news: list[LifecycleEvent] = []
        self.step = 0

    def note(self, kind: LifecycleKind, request: Request, num_tokens: int = 0, reason: str = "") -> None:
        """Something happened to a request."""
        self._note(kind, request.request_id, request.slot, num_tokens, reason)

    def note_mode(self, mode: Mode) -> None:
        self._note("mode", "", None, 0, mode)

    def _note(
        self, kind: LifecycleKind, request_id: str, slot: int | None, num_tokens: int, reason: str
    ) -> None:
        event = LifecycleEvent(0, time.monotonic(), self.step, kind, request_id, slot, num_tokens, reason)
        self._news.append(event)

    def note_schedule(self, schedule: Schedule) -> None:
        """Who was put out, who came in and how."""
        for request in schedule.preempted:
            self.note("preempted", request, reason="blocks")
        someone_decodes = any(grant.request.is_decoding for grant in schedule.grants)
        for request in schedule.admitted:
            kind: LifecycleKind = "injected" if someone_decodes else "admitted"
            if request.was_admitted:
                kind = "resumed"
            self.note(kind, request, num_tokens=request.num_uncomputed_tokens)
            if request.num_computed_tokens:
                self.note("prefix_hit", request, num_tokens=request.num_computed_tokens)

    def publish(self) -> None:
        """Publish what happened between two steps."""
        if self._news:
            self._news[-1] = replace(self._news[-1], blocks=self._scheduler.pool.drain_changes())
            self._publish_news()

    def publish_step(self, mode: Mode, schedule: Schedule, slots: list[SlotUse], times: StepTimes) -> None:
        """Publish what happened in a step, then the step."""
        self._publish_news()
        scheduler, pool = self._scheduler, self._scheduler.pool
        worked = {use.slot for use in slots}
        held = [_without_work(request) for request in scheduler.running if request.slot not in worked]
        event = StepEvent(
            seq=0,
            time=time.monotonic(),
            step=self.step,
            mode=mode,
            times=times,
            slots=tuple(sorted(slots + held)),
            blocks=pool.drain_changes(),
            num_used=pool.num_used,
            num_cached=pool.num_cached,
            num_free=pool.num_free,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            wait_reason=schedule.wait_reason,
        )
        self._bus.publish(event)

    def _publish_news(self) -> None:
        for event in self._news:
            self._bus.publish(event)
        self._news = []


def _without_work(request: Request) -> SlotUse:
    """The slot of a request that got none of the step's token budget."""
    phase: Phase = "decode" if request.is_decoding else "prefill"
    computed, total = request.num_computed_tokens, len(request.token_ids)
    return SlotUse(request.held_slot, request.request_id, phase, 0, computed, total, 0)
