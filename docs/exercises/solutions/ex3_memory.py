"""Solution of exercise 3."""

from __future__ import annotations

from engine.memory import OutOfBlocks


class Allocator:
    def __init__(self, num_blocks: int, block_size: int):
        self._block_size = block_size
        self._free = list(range(num_blocks))
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, owner: str, num_tokens: int) -> None:
        table = self.table(owner)
        missing = -(-num_tokens // self._block_size) - len(table)  # rounded up
        if missing > len(self._free):
            raise OutOfBlocks(f"{missing} blocks wanted, {len(self._free)} free")
        if missing > 0:
            self._tables[owner] = table + [self._free.pop() for _ in range(missing)]

    def table(self, owner: str) -> list[int]:
        return list(self._tables.get(owner, []))

    def place(self, owner: str, position: int) -> int:
        block = self._tables[owner][position // self._block_size]
        return block * self._block_size + position % self._block_size

    def release(self, owner: str) -> None:
        self._free += self._tables.pop(owner)
