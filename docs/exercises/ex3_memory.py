"""Exercise 3: write the allocator of a paged cache.

.venv/bin/python -m pytest docs/exercises/test_ex3_memory.py
"""

from __future__ import annotations

from engine.memory import OutOfBlocks  # noqa: F401 - what `grow` raises


class Allocator:
    """Hands out blocks of a KV cache. Each owner has a block table: the blocks of its tokens, in order.

    num_blocks: blocks in the cache, numbered from 0. block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        raise NotImplementedError("exercise 3: Allocator")

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        raise NotImplementedError("exercise 3: num_free")

    def grow(self, owner: str, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens of an owner, those it had before included.

        Takes only the blocks that are missing, and none if there is room already. All or nothing: raises
        OutOfBlocks and changes nothing if too few are free.
        """
        raise NotImplementedError("exercise 3: grow")

    def table(self, owner: str) -> list[int]:
        """The owner's block table; empty if it owns nothing."""
        raise NotImplementedError("exercise 3: table")

    def place(self, owner: str, position: int) -> int:
        """Where an owner's token number `position` (from 0) lies: block * block_size + place in the block."""
        raise NotImplementedError("exercise 3: place")

    def release(self, owner: str) -> None:
        """Take all blocks back from an owner that has some."""
        raise NotImplementedError("exercise 3: release")
