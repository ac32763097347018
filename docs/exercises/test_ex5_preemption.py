"""Exercise 5: the engine runs with your choice of victim, in a pool that is too small."""

from __future__ import annotations

import itertools
import random

import pytest

from docs.runs import Ask, make_engine, serve, tokens, transitions
from engine.request import Request
from engine.scheduler import Schedule, Scheduler
from tests.support import tiny_loaded


def requests(*priorities: int) -> list[Request]:
    """Requests in order of arrival, one for each priority."""
    engine = make_engine(tiny_loaded())
    return [engine.make_request(f"r{i}", [40, 41], None, priority) for i, priority in enumerate(priorities)]


def test_the_latest_arrival_goes(exercise):
    running = requests(0, 0, 0)
    for order in itertools.permutations(running):  # it does not matter how they are listed
        assert exercise.choose_victim(list(order)) is running[-1]


def test_whoever_matters_less_goes_before(exercise):
    running = requests(0, 5, 0)  # a lower number goes first
    assert exercise.choose_victim(running) is running[1]


def test_who_was_overtaken_often_enough_stays(exercise):
    running = requests(0, 0, 5)
    running[-1].is_overdue = True  # now it goes before any priority
    assert exercise.choose_victim(running) is running[1]


def test_one_alone_has_to_go_itself(exercise):
    (alone,) = requests(0)
    assert exercise.choose_victim([alone]) is alone


@pytest.mark.timeout(60)
def test_the_engine_runs_with_it(exercise, monkeypatch):
    """Everybody comes to an end, and answers what it would have answered alone."""

    def make_room(self: Scheduler, request: Request, schedule: Schedule) -> bool:
        """`Scheduler._make_room_for_next_token`, with the victim that the exercise chooses."""
        if request.num_computed_tokens < len(request.block_table) * self.pool.block_size:
            return True
        while self.pool.num_available == 0:
            victim = exercise.choose_victim(list(self.running))
            self._requeue(victim)
            victim.num_preemptions += 1
            schedule.preempted.append(victim)
            if victim is request:
                return False
        request.block_table += self.pool.allocate(request.request_id, 1, len(request.block_table))
        return True

    rng = random.Random(5)
    asks = [Ask(f"r{i}", tokens(rng, 20), 60) for i in range(6)]
    alone = {ask.name: serve(make_engine(tiny_loaded()), [ask]).answers[ask.name] for ask in asks}
    monkeypatch.setattr(Scheduler, "_make_room_for_next_token", make_room)
    served = serve(make_engine(tiny_loaded(), num_blocks=12, max_model_len=192), asks)
    assert transitions(served.trace, "preempted")
    assert served.answers == alone
