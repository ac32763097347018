"""Solution of exercise 8."""

from __future__ import annotations

from collections.abc import Iterable

from engine.events import BlockDelta, Event


def follow(blocks: dict[int, BlockDelta], events: Iterable[Event]) -> None:
    for event in events:
        blocks.update((delta.block, delta) for delta in event.blocks)


def block_tables(blocks: dict[int, BlockDelta]) -> dict[str, list[int]]:
    tables: dict[str, list[int]] = {}
    for delta in sorted(blocks.values(), key=lambda delta: delta.table_index):
        for owner in delta.owners:
            tables.setdefault(owner, []).append(delta.block)
    return tables


def num_tokens_in(blocks: dict[int, BlockDelta], request_id: str) -> int:
    return sum(delta.filled for delta in blocks.values() if request_id in delta.owners)
