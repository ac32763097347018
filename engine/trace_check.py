"""Whether the events of a trace can follow each other: the rules that a real engine's events obey.

Whoever replays a trace relies on them: a slot holds one request, a block number exists, an owner is
somebody who lives. So they are checked while reading, event by event, each in time proportional to its
own size.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.events import BlockDelta, EngineInfo, Event, Keyframe, LifecycleEvent, Replica, StepEvent
from engine.trace_schema import BadValue, check_mode


class Follower:
    """A replica that refuses what cannot be. Raises BadValue naming what is wrong."""

    def __init__(self, keyframe: Keyframe):
        info = keyframe.info
        if len(keyframe.blocks) != info.num_blocks:
            raise BadValue(
                f"the keyframe has {len(keyframe.blocks)} blocks, not num_blocks={info.num_blocks}"
            )
        for number, block in enumerate(keyframe.blocks):
            if block.block != number:
                raise BadValue(f"the keyframe's block number {number} calls itself {block.block}")
            _check_block(block, info)
        self._info = info
        self._num_blocks, self._num_slots = info.num_blocks, info.max_num_seqs
        self._replica = Replica(keyframe)
        if len(self._replica.requests) != len(keyframe.requests):
            raise BadValue("the keyframe names a request twice")
        self._in_slot: dict[int, str] = {}
        for view in keyframe.requests:
            if view.slot is not None:
                self._take(view.slot, view.request_id)
        self._ended: set[str] = set()  # in the step that is being told
        self._settled = False  # a keyframe may fall into the middle of a step; after that step, all is known

    @property
    def num_live(self) -> int:
        """Requests that are waiting or running."""
        return len(self._replica.requests)

    def follow(self, event: Event) -> None:
        """Take the next event."""
        replica = self._replica
        if event.seq != replica.seq:
            raise BadValue(f"event {event.seq} where {replica.seq} should be")
        if event.time < replica.time:
            raise BadValue(f"its time, {event.time}, is before that of the event before it")
        if event.step < replica.step:
            raise BadValue(f"step {event.step} after step {replica.step}")
        if isinstance(event, LifecycleEvent):
            self._transition(event)
        else:
            self._check_slots(event)
        self._check_blocks(event.blocks)
        replica.apply(event)
        if isinstance(event, LifecycleEvent):
            if event.kind in ("finished", "aborted"):
                self._ended.add(event.request_id)
        else:
            self._check_totals(event)
            self._ended.clear()
            self._settled = True
        self._check_owners(event.blocks)

    def _transition(self, event: LifecycleEvent) -> None:
        live, name = self._replica.requests, event.request_id
        if event.kind == "mode":
            check_mode(event.reason)
            return
        if event.kind == "submitted":
            if name in live:
                raise BadValue(f"request {name!r} is submitted again while it lives")
            return
        view = live.get(name)
        if view is None:
            raise BadValue(f"request {name!r} is {event.kind}, but nobody submitted it")
        if event.kind in ("admitted", "injected", "resumed"):
            if event.slot is None or view.slot is not None:
                raise BadValue(f"request {name!r} is {event.kind} without a slot, or has one already")
            self._take(event.slot, name)
        elif event.kind in ("preempted", "finished", "aborted") and view.slot is not None:
            del self._in_slot[view.slot]

    def _take(self, slot: int, name: str) -> None:
        if slot >= self._num_slots:
            raise BadValue(f"slot {slot} of an engine with {self._num_slots} slots")
        if slot in self._in_slot:
            raise BadValue(f"slot {slot} is given to {name!r} while {self._in_slot[slot]!r} has it")
        self._in_slot[slot] = name

    def _check_slots(self, event: StepEvent) -> None:
        before = -1
        told = set()
        for use in event.slots:
            if use.slot <= before or use.slot >= self._num_slots:
                raise BadValue(
                    f"slot {use.slot} is out of order, twice there, or not one of {self._num_slots}"
                )
            before = use.slot
            told.add(use.request_id)
            known = use.request_id in self._replica.requests or use.request_id in self._ended
            if self._settled and not known:
                raise BadValue(f"slot {use.slot} holds request {use.request_id!r}, which nobody submitted")
        if self._settled and not told.issuperset(self._in_slot.values()):
            raise BadValue("a request that has a slot is missing from the step")

    def _check_blocks(self, blocks: Iterable[BlockDelta]) -> None:
        seen = set()
        for delta in blocks:
            if delta.block >= self._num_blocks:
                raise BadValue(f"block {delta.block} of a pool of {self._num_blocks} blocks")
            if delta.block in seen:
                raise BadValue(f"block {delta.block} is there twice")
            seen.add(delta.block)
            _check_block(delta, self._info)

    def _check_owners(self, blocks: Iterable[BlockDelta]) -> None:
        for delta in blocks:
            for owner in delta.owners:
                if owner not in self._replica.requests:
                    raise BadValue(f"block {delta.block} is owned by {owner!r}, who is not there")

    def _check_totals(self, event: StepEvent) -> None:
        if event.num_used + event.num_cached + event.num_free != self._num_blocks:
            raise BadValue(f"used, cached and free blocks do not add up to {self._num_blocks}")


def _check_block(delta: BlockDelta, info: EngineInfo) -> None:
    owners = delta.owners
    if delta.filled > info.block_size:
        raise BadValue(f"block {delta.block} holds {delta.filled} tokens, and {info.block_size} is the most")
    if delta.table_index >= info.num_blocks:
        raise BadValue(
            f"block {delta.block} is piece {delta.table_index} of a table, in a pool of {info.num_blocks}"
        )
    if len(owners) > info.max_num_seqs or len(set(owners)) != len(owners) or delta.ref_count != len(owners):
        raise BadValue(f"block {delta.block}'s owners and reference count do not agree")
    if bool(owners) != (delta.state in ("used", "reserved")) or bool(owners) != (delta.table_index >= 0):
        raise BadValue(f"block {delta.block} is {delta.state} with {len(owners)} owners")
