"""Solution of exercise 6."""

from __future__ import annotations

from collections.abc import Hashable


def block_keys(token_ids: list[int], block_size: int) -> list[Hashable]:
    keys: list[Hashable] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = keys[-1] if keys else None
        keys.append((parent, tuple(token_ids[end - block_size : end])))
    return keys


def num_cached_tokens(known: set[Hashable], token_ids: list[int], block_size: int) -> int:
    count = 0
    for key in block_keys(token_ids[:-1], block_size):
        if key not in known:
            break
        count += block_size
    return count
