"""The block pool: ownership, states, the prefix index and its eviction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory import ROOT, BlockPool, OutOfBlocks


def fill(pool: BlockPool, owner: str, token_ids: list[int]) -> list[int]:
    """What the engine does for a prompt: share what is cached, allocate and index the rest."""
    hits = pool.match_prefix(token_ids)
    table = [hit.block for hit in hits]
    pool.share(owner, table)
    table += pool.allocate(owner, -(-len(token_ids) // pool.block_size) - len(hits), len(hits))
    parent = hits[-1].content_id if hits else ROOT
    for index in range(len(hits), len(token_ids) // pool.block_size):
        tokens = tuple(token_ids[index * pool.block_size : (index + 1) * pool.block_size])
        pool.set_filled(table[index], pool.block_size)
        known = pool.publish(owner, table[index], parent, tokens)
        table[index], parent = known.block, known.content_id
    return table


def test_states_add_up_and_released_prefixes_stay_hittable():
    pool = BlockPool(8, 4)
    table = fill(pool, "a", list(range(10)))  # two full blocks and a part
    assert (pool.num_used, pool.num_cached, pool.num_free) == (3, 0, 5)
    pool.release("a", table)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 6)
    assert [hit.block for hit in pool.match_prefix(list(range(12)))] == table[:2]
    assert pool.match_prefix([9, *range(1, 12)]) == []
    pool.check_integrity()


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, 4)
    pool.allocate("a", 3, 0)
    with pytest.raises(OutOfBlocks):
        pool.allocate("b", 2, 0)
    assert pool.num_available == 1
    pool.check_integrity()


def test_releasing_twice_or_what_is_not_owned_is_an_error():
    pool = BlockPool(4, 4)
    table = pool.allocate("a", 2, 0)
    pool.release("a", table)
    with pytest.raises(ValueError):
        pool.release("a", table)
    with pytest.raises(ValueError):
        pool.release("b", table)
    pool.check_integrity()


def test_shared_block_outlives_its_first_owner():
    pool = BlockPool(4, 4)
    prompt = list(range(8))
    first, second = fill(pool, "a", prompt), fill(pool, "b", prompt)
    assert first == second and pool.ref_count(first[0]) == 2
    pool.release("a", first)
    assert pool.num_used == 2
    assert pool.view(first[0]).owners == ("b",)


def test_equal_content_computed_twice_is_merged():
    pool = BlockPool(4, 4)
    one, two = pool.allocate("a", 1, 0), pool.allocate("b", 1, 0)
    tokens = (1, 2, 3, 4)
    known = pool.publish("a", one[0], ROOT, tokens)
    assert pool.publish("b", two[0], ROOT, tokens) == known
    assert pool.ref_count(one[0]) == 2 and pool.num_free == 3
    pool.check_integrity()


def test_tails_are_evicted_before_heads():
    pool = BlockPool(3, 4)
    table = fill(pool, "a", list(range(12)))
    pool.release("a", table)
    pool.allocate("b", 1, 0)
    assert [hit.block for hit in pool.match_prefix(list(range(12)))] == table[:2]


def test_no_hit_beyond_an_evicted_gap():
    pool = BlockPool(4, 4)
    first = fill(pool, "a", list(range(12)))
    pool.release("a", first)
    pool.share("b", first[1:])  # the head alone stays idle, and is evicted
    pool.allocate("c", 2, 0)
    assert pool.match_prefix(list(range(12))) == []


def test_changes_are_reported_once():
    pool = BlockPool(4, 4)
    table = pool.allocate("a", 2, 0)
    assert {delta.block: delta.state for delta in pool.drain_changes()} == dict.fromkeys(table, "reserved")
    assert pool.drain_changes() == ()


@given(st.lists(st.tuples(st.sampled_from("fr"), st.integers(0, 5), st.integers(1, 20)), max_size=60))
def test_any_order_of_filling_and_releasing_keeps_the_books(actions):
    pool = BlockPool(12, 4)
    tables: dict[str, list[int]] = {}
    for action, who, length in actions:
        owner = f"r{who}"
        if action == "f" and owner not in tables:
            prompt = [who % 2] * length  # few distinct prompts: many shared prefixes
            hits = pool.match_prefix(prompt)
            if -(-length // 4) - len(hits) <= pool.num_available - pool.num_idle(hit.block for hit in hits):
                tables[owner] = fill(pool, owner, prompt)
        elif action == "r" and owner in tables:
            pool.release(owner, tables.pop(owner))
        pool.check_integrity()
        assert pool.num_used == len({block for table in tables.values() for block in table})
        for owner, table in tables.items():
            assert all(owner in pool.view(block).owners for block in table)
