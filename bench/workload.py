"""The work that every contender gets: W96, or the first part of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

W96_REQUESTS = 96
W96_LARGEST_TOKEN = 40_000
WARM_UP_REQUESTS = 8  # the first of the workload, cut to WARM_UP_TOKENS each
WARM_UP_TOKENS = 8
SMALLEST_TOKEN = 100  # those below are special in many vocabularies


class WorkItem(NamedTuple):
    """One request: a prompt of token ids, how many tokens to generate, and when it arrives."""

    prompt: tuple[int, ...]
    num_output: int
    due: float = 0.0  # seconds after the first request


def build_workload(
    num_requests: int = W96_REQUESTS,
    request_rate: float | None = None,
    largest_token: int = W96_LARGEST_TOKEN,
) -> list[WorkItem]:
    """W96 for 96 requests; fewer are its beginning, more continue its random sequence.

    request_rate: mean arrivals a second of a Poisson process, seeded too; None has all arrive at once.
    largest_token: lower than W96's only for a model whose vocabulary is smaller; the lengths stay the same.
    """
    rng, arrivals = random.Random(7), random.Random(8)
    work, due = [], 0.0
    for _ in range(num_requests):
        num_prompt, num_output = rng.randint(16, 128), rng.randint(32, 160)
        tokens = [rng.randint(SMALLEST_TOKEN, W96_LARGEST_TOKEN) for _ in range(num_prompt)]
        prompt = tuple(_fold(token, largest_token) for token in tokens)
        work.append(WorkItem(prompt, num_output, due))
        due += arrivals.expovariate(request_rate) if request_rate else 0.0
    return work


def _fold(token: int, largest: int) -> int:
    return SMALLEST_TOKEN + (token - SMALLEST_TOKEN) % (largest - SMALLEST_TOKEN + 1)


def num_output_tokens(work: Sequence[WorkItem]) -> int:
    return sum(item.num_output for item in work)


def num_prompt_tokens(work: Sequence[WorkItem]) -> int:
    return sum(len(item.prompt) for item in work)


def describe_work(work: Sequence[WorkItem]) -> str:
    """The work in one line."""
    arrival = f"arriving over {work[-1].due:.1f} s" if work[-1].due else "all at once"
    return (
        f"{len(work)} requests {arrival}: {num_prompt_tokens(work)} prompt tokens, "
        f"{num_output_tokens(work)} output tokens"
    )
