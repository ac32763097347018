"""Who computes what in the next step: admission, token grants, blocks, preemption.

**No phases.** Every request has tokens that are not in the KV cache yet; a step grants it some of
them. Prefill, a chunk of a long prefill, decode (one token) and recompute after a preemption are the
same case (the view of vLLM's V1 scheduler).

**Three modes, one mechanism.** A `Policy` says when requests may enter and how they get memory; the
rest of the engine is the same for all, so comparing them compares the policies alone.

A step is filled in three passes:

1. *Decode.* Every request that lacks just its newest token gets it, in order of service. If it needs a
   block and none is left, the last in that order (within a priority, the latest arrival) is preempted: it
   gives back slot and blocks, keeps its tokens, and will recompute them (vLLM's preemption by recompute).
2. *Admission.* From the head of the queue into free slots, as long as the policy and the blocks allow
   and decoding has left some of the token budget. The queue is strictly first come, first served
   within a priority, and nobody overtakes a head that does not fit: it will, because those inside end.
   Only continuations that wait for the prompt they share step aside until it is computed.
   A better priority overtakes, but not for ever (see `WaitingQueue`).
3. *Prefill.* What is left of the budget goes half to the oldest prompts, whatever their priority, so that
   none starves, and half to the shortest remainders of the best priority, so that a short prompt does not
   wait behind a long one (chunked prefill mixed with decode: Sarathi-Serve, Agrawal et al. 2024).

Invariants, checked by the property tests:

* the tokens granted in a step never exceed `max_num_batched_tokens`;
* a request is in the queue or in one slot, never in both; only one in a slot owns blocks;
* the running request that is first in order of service is never preempted, so at least one always moves
  forward, and requests that do not fit together finish one after the other instead of evicting each
  other for ever.

Left out on purpose: swapping KV to another memory (recompute is cheaper for small models), and
admission that skips over a big head of the queue.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.events import EngineInfo, Mode, WaitReason
from engine.memory import BlockPool
from engine.request import Request, RequestStatus

MAX_OVERTAKES = 16


@dataclass(frozen=True, slots=True)
class Policy:
    """What makes a mode.

    max_slots: most requests at once; None for all the slots there are.
    waits_for_batch: nobody enters before everybody inside has left.
    reserves_maximum: a request gets blocks for the whole context limit when it enters, instead of one
        at a time as it grows. Such a policy never preempts, and shares nothing.
    """

    max_slots: int | None
    waits_for_batch: bool
    reserves_maximum: bool


POLICIES: dict[Mode, Policy] = {
    "naive": Policy(max_slots=1, waits_for_batch=True, reserves_maximum=True),
    "static": Policy(max_slots=None, waits_for_batch=True, reserves_maximum=True),
    "continuous": Policy(max_slots=None, waits_for_batch=False, reserves_maximum=False),
}


class Grant(NamedTuple):
    """`num_tokens` of the request's uncomputed tokens are to be computed in this step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The grant reaches the request's last known token, so the next one can be sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens


@dataclass(slots=True)
class Schedule:
    """A step's plan: grants in packed order, and what had to happen to make it."""

    grants: list[Grant] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy before computing: from, to
    wait_reason: WaitReason = ""


class WaitingQueue:
    """Requests in order of service. Push, pop and remove in O(log n), whatever its length.

    **Bounded waiting.** Whoever came first may be overtaken by requests of better priority, but only
    `MAX_OVERTAKES` times in a row; then it is overdue, goes next, and stays ahead of every priority.

    A removed request's entries stay in the heaps until they surface, then are skipped.
    """

    def __init__(self) -> None:
        self._by_service = _LazyHeap()  # of (sort key, request id)
        self._by_arrival = _LazyHeap()  # of (arrival, request id)
        self._members: dict[str, Request] = {}
        self._overtakes = 0  # since the first that came was last served

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members.values(), key=lambda request: request.sort_key))

    def push(self, request: Request) -> None:
        self._members[request.request_id] = request
        self._by_service.push((request.sort_key, request.request_id))
        self._by_arrival.push((request.arrival, request.request_id))

    def head(self) -> Request | None:
        """The request to be served next, or None."""
        if self._overtakes >= MAX_OVERTAKES and (first := self._top(self._by_arrival)):
            return first
        return self._top(self._by_service)

    def serve(self, request: Request) -> None:
        """Take out the head, because it gets a slot."""
        first = self._top(self._by_arrival)
        if request is not first:
            self._overtakes += 1
        else:
            request.is_overdue |= self._overtakes >= MAX_OVERTAKES
            self._overtakes = 0
        del self._members[request.request_id]

    def remove(self, request: Request) -> None:
        """Take out one that ends. What the first that came had waited is not handed down to the next."""
        if request is self._top(self._by_arrival):
            self._overtakes = 0
        del self._members[request.request_id]

    def set_aside(self, request: Request) -> None:
        """Take out the head for a moment; `push` brings it back."""
        del self._members[request.request_id]

    def _top(self, heap: _LazyHeap) -> Request | None:
        while entry := heap.top():
            key, request_id = entry
            request = self._members.get(request_id)
            if request is not None and key in (request.arrival, request.sort_key):
                return request
            heap.pop()
        return None


