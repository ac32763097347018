"""What a trace comes to in numbers, and whether two traces did the same work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.events import LifecycleEvent, StepEvent
from engine.trace import Trace
from visualizer.measures import percentile


class Work(NamedTuple):
    """What one request took. `reason` is how it ended; empty if it did not."""

    prompt: int
    output: int
    reason: str


def work_of(trace: Trace) -> dict[str, Work]:
    """Request by request, of those submitted in the trace."""
    work: dict[str, Work] = {}
    for event in trace.events:
        if not isinstance(event, LifecycleEvent):
            continue
        if event.kind == "submitted":
            work[event.request_id] = Work(event.num_tokens, 0, "")
        elif event.kind in ("finished", "aborted") and event.request_id in work:
            reason = event.reason if event.kind == "finished" else "abort"
            work[event.request_id] = work[event.request_id]._replace(output=event.num_tokens, reason=reason)
    return work


def difference(a: Trace, b: Trace) -> str:
    """Why two traces cannot be compared by their time, in words; empty if they did equal work."""
    ours, theirs = work_of(a), work_of(b)
    if not ours:
        return "no request was submitted"
    for name, work in [*ours.items(), *theirs.items()]:
        if work.reason not in ("length", "stop"):
            return f"request {name} did not come to its end ({work.reason or 'still running'})"
    if ours.keys() != theirs.keys():
        return f"one served {len(ours)} requests, the other {len(theirs)}, and not the same"
    for name, work in ours.items():
        if work != theirs[name]:
            mine, other = f"{work.prompt} + {work.output}", f"{theirs[name].prompt} + {theirs[name].output}"
            return f"request {name} took {mine} tokens in one and {other} in the other"
    return ""


def summarise(trace: Trace, arrivals: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Numbers of a whole trace, as JSON data; None where nothing was there to measure.

    seconds: from its start to its last event. ttft, gap: median and 95th percentile of the time to the
    first token and between two tokens, in seconds. wasted: slot-steps idle while somebody waited.
    arrivals: when each request came, in the trace's time, if its engine saw it only later.
    """
    info = trace.keyframe.info
    submitted = dict(arrivals or {})
    last_token: dict[str, float] = {}
    ttft: list[float] = []
    gaps: list[float] = []
    used: list[int] = []
    tokens = wasted = preemptions = hits = 0
    modes: list[str] = []
    for event in trace.events:
        if isinstance(event, LifecycleEvent):
            match event.kind:
                case "submitted":
                    submitted.setdefault(event.request_id, event.time)
                case "first_token" if event.request_id in submitted:
                    ttft.append(event.time - submitted[event.request_id])
                case "preempted":
                    preemptions += event.reason != "mode"
                case "prefix_hit":
                    hits += event.num_tokens
            continue
        if event.mode not in modes:
            modes.append(event.mode)
        used.append(event.num_used)
        wasted += info.max_num_seqs - len(event.slots) if event.num_waiting else 0
        for use in event.slots:
            tokens += use.num_sampled
            if use.num_sampled and use.request_id in last_token:
                gaps.append(event.time - last_token[use.request_id])
            if use.num_sampled:
                last_token[use.request_id] = event.time
    seconds = trace.events[-1].time - trace.keyframe.time if trace.events else 0.0
    return {
        "modes": modes,
        "seconds": round(seconds, 4),
        "requests": len(work_of(trace)),
        "output_tokens": tokens,
        "rate": round(tokens / seconds, 1) if seconds > 0 else None,
        "steps": len(used),
        "slot_steps": len(used) * info.max_num_seqs,
        "wasted": wasted,
        "ttft": _pair(ttft),
        "gap": _pair(gaps),
        "peak_blocks": max(used, default=0),
        "mean_blocks": round(sum(used) / len(used), 1) if used else 0,
        "num_blocks": info.num_blocks,
        "preemptions": preemptions,
        "prefix_hit_tokens": hits,
        "forward_seconds": round(sum(e.times.forward for e in trace.events if isinstance(e, StepEvent)), 4),
    }


def _pair(values: list[float]) -> list[float] | None:
    median, late = percentile(values, 0.5), percentile(values, 0.95)
    return None if median is None or late is None else [round(median, 4), round(late, 4)]
