"""What comes out: deltas while a request runs, the whole once it is done. Same types for both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Logprob(NamedTuple):
    """What the model thought of one token: natural log of its probability, and its rank, 1 the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. In a delta, `text` and `token_ids` hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token id or string that matched, if one of the caller's
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token, by token id; None if not asked for

    def copy(self) -> CompletionOutput:
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return replace(self, token_ids=list(self.token_ids), logprobs=logprobs)

    def extend(self, delta: CompletionOutput) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on one monotonic clock; None for what has not happened."""

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` continuations, by index; in a delta, those that moved."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None  # what went wrong, if finish_reason is "error"

    def extend(self, delta: RequestOutput) -> None:
        """Append a later delta of the same request, so that this becomes the output so far."""
        for new in delta.outputs:
            mine = next((output for output in self.outputs if output.index == new.index), None)
            if mine is None:
                # A copy, since it will grow here, and the delta is somebody else's to read.
                self.outputs = sorted([*self.outputs, new.copy()], key=lambda output: output.index)
            else:
                mine.extend(new)
        self.num_cached_tokens = delta.num_cached_tokens
        self.finished, self.metrics = delta.finished, delta.metrics
        self.error = self.error or delta.error


@dataclass(slots=True)
class EngineStats:
    """A snapshot of an engine's counters. used + cached + free == num_blocks."""

    mode: str
    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int = 0  # of requests accepted so far
    num_output_tokens: int = 0  # produced so far
    num_finished: dict[str, int] = field(default_factory=dict)  # requests ended so far, by finish_reason