class _LazyHeap:
    """A heap that holds an entry once, however often it is pushed."""

    def __init__(self) -> None:
        self._heap: list[tuple] = []
        self._present: set[tuple] = set()

    def push(self, entry: tuple) -> None:
        if entry not in self._present:
            self._present.add(entry)
            heapq.heappush(self._heap, entry)

    def top(self) -> tuple | None:
        return self._heap[0] if self._heap else None

    def pop(self) -> None:
        self._present.remove(heapq.heappop(self._heap))


class Scheduler:
    """Owns the waiting queue, the slots and the running requests."""

    def __init__(self, pool: BlockPool, info: EngineInfo, mode: Mode, enable_prefix_caching: bool):
        self.pool = pool
        self.info = info
        self.policy = POLICIES[mode]
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of service
        self._free_slots = list(range(info.max_num_seqs))  # a heap: the lowest free slot is taken first

    @property
    def shares_prefixes(self) -> bool:
        return self.enable_prefix_caching and not self.policy.reserves_maximum

    def set_mode(self, mode: Mode) -> list[Request]:
        """Switch the policy. Running requests go back to the queue, with their tokens; returns them."""
        self.policy = POLICIES[mode]
        requeued = list(self.running)
        for request in requeued:
            self._requeue(request)
        return requeued

    def remove(self, request: Request) -> None:
        """Take a finished, failed or aborted request out, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED

    # -- one step -------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Plan a step: changes queue, slots and blocks; computes nothing."""
        schedule = Schedule()
        budget = self._grant_decodes(schedule, self.info.max_num_batched_tokens)
        if not schedule.preempted:  # whoever was just put out must not come back in the same step
            self._admit(schedule, budget)
        elif self.waiting:
            schedule.wait_reason = "blocks"
        self._grant_prefills(schedule, budget)
        schedule.grants.sort(key=lambda grant: grant.num_tokens)  # decode rows first: see attention
        return schedule

    def _grant_decodes(self, schedule: Schedule, budget: int) -> int:
        for request in list(self.running):
            # A victim is never a request that has its grant: victims come from the end of the same order.
            if not request.is_decoding or request.status is not RequestStatus.RUNNING:
                continue
            if budget == 0:
                break
            if self._make_room_for_next_token(request, schedule):
                schedule.grants.append(Grant(request, 1))
                budget -= 1
        return budget

    def _make_room_for_next_token(self, request: Request, schedule: Schedule) -> bool:
        """Own the block that the next token falls into. False if `request` itself had to be preempted."""
        if request.num_computed_tokens < len(request.block_table) * self.pool.block_size:
            return True
        while self.pool.num_available == 0:
            victim = self.running[-1]
            self._requeue(victim)
            victim.num_preemptions += 1
            schedule.preempted.append(victim)
            if victim is request:
                return False
        request.block_table += self.pool.allocate(request.request_id, 1, len(request.block_table))
        return True

    def _admit(self, schedule: Schedule, budget: int) -> None:
        batch_is_closed = self.policy.waits_for_batch and bool(self.running)
        max_slots = self.policy.max_slots or self.info.max_num_seqs
        aside: list[Request] = []  # they wait for a prompt that is being computed, which holds up nobody else
        while request := self.waiting.head():
            if batch_is_closed:
                schedule.wait_reason = "batch"
            elif len(self.running) >= max_slots:
                schedule.wait_reason = "slots"
            elif budget == 0:
                schedule.wait_reason = "budget"
            elif self._waits_for_prompt(request):
                self.waiting.set_aside(request)
                aside.append(request)
                continue
            elif not self._claim_blocks(request, schedule):
                schedule.wait_reason = "blocks"
            else:
                self._seat(request)
                schedule.admitted.append(request)
                continue
            break
        for request in aside:
            self.waiting.push(request)
            schedule.wait_reason = "prompt"

    def _waits_for_prompt(self, request: Request) -> bool:
        """The prompt is being computed by another of `n` requests: a moment later it can be shared."""
        return bool(self._running_siblings(request)) and self._donor(request) is None

    def _donor(self, request: Request) -> Request | None:
        """A running continuation of the same prompt that has computed all of it."""
        for sibling in self._running_siblings(request):
            if sibling.num_computed_tokens >= sibling.num_prompt_tokens:
                return sibling
        return None

    def _running_siblings(self, request: Request) -> list[Request]:
        if len(request.group) == 1 or self.policy.reserves_maximum:
            return []
        return [other for other in self.running if other.group is request.group]

    def _claim_blocks(self, request: Request, schedule: Schedule) -> bool:
        """Give a waiting request the blocks it enters with: its tokens' or, if reserving, the maximum's."""
        pool, block_size = self.pool, self.pool.block_size
        num_tokens = self.info.context_limit if self.policy.reserves_maximum else len(request.token_ids)
        donor = self._donor(request)
        shared, content_ids, num_computed = self._find_shared(request, donor)
        num_new = -(-num_tokens // block_size) - len(shared)
        # Growing requests will soon ask for blocks; entering on the last ones would only get someone
        # preempted. Half a block each keeps them going for about half a block's worth of steps.
        headroom = 0 if self.policy.reserves_maximum else len(self.running) // 2
        if num_new + headroom > pool.num_available - pool.num_idle(shared):
            return False
        pool.share(request.request_id, shared)
        request.block_table = shared + pool.allocate(request.request_id, num_new, len(shared))
        request.content_ids = content_ids
        if donor and num_computed % block_size:  # its last prompt block, part full: both will write there
            source, copy = donor.block_table[len(shared)], request.block_table[len(shared)]
            schedule.copies.append((source, copy))
            pool.set_filled(copy, num_computed % block_size)
        request.num_computed_tokens = num_computed
        return True

    def _find_shared(self, request: Request, donor: Request | None) -> tuple[list[int], list[int], int]:
        """What exists already of a request's beginning: full blocks to share, the content ids of those
        that are indexed, and how many tokens need no computing.

        The request's last token is always computed, even if its block is there: its logits are needed.
        """
        if self.policy.reserves_maximum:
            return [], [], 0
        block_size = self.pool.block_size
        hits = self.pool.match_prefix(request.token_ids[:-1]) if self.shares_prefixes else []
        num_forked = request.num_prompt_tokens - 1
        if donor and num_forked > len(hits) * block_size:
            num_full = num_forked // block_size
            return donor.block_table[:num_full], donor.content_ids[:num_full], num_forked
        return [hit.block for hit in hits], [hit.content_id for hit in hits], len(hits) * block_size

    def _grant_prefills(self, schedule: Schedule, budget: int) -> None:
        # Not "those that are not decoding": one that just came back may find all but its last token cached.
        served = {grant.request for grant in schedule.grants}
        pending = [request for request in self.running if request not in served]
        by_arrival = sorted(pending, key=lambda request: request.arrival)
        by_remainder = sorted(pending, key=lambda request: (request.priority, request.num_uncomputed_tokens))
        granted = dict.fromkeys(pending, 0)
        for order, part in ((by_arrival, budget - budget // 2), (by_remainder, budget)):
            left = min(part, budget)
            for request in order:
                num_tokens = min(left, request.num_uncomputed_tokens - granted[request])
                granted[request] += num_tokens
                left -= num_tokens
                budget -= num_tokens
        schedule.grants += [
            Grant(request, num_tokens) for request, num_tokens in granted.items() if num_tokens
        ]

    # -- slots ----------------------------------------------------------------------------------

    def _seat(self, request: Request) -> None:
        self.waiting.serve(request)
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda other: other.sort_key)

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.held_slot)
        request.slot = None
        self.pool.release(request.request_id, request.block_table)
        request.block_table, request.content_ids = [], []

    def _requeue(self, request: Request) -> None:
        self._vacate(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, queue and blocks agree with each other."""
        self.pool.check_integrity()
        slots = [request.held_slot for request in self.running]
        assert sorted([*slots, *self._free_slots]) == list(range(self.info.max_num_seqs)), (
            "slots do not add up"
        )
        assert all(not request.block_table for request in self.waiting), "a waiting request owns blocks"
        owners = sum(self.pool.ref_count(block) for block in range(self.pool.num_blocks))
        assert owners == sum(len(request.block_table) for request in self.running), "blocks nobody runs with"
