"""Solution of exercise 4."""

from __future__ import annotations


def grant(missing: list[int], budget: int) -> list[int]:
    granted = [0] * len(missing)
    oldest = list(range(len(missing)))
    shortest = sorted(oldest, key=lambda prompt: missing[prompt])  # sorting keeps the order of equals
    half = budget - budget // 2
    for order, most in ((oldest, half), (shortest, budget)):
        for prompt in order:
            more = min(most - sum(granted), missing[prompt] - granted[prompt])
            granted[prompt] += max(0, more)
    return granted
