"""Exercise 8: after every step, what you read from the events is what the engine has."""

from __future__ import annotations

import random

import pytest

from docs.runs import make_engine, tokens
from engine import SamplingParams
from engine.events import BlockDelta
from tests.support import tiny_loaded


def test_the_newest_state_of_a_block_counts(exercise):
    blocks: dict[int, BlockDelta] = {}
    engine = make_engine(tiny_loaded())
    engine.add_request("a", [40, 41, 42], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    exercise.follow(blocks, engine.events.read(0).events)
    assert exercise.block_tables(blocks) == {}  # all were given back
    assert exercise.num_tokens_in(blocks, "a") == 0


@pytest.mark.parametrize("mode", ["naive", "static", "continuous"])
def test_your_block_tables_are_the_engines(exercise, mode):
    """Requests of all lengths, which share prompts and are put out for lack of blocks.

    Blocks change hands between two steps too: one request is aborted, and once the mode is switched.
    """
    rng = random.Random(8)
    engine = make_engine(tiny_loaded(), mode, num_blocks=12, max_model_len=96)
    shared = tokens(rng, 32)
    for number in range(8):
        prompt = shared[: rng.choice([16, 32])] + tokens(rng, rng.randint(1, 12))
        params = SamplingParams(max_tokens=rng.randint(4, 40), temperature=0, ignore_eos=True)
        engine.add_request(f"r{number}", prompt, params)
    blocks: dict[int, BlockDelta] = {}
    cursor = 0
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
        if steps == 3:
            engine.abort(engine._scheduler.running[0].request_id)
        if steps == 12:
            engine.set_mode("continuous" if mode == "static" else "static")
        reading = engine.events.read(cursor)
        cursor = reading.cursor
        exercise.follow(blocks, reading.events)
        running = {request.request_id: request for request in engine._scheduler.running}
        assert exercise.block_tables(blocks) == {
            name: request.block_table for name, request in running.items()
        }
        for name, request in running.items():
            assert exercise.num_tokens_in(blocks, name) == request.num_computed_tokens
