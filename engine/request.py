"""A request and its life: waiting -> running -> finished, with detours back to waiting."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.detokenizer import Detokenizer


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what has become of it. Owned by the thread that steps the engine.

    Progress is one number, `num_computed_tokens`: how many of `token_ids` (prompt, then output) are in
    the KV cache. Prefill, a chunk of it, decode and recompute after a preemption are all just
    "compute some more of them", so nothing here says which phase the request is in.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, cut to what the context limit leaves
    stop_tokens: dict[int, int | str | None]  # tokens that end it -> the stop_reason to report
    detokenizer: Detokenizer
    rng: random.Random
    arrival: int  # submission order; keeps a preempted request's place in the queue
    arrival_time: float  # seconds, monotonic clock
    priority: int = 0  # lower goes first
    index: int = 0  # which of the prompt's `n` continuations this is
    group: list[Request] = field(default_factory=list)  # all of them; who comes first computes the prompt

    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    content_ids: list[int] = field(default_factory=list)  # of the leading blocks that are indexed
    num_cached_tokens: int | None = None  # prompt tokens the prefix cache saved; None until admitted
    num_preemptions: int = 0
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    is_overdue: bool = False  # was overtaken often enough: from now on it goes before any priority

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.group.append(self)

    @property
    def leader(self) -> Request:
        """The first continuation of the same prompt, whose id is that of the whole."""
        return self.group[0]

    @property
    def held_slot(self) -> int:
        """The slot of a running request."""
        assert self.slot is not None, f"{self.request_id} is not running"
        return self.slot

    @property
    def was_admitted(self) -> bool:
        """It had a slot before."""
        return self.num_cached_tokens is not None

    @property
    def sort_key(self) -> tuple[bool, int, int]:
        """The order of service: the overdue, then by priority, then first come, first served."""
        return not self.is_overdue, self.priority, self.arrival

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only its newest output token is missing from the KV cache."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1
