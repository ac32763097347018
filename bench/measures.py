"""What was measured, from the times at which tokens came and the events that the engine published."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.workload import WorkItem, num_output_tokens
from engine.events import BlockDelta, EngineInfo, Event, StepEvent


class InvalidRun(Exception):
    """A contender did not do its work, so its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How an engine used its slots and its KV memory. Shares are 0 to 1."""

    num_steps: int
    wasted_slot_steps: float  # of all slot-steps: idle, in a step in which a request waited
    peak_kv: float  # of the pool's blocks: owned by a request
    mean_kv: float
    written_kv: float  # of the owned blocks' capacity: holding a token, on average
    num_preemptions: int


@dataclass(slots=True)
class Arm:
    """One contender's run: the work it was given, what came of it, and when.

    seconds: from the first arrival to the last token, prefill included. set_up_seconds: what went
        before and does not count: warm-up, and for `transformers` loading.
    token_times: for each request, when each output token was there, in seconds since it arrived.
    """

    name: str
    dtype: str
    work: Sequence[WorkItem]
    seconds: float
    token_times: list[list[float]]
    set_up_seconds: float
    usage: Usage | None = None
    uses_kv_cache: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidRun if a request has not exactly the tokens asked for."""
        if len(self.token_times) != len(self.work):
            raise InvalidRun(
                f"{self.name}: {len(self.token_times)} of {len(self.work)} requests were answered"
            )
        for index, (item, times) in enumerate(zip(self.work, self.token_times, strict=True)):
            if len(times) != item.num_output:
                raise InvalidRun(f"{self.name}: request {index} got {len(times)} of {item.num_output} tokens")

    @property
    def num_output(self) -> int:
        return num_output_tokens(self.work)

    @property
    def tokens_per_second(self) -> float:
        return self.num_output / self.seconds

    @property
    def first_token_times(self) -> list[float]:
        return [times[0] for times in self.token_times]

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token of a request and its next."""
        return [later - earlier for times in self.token_times for earlier, later in pairwise(times)]


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as NumPy does it; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def why_unfair(arm: Arm, base: Arm) -> str | None:
    """Why a speed-up of `arm` over `base` would mean nothing; None if it means something.

    One of them may have done only the beginning of the other's work: see `is_estimate`.
    """
    if arm.dtype != base.dtype:
        return f"{arm.name} ran in {arm.dtype}, {base.name} in {base.dtype}"
    if not (arm.uses_kv_cache and base.uses_kv_cache):
        return f"{arm.name} and {base.name} do not both use a KV cache"
    shared = min(len(arm.work), len(base.work))
    if list(arm.work[:shared]) != list(base.work[:shared]):
        return f"{arm.name} and {base.name} did different work"
    return None


def is_estimate(arm: Arm, base: Arm) -> bool:
    """One of the two did only a part of the other's work, so comparing their rates estimates the rest."""
    return len(arm.work) != len(base.work)


def measure_usage(events: Sequence[Event], info: EngineInfo) -> Usage:
    """Add up what a run's events say. The pool must have been empty when they began."""
    owned: dict[int, BlockDelta] = {}
    written = num_steps = wasted = preemptions = 0
    used_blocks: list[int] = []
    written_tokens: list[int] = []
    for event in events:
        for delta in event.blocks:
            if before := owned.pop(delta.block, None):
                written -= before.filled
            if delta.owners:
                owned[delta.block] = delta
                written += delta.filled
        if isinstance(event, StepEvent):
            num_steps += 1
            if event.num_waiting:
                wasted += info.max_num_seqs - len(event.slots)
            used_blocks.append(len(owned))
            written_tokens.append(written)
        else:
            preemptions += event.kind == "preempted"
    return Usage(
        num_steps=num_steps,
        wasted_slot_steps=wasted / max(num_steps * info.max_num_seqs, 1),
        peak_kv=max(used_blocks, default=0) / info.num_blocks,
        mean_kv=sum(used_blocks) / max(num_steps, 1) / info.num_blocks,
        written_kv=sum(written_tokens) / max(sum(used_blocks) * info.block_size, 1),
        num_preemptions=preemptions,
    )
