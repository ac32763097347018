"""The KV block pool: who owns which block of the paged KV cache.

The cache is cut into `num_blocks` blocks of `block_size` tokens. A request's context need not lie in
one piece: its block table lists the blocks that hold it, in order (PagedAttention, Kwon et al. 2023).

A block is in exactly one of three states:

* **used**: one or more requests own it (its reference count is the number of owners);
* **cached**: nobody owns it, but it still holds a full block of some prefix and can be hit;
* **free**: nobody owns it and it holds nothing of value.

so that used + cached + free == num_blocks, always. Allocation takes free blocks first and then evicts
cached ones, least recently used first.

**Prefix index.** A full, computed block is known by its content: (content id of the block before it,
its token ids). Content ids are handed out once and never again, so equal keys mean equal prefixes:
the dictionary compares the token ids themselves, and no hash collision can return a foreign block.
When a request fills a block whose content is already indexed, it gives its own copy back and shares
the indexed one. That keeps one rule true: the owner of a block also owns the block before it. A
parent is therefore never idle longer than its child, and eviction takes leaves before roots.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.events import BlockDelta, BlockState

ROOT = 0  # the content id that "comes before" the first block of every prompt


class OutOfBlocks(Exception):
    """Not enough free or evictable blocks: the caller's mistake, who must not exceed `num_available`."""


class CachedBlock(NamedTuple):
    block: int
    content_id: int


class BlockPool:
    """Block ids, owners, the free list and the prefix index. All operations are O(blocks touched).

    It hands out block numbers only; the tensors live in the model's KV cache.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, without owner, oldest first
        self._owners: list[list[str]] = [[] for _ in range(num_blocks)]
        self._index_in_table = [-1] * num_blocks
        self._filled = [0] * num_blocks
        self._cached: dict[tuple[int, tuple[int, ...]], CachedBlock] = {}
        self._cache_key: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its key in _cached
        self._next_content_id = ROOT + 1
        self._dirty: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: the free and the evictable ones."""
        return self.num_free + self.num_cached

    def ref_count(self, block: int) -> int:
        return len(self._owners[block])

    # -- owning ---------------------------------------------------------------------------------

    def allocate(self, owner: str, count: int, first_index: int) -> list[int]:
        """Give `owner` `count` empty blocks for places `first_index`.. of its block table.

        All or nothing: raises OutOfBlocks without touching anything if there are too few.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} available")
        blocks = []
        for index in range(first_index, first_index + count):
            block = self._free.popleft() if self._free else self._evict()
            self._owners[block].append(owner)
            self._index_in_table[block] = index
            self._filled[block] = 0
            self._dirty.add(block)
            blocks.append(block)
        return blocks

    def share(self, owner: str, blocks: Iterable[int]) -> None:
        """Make `owner` one more owner of cached or used blocks, at the table places they already have."""
        for block in blocks:
            if owner in self._owners[block]:
                raise ValueError(f"{owner} owns block {block} already")
            self._idle.pop(block, None)
            self._owners[block].append(owner)
            self._dirty.add(block)

    def release(self, owner: str, blocks: Sequence[int]) -> None:
        """Take `owner` off its blocks. Those left without owner become cached, or free.

        The last blocks of the table go first, so that among blocks released together the tail of a
        prefix is evicted before its head. Raises ValueError on a block that `owner` does not own.
        """
        for block in reversed(blocks):
            self._owners[block].remove(owner)
            self._dirty.add(block)
            if self._owners[block]:
                continue
            if block in self._cache_key:
                self._idle[block] = None
            else:
                self._clear(block)

    def set_filled(self, block: int, tokens: int) -> None:
        """Note that the first `tokens` places of the block are written."""
        self._filled[block] = tokens
        self._dirty.add(block)

    # -- the prefix index -----------------------------------------------------------------------

    def match_prefix(self, token_ids: Sequence[int]) -> list[CachedBlock]:
        """The longest run of indexed blocks that `token_ids` starts with. Claims nothing."""
        matched: list[CachedBlock] = []
        parent = ROOT
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            hit = self._cached.get((parent, tuple(token_ids[start : start + self.block_size])))
            if hit is None:
                break
            matched.append(hit)
            parent = hit.content_id
        return matched

    def publish(self, owner: str, block: int, parent: int, token_ids: tuple[int, ...]) -> CachedBlock:
        """Index a full, computed block that `owner` has, as the one that follows content `parent`.

        Returns the indexed block of that content. If that is another one, `owner` now shares it and
        has given `block` back, and must put the returned one into its block table.
        """
        key = (parent, token_ids)
        known = self._cached.get(key)
        if known is None:
            known = CachedBlock(block, self._next_content_id)
            self._next_content_id += 1
            self._cached[key] = known
            self._cache_key[block] = key
        elif known.block != block:
            self.share(owner, [known.block])
            self.release(owner, [block])
        return known

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are idle: claiming them takes them from what is available."""
        return sum(block in self._idle for block in blocks)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._cached[self._cache_key.pop(block)]
        return block

    def _clear(self, block: int) -> None:
        self._filled[block] = 0
        self._index_in_table[block] = -1
        self._dirty.add(block)
        self._free.append(block)

    # -- being seen -----------------------------------------------------------------------------

    def view(self, block: int) -> BlockDelta:
        """The block's present state, as events show it."""
        owners, filled = self._owners[block], self._filled[block]
        if owners:
            state: BlockState = "used" if filled else "reserved"
            return BlockDelta(block, state, tuple(owners), self._index_in_table[block], len(owners), filled)
        return BlockDelta(block, "cached" if block in self._idle else "free", (), -1, 0, filled)

    def drain_changes(self) -> tuple[BlockDelta, ...]:
        """Every block that changed since the last call."""
        changes = tuple(self.view(block) for block in sorted(self._dirty))
        self._dirty.clear()
        return changes

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the index is sound."""
        free, idle = set(self._free), set(self._idle)
        used = {block for block, owners in enumerate(self._owners) if owners}
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert not (free & idle or free & used or idle & used), "a block is in two states"
        assert free | idle | used == set(range(self.num_blocks)), "a block is in no state"
        assert all(len(set(owners)) == len(owners) for owners in self._owners), "an owner counts twice"
        assert idle <= self._cache_key.keys(), "an idle block is not indexed"
        assert self._cache_key.keys() <= idle | used, "a free block is indexed"
        assert len(self._cached) == len(self._cache_key), "index and blocks disagree"
        content_ids = {ROOT} | {hit.content_id for hit in self._cached.values()}
        for (parent, _), hit in self._cached.items():
            assert parent in content_ids, f"block {hit.block} is indexed behind an evicted parent"
