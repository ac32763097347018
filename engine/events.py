"""The step-event bus: the glass of the engine.

Everything the outside may see of a running engine passes through here, as small immutable events:
one `StepEvent` a step, and one `LifecycleEvent` for each thing that happens to a request. They carry
ids, slots, lengths and block numbers, never a word of prompt or output.

Two rules make them trustworthy:

* **Complete.** A `Keyframe` plus all later events reproduces the engine's slots, block tables and
  reference counts exactly (`Replica` does it; a property test compares it with the engine).
* **Harmless.** Publishing appends to a bounded ring. A slow reader loses old events and is handed a
  fresh keyframe; it can never make the engine wait.

The idea of "state = keyframe + deltas" is that of video codecs and of event sourcing.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

Mode = Literal["naive", "static", "continuous"]
Phase = Literal["prefill", "decode"]
BlockState = Literal["free", "reserved", "used", "cached"]
WaitReason = Literal["", "slots", "blocks", "budget", "batch", "prompt"]
LifecycleKind = Literal[
    "submitted",  # joined the waiting queue; num_tokens = prompt tokens
    "admitted",  # got a slot for the first time, with nobody decoding; num_tokens = tokens to compute
    "injected",  # the same, while others were in the middle of decoding
    "prefix_hit",  # found part of its prompt in the cache; num_tokens = tokens it need not compute
    "resumed",  # got a slot again after a preemption or a mode switch; num_tokens = tokens to recompute
    "first_token",  # its first output token is out; num_tokens = prompt tokens
    "preempted",  # lost its slot and blocks, keeps its tokens, to be recomputed (see "resumed")
    "finished",  # reason: "stop" | "length" | "error"; num_tokens = output tokens
    "aborted",  # ended by its owner; num_tokens = output tokens
    "mode",  # the engine changed mode; reason = the new mode
]


class EngineInfo(NamedTuple):
    """What stays the same for an engine's life. Lengths in tokens."""

    model: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_limit: int


class SlotUse(NamedTuple):
    """An occupied slot in one step. `num_tokens` may be 0: the slot is held, but got no budget."""

    slot: int
    request_id: str
    phase: Phase
    num_tokens: int  # computed in this step
    num_computed: int  # in the KV cache once the step is done
    num_total: int  # prompt and output tokens known once the step is done
    num_sampled: int  # output tokens that came out of this step


class BlockDelta(NamedTuple):
    """The new state of one physical block.

    state: "free", "reserved" (owned, nothing written yet), "used" (owned), "cached" (idle, hittable).
    owners: ids of the requests that hold it. table_index: its place in their block tables, the same for
    all of them because a shared block is always the same piece of the same prefix; -1 without owner.
    """

    block: int
    state: BlockState
    owners: tuple[str, ...]
    table_index: int
    ref_count: int
    filled: int  # tokens written, 0 to block_size


class StepTimes(NamedTuple):
    """Seconds a step spent in each stage."""

    schedule: float
    prepare: float
    forward: float
    sample: float
    postprocess: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What one step did. Published last in its step: all that happened in it came before."""

    seq: int
    time: float  # seconds, monotonic clock, at the end of the step
    step: int
    mode: Mode
    times: StepTimes
    slots: tuple[SlotUse, ...]  # who sat where while the step ran, by slot
    blocks: tuple[BlockDelta, ...]  # every block that changed since the last event
    num_used: int
    num_cached: int
    num_free: int
    num_running: int  # once the step is done
    num_waiting: int  # once the step is done
    wait_reason: WaitReason  # what kept the head of the queue out: no slot, no blocks, no budget; in
    # naive and static mode, a batch that is not over; a prompt it shares that is just being computed


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One transition of one request (or of the engine's mode). See `LifecycleKind` for `num_tokens`."""

    seq: int
    time: float
    step: int  # the step it happened in, or before
    kind: LifecycleKind
    request_id: str
    slot: int | None = None
    num_tokens: int = 0
    reason: str = ""
    blocks: tuple[BlockDelta, ...] = ()  # blocks that changed, when it happened between two steps


class RequestView(NamedTuple):
    """A live request as the events show it. `slot` is None while it waits."""

    request_id: str
    slot: int | None
    num_prompt: int
    num_computed: int
    num_total: int
    num_preemptions: int
    submitted_time: float
    first_token_time: float | None


@dataclass(frozen=True, slots=True)
class Keyframe:
    """The whole visible state just before event `seq`."""

    seq: int
    time: float
    step: int
    mode: Mode
    info: EngineInfo
    blocks: tuple[BlockDelta, ...]  # one per physical block, by block number
    requests: tuple[RequestView, ...]  # live ones, in order of submission


Event = StepEvent | LifecycleEvent


