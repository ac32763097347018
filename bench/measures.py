"""What was measured, from the times at which tokens came and the events that the engine published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import numpy as np

from bench.workload import WorkItem, num_output_tokens, num_prompt_tokens
from engine.events import BlockDelta, EngineInfo, Event, StepEvent, StepTimes


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
    stages: dict[str, float]  # share of the steps' time by stage of `StepTimes`, and "emit": the rest

    @property
    def overhead(self) -> float:
        """Share of the steps' time in which the model did not compute."""
        return 1.0 - self.stages["forward"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What must be equal between two arms, beside their work, for a speed-up to mean something.

    dtype: of the computation and of what the model keeps. weights: how they are stored, a dtype or a kind of
    quantisation. threads: of the processor.
    """

    dtype: str
    weights: str
    threads: int
    kv_cache: bool = True


@dataclass(slots=True)
class Arm:
    """One contender's run: the work it was given, what came of it, and when.

    seconds: from the first arrival to the last token, prefill included.
    token_times: for each request, when each output token was there, in seconds since it arrived.
    num_prompt: prompt tokens as the contender counted them, without padding.
    load_seconds, warm_up_seconds: what went before and does not count; loading is None where it was shared.
    software: names and versions.
    slots: as many requests at once were allowed; None if that was not said.
    """

    name: str
    terms: Terms
    work: Sequence[WorkItem]
    seconds: float
    token_times: list[list[float]]
    num_prompt: int
    warm_up_seconds: float
    load_seconds: float | None = None
    usage: Usage | None = None
    software: str = ""
    slots: int | None = None

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
    def mean_at_once(self) -> float:
        """Requests in the middle of their answers, from first token to last, on average over the run."""
        return sum(times[-1] - times[0] for times in self.token_times) / self.seconds

    @property
    def most_at_once(self) -> int:
        """The most requests that were in the middle of their answers, from first token to last, together."""
        moments = []
        for item, times in zip(self.work, self.token_times, strict=True):
            moments += [(item.due + times[0], 1), (item.due + times[-1], -1)]
        # Where one ends as another begins, the end comes first: -1 sorts before 1.
        return max(accumulate(change for _, change in sorted(moments)), default=0)

    @property
    def first_token_times(self) -> list[float]:
        return [times[0] for times in self.token_times]

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token of a request and its next."""
        return [later - earlier for times in self.token_times for earlier, later in pairwise(times)]


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks; NaN without values."""
    ordered = np.fromiter(values, dtype=float)
    return float(np.percentile(ordered, percent)) if ordered.size else float("nan")


def why_unfair(arm: Arm, base: Arm) -> str | None:
    """Why a speed-up of `arm` over `base` would mean nothing; None if it means something.

    One of them may have done only the beginning of the other's work: see `is_estimate`.
    """
    for field in fields(Terms):
        mine, theirs = getattr(arm.terms, field.name), getattr(base.terms, field.name)
        if mine != theirs:
            what = field.name.replace("_", " ")
            return f"different {what} ({arm.name}: {mine}, {base.name}: {theirs})"
    shared = min(len(arm.work), len(base.work))
    if list(arm.work[:shared]) != list(base.work[:shared]):
        return f"{arm.name} and {base.name} did different work"
    for one in (arm, base):
        if one.num_prompt != (asked := num_prompt_tokens(one.work)):
            return f"{one.name} read {one.num_prompt} prompt tokens, but was given {asked}"
        if one.slots is not None and one.most_at_once > one.slots:
            return f"{one.name} served {one.most_at_once} requests at once, of {one.slots} allowed"
    return None


def is_estimate(arm: Arm, base: Arm) -> bool:
    """One of the two did only a part of the other's work, so comparing their rates estimates the rest."""
    return len(arm.work) != len(base.work)


def measure_usage(events: Sequence[Event], info: EngineInfo, step_seconds: float) -> Usage:
    """Add up what a run's events say. The pool must have been empty when they began.

    step_seconds: what all the steps took, from outside. Publishing the events is the part of it that no event
    can tell.
    """
    owned: dict[int, BlockDelta] = {}
    written = num_steps = wasted = preemptions = 0
    used_blocks: list[int] = []
    written_tokens: list[int] = []
    stages = dict.fromkeys(StepTimes._fields, 0.0)
    for event in events:
        for delta in event.blocks:
            if before := owned.pop(delta.block, None):
                written -= before.filled
            if delta.owners:
                owned[delta.block] = delta
                written += delta.filled
        if isinstance(event, StepEvent):
            num_steps += 1
            for stage, seconds in event.times._asdict().items():
                stages[stage] += seconds
            if event.num_waiting:
                wasted += info.max_num_seqs - len(event.slots)
            used_blocks.append(len(owned))
            written_tokens.append(written)
        else:
            preemptions += event.kind == "preempted"
    stages["emit"] = step_seconds - sum(stages.values())
    return Usage(
        num_steps=num_steps,
        wasted_slot_steps=wasted / max(num_steps * info.max_num_seqs, 1),
        peak_kv=max(used_blocks, default=0) / info.num_blocks,
        mean_kv=sum(used_blocks) / max(num_steps, 1) / info.num_blocks,
        written_kv=sum(written_tokens) / max(sum(used_blocks) * info.block_size, 1),
        num_preemptions=preemptions,
        stages={stage: seconds / (step_seconds or 1.0) for stage, seconds in stages.items()},
    )
