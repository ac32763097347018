"""Exercise 3: what every allocator must hold to, and the engine's own pool beside it."""

from __future__ import annotations

import random

import pytest

from engine.memory import BlockPool, OutOfBlocks


def test_blocks_come_one_at_a_time(exercise):
    allocator = exercise.Allocator(num_blocks=4, block_size=16)
    allocator.grow("a", 16)
    assert len(allocator.table("a")) == 1 and allocator.num_free == 3
    allocator.grow("a", 17)
    assert len(allocator.table("a")) == 2 and allocator.num_free == 2
    allocator.grow("a", 5)  # it has more already
    assert len(allocator.table("a")) == 2


def test_growing_keeps_what_is_there(exercise):
    allocator = exercise.Allocator(8, 4)
    allocator.grow("a", 6)
    before = list(allocator.table("a"))
    allocator.grow("b", 9)
    allocator.grow("a", 20)
    assert allocator.table("a")[:2] == before
    assert not set(allocator.table("a")) & set(allocator.table("b"))


def test_too_much_is_refused_and_changes_nothing(exercise):
    allocator = exercise.Allocator(3, 4)
    allocator.grow("a", 8)
    before = list(allocator.table("a"))
    with pytest.raises(OutOfBlocks):
        allocator.grow("a", 13)
    with pytest.raises(OutOfBlocks):
        allocator.grow("b", 5)
    assert allocator.table("a") == before and allocator.table("b") == [] and allocator.num_free == 1


def test_places_follow_the_table(exercise):
    allocator = exercise.Allocator(8, 4)
    allocator.grow("other", 4)
    allocator.grow("a", 10)
    table = allocator.table("a")
    assert [allocator.place("a", p) for p in range(10)] == [table[p // 4] * 4 + p % 4 for p in range(10)]


def test_a_random_life_beside_the_engines_pool(exercise):
    """After each action as many blocks are free as in `engine.memory.BlockPool`, and no block is lost."""
    rng = random.Random(3)
    allocator, pool = exercise.Allocator(12, 4), BlockPool(12, 4)
    tables: dict[str, list[int]] = {}
    for _ in range(500):
        owner = rng.choice("abcdef")
        if owner in tables and rng.random() < 0.4:
            allocator.release(owner)
            pool.release(owner, tables.pop(owner))
        else:
            wanted = rng.randint(1, 24)
            missing = max(0, -(-wanted // 4) - len(tables.get(owner, [])))
            try:
                new = pool.allocate(owner, missing, len(tables.get(owner, [])))
            except OutOfBlocks:
                with pytest.raises(OutOfBlocks):
                    allocator.grow(owner, wanted)
            else:
                allocator.grow(owner, wanted)
                tables[owner] = tables.get(owner, []) + new
        assert allocator.num_free == pool.num_free
        owned = [block for name in tables for block in allocator.table(name)]
        assert len(set(owned)) == len(owned) == 12 - allocator.num_free
        assert all(0 <= block < 12 for block in owned)