class Replica:
    """The engine's visible state, rebuilt from events alone.

    The bus keeps one to hand out keyframes; every viewer, replay or test may keep its own.
    """

    def __init__(self, keyframe: Keyframe):
        self.info = keyframe.info
        self.seq = keyframe.seq
        self.time = keyframe.time
        self.step = keyframe.step
        self.mode: Mode = keyframe.mode
        self.blocks = list(keyframe.blocks)
        self.requests = {view.request_id: view for view in keyframe.requests}

    @classmethod
    def empty(cls, info: EngineInfo, mode: Mode, time: float) -> Replica:
        blocks = tuple(BlockDelta(b, "free", (), -1, 0, 0) for b in range(info.num_blocks))
        return cls(Keyframe(0, time, 0, mode, info, blocks, ()))

    def keyframe(self) -> Keyframe:
        blocks, requests = tuple(self.blocks), tuple(self.requests.values())
        return Keyframe(self.seq, self.time, self.step, self.mode, self.info, blocks, requests)

    def apply(self, event: Event) -> None:
        """Advance by one event. Raises ValueError if an event is missing in between."""
        if event.seq != self.seq:
            raise ValueError(f"event {event.seq} cannot follow event {self.seq - 1}: some are missing")
        self.seq += 1
        self.time = event.time
        self.step = event.step
        for delta in event.blocks:
            self.blocks[delta.block] = delta
        if isinstance(event, StepEvent):
            self.mode = event.mode
            for use in event.slots:
                if view := self.requests.get(use.request_id):
                    self.requests[use.request_id] = view._replace(
                        num_computed=use.num_computed, num_total=use.num_total
                    )
        else:
            self._transition(event)

    def _transition(self, event: LifecycleEvent) -> None:
        request_id = event.request_id
        match event.kind:
            case "submitted":
                self.requests[request_id] = RequestView(
                    request_id, None, event.num_tokens, 0, event.num_tokens, 0, event.time, None
                )
            case "admitted" | "injected" | "resumed":
                self._update(request_id, slot=event.slot)
            case "prefix_hit":
                self._update(request_id, num_computed=event.num_tokens)
            case "first_token":
                self._update(request_id, first_token_time=event.time)
            case "preempted":
                preemptions = self.requests[request_id].num_preemptions + (event.reason != "mode")
                self._update(request_id, slot=None, num_computed=0, num_preemptions=preemptions)
            case "finished" | "aborted":
                del self.requests[request_id]
            case "mode":
                self.mode = event.reason  # type: ignore[assignment]

    def _update(self, request_id: str, **changes) -> None:
        self.requests[request_id] = self.requests[request_id]._replace(**changes)

    @property
    def slots(self) -> list[str | None]:
        """Request id in each slot."""
        slots: list[str | None] = [None] * self.info.max_num_seqs
        for view in self.requests.values():
            if view.slot is not None:
                slots[view.slot] = view.request_id
        return slots

    @property
    def block_tables(self) -> dict[str, list[int]]:
        """Block numbers of each request that holds any, in logical order."""
        tables: dict[str, dict[int, int]] = {}
        for delta in self.blocks:
            for owner in delta.owners:
                tables.setdefault(owner, {})[delta.table_index] = delta.block
        return {owner: [table[i] for i in sorted(table)] for owner, table in tables.items()}


class Reading(NamedTuple):
    """What a reader gets: a keyframe if it had none or fell behind, the events since, its next cursor."""

    keyframe: Keyframe | None
    events: list[Event]
    cursor: int


class EventBus:
    """A bounded ring of events with any number of readers, each with a cursor of its own.

    It knows the state at both of its ends: that of the newest event for whoever comes to watch, that of
    the oldest for whoever wants a recording of what just happened. One thread publishes (the one that
    steps the engine); any thread may read.
    """

    def __init__(self, info: EngineInfo, mode: Mode, time: float, capacity: int = 8192):
        self._ring: deque[Event] = deque()
        self._capacity = capacity
        self._replica = Replica.empty(info, mode, time)  # the state after the newest event
        self._oldest = Replica.empty(info, mode, time)  # the state before the oldest event in the ring
        self._lock = threading.Lock()

    @property
    def info(self) -> EngineInfo:
        return self._replica.info

    @property
    def next_seq(self) -> int:
        """The number that the next published event gets."""
        return self._replica.seq

    def publish(self, event: Event) -> None:
        """Append an event; its `seq` is set here. The lock is only ever held for copying references."""
        with self._lock:
            event = replace(event, seq=self._replica.seq)
            self._replica.apply(event)
            self._ring.append(event)
            if len(self._ring) > self._capacity:
                self._oldest.apply(self._ring.popleft())

    def read(self, cursor: int | None = None) -> Reading:
        """Events from `cursor` on. None, or a cursor the ring no longer reaches, gets a keyframe."""
        with self._lock:
            end = self._replica.seq
            oldest = end - len(self._ring)
            if cursor is None or not oldest <= cursor <= end:
                return Reading(self._replica.keyframe(), [], end)
            count = end - cursor
            if count == 0:
                return Reading(None, [], end)
            # Walk from the right end: a deque reaches its ends, not its middle, in O(1).
            tail = list(islice(reversed(self._ring), count))
            return Reading(None, tail[::-1], end)

    def recording(self, since_step: int = 0) -> tuple[Keyframe, list[Event]]:
        """What the ring still holds, as a keyframe and all events since: a trace after the fact.

        It begins after a whole step: the one before `since_step`, or, if the ring does not reach back
        so far, the first that it does reach. So there is nothing to start or to stop before there is
        something worth keeping, and what it takes is bounded by the ring.
        """
        with self._lock:
            replica = Replica(self._oldest.keyframe())
            events = list(self._ring)
        start = 0
        overran = replica.seq > 0  # then the ring may begin in the middle of a step
        for place, event in enumerate(events):
            if isinstance(event, StepEvent) and (event.step < since_step or (overran and not start)):
                start = place + 1
        for event in events[:start]:
            replica.apply(event)
        return replica.keyframe(), events[start:]
