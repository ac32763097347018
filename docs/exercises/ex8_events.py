"""Exercise 8: see the engine through its events alone, as the page does.

.venv/bin/python -m pytest docs/exercises/test_ex8_events.py
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.events import BlockDelta, Event


def follow(blocks: dict[int, BlockDelta], events: Iterable[Event]) -> None:
    """Bring `blocks`, the last that was told of each physical block, up to date, in place.

    Each event, of whatever kind, has the blocks that changed, `event.blocks`, in their new state (see
    `BlockDelta`).
    """
    raise NotImplementedError("exercise 8: follow")


def block_tables(blocks: dict[int, BlockDelta]) -> dict[str, list[int]]:
    """The block table of every request that owns blocks: their numbers, in the order of its tokens.

    A block may have several owners, and stands in the tables of all of them, at the same place.
    """
    raise NotImplementedError("exercise 8: block_tables")


def num_tokens_in(blocks: dict[int, BlockDelta], request_id: str) -> int:
    """How many tokens of a request are in the KV cache."""
    raise NotImplementedError("exercise 8: num_tokens_in")
