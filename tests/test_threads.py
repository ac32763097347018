"""How many threads compute: cores that others use are left to them, and taken back."""

import subprocess
import sys
import threading
import time
import weakref

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import threads
from engine.threads import LEAVE_CORE, TAKE_CORE, ComputeThreads, cores_to_leave
from tests.support import greedy, tiny_llm

BUSY = "while True: pass"


@pytest.fixture
def two_threads(monkeypatch):
    """torch computes with 2 threads, on 2 cores, and looks at others as often as it is asked."""
    monkeypatch.setattr(threads, "core_ids", lambda: {0, 1})
    monkeypatch.setattr(threads, "LOOK_SECONDS", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def observe(monkeypatch, shares: list[float]) -> list[int]:
    """The teams' sizes when others keep `shares` cores busy, one share between each two looks."""
    seconds, now = [0.0], [0.0]
    monkeypatch.setattr(ComputeThreads, "_seconds_of_others", lambda self: seconds[0])
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    compute, sizes = ComputeThreads(), []
    for share in [0.0, *shares]:
        now[0] += 1.0
        seconds[0] += share
        with compute.team() as size:
            assert torch.get_num_threads() == size
            sizes.append(size)
        assert torch.get_num_threads() == 2, "what the user set is back after the step"
    return sizes[1:]


def test_a_core_that_others_use_is_left_to_them_and_taken_back(two_threads, monkeypatch):
    assert observe(monkeypatch, [0.2, 0.9, 1.0, 0.2, 0.05, 0.2]) == [2, 1, 1, 1, 2, 2]


def test_one_thread_always_remains(two_threads, monkeypatch):
    assert observe(monkeypatch, [5.0, 90.0, 2.0]) == [1, 1, 1]


def test_a_users_own_number_of_threads_is_kept(two_threads, monkeypatch):
    monkeypatch.setattr(ComputeThreads, "_seconds_of_others", lambda self: pytest.fail("nothing to decide"))
    torch.set_num_threads(1)
    with ComputeThreads().team() as size:
        assert size == torch.get_num_threads() == 1


def test_the_number_is_back_after_a_step_that_failed(two_threads, monkeypatch):
    monkeypatch.setattr(ComputeThreads, "_look", lambda self: setattr(self, "_left", 1))
    with pytest.raises(RuntimeError), ComputeThreads().team() as size:
        assert size == 1
        raise RuntimeError
    assert torch.get_num_threads() == 2


def test_where_threads_cannot_be_looked_at_all_compute(two_threads, monkeypatch):
    def refuse(self):
        raise psutil.AccessDenied

    monkeypatch.setattr(ComputeThreads, "_seconds_of_others", refuse)
    compute = ComputeThreads()
    for _ in range(3):
        with compute.team() as size:
            assert size == 2


@given(st.floats(0, 64), st.integers(0, 64))
def test_what_is_left_settles_at_once_and_covers_what_others_take(others, left):
    settled = cores_to_leave(others, left)
    assert cores_to_leave(others, settled) == settled
    assert settled >= others - LEAVE_CORE
    assert settled <= left or settled < others - LEAVE_CORE + 1
    assert settled == 0 or others >= settled - 1 + TAKE_CORE


@pytest.mark.skipif(not hasattr(psutil, "PROCFS_PATH"), reason="Linux lets a process look at its threads")
def test_other_programs_count_and_own_computing_does_not():
    compute = ComputeThreads()
    compute._computing.add(threading.current_thread())

    def others_while(work) -> float:
        seconds, start = compute._seconds_of_others(), time.monotonic()
        work()
        return (compute._seconds_of_others() - seconds) / (time.monotonic() - start)

    def compute_alone() -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

    background = min(others_while(compute_alone) for _ in range(3))
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        time.sleep(0.3)
        beside = max(others_while(lambda: time.sleep(1)) for _ in range(3))
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert beside > background + 0.5


def team_size() -> int:
    """The threads of this process that are not Python's."""
    python = {thread.native_id for thread in threading.enumerate()}
    return sum(thread.id not in python for thread in psutil.Process().threads())


@pytest.fixture
def no_team(two_threads, monkeypatch):
    """How many threads there are when no team waits; engines of other tests are forgotten."""
    if threads._gnu_openmp() is None:
        pytest.skip("other kinds of OpenMP let any number of threads spin")
    monkeypatch.setattr(ComputeThreads, "_all", weakref.WeakSet())
    threads.release_team()
    return team_size()


def test_whoever_has_computed_lets_its_team_go(no_team):
    torch.relu(torch.zeros(1 << 20))
    assert team_size() == no_team + 1, "the team waits for more"
    engine = tiny_llm().engine
    assert team_size() == no_team, "whoever makes an engine need not be who steps it"
    engine.add_request("a", [5, 6, 7], greedy(3))
    engine.step()
    assert team_size() == no_team + 1, "an engine keeps its team from step to step"
    while engine.has_unfinished():
        engine.step()
    assert team_size() == no_team, "but not when it has nothing to do"


def test_of_several_engines_none_keeps_its_team_from_step_to_step(no_team):
    engines = [tiny_llm().engine, tiny_llm().engine]
    for engine in engines:
        engine.add_request("a", [5, 6, 7], greedy(3))
        engine.step()
        assert team_size() == no_team
        assert engine.has_unfinished()


@pytest.mark.skipif(not hasattr(psutil, "PROCFS_PATH"), reason="Linux lets a process look at its threads")
def test_a_team_that_was_let_go_does_not_count_as_others(no_team, monkeypatch):
    """Its processor time is the engine's, though its threads are not there to be asked any more."""
    monkeypatch.setattr(threads, "core_ids", lambda: set(range(psutil.cpu_count())))
    compute = ComputeThreads()
    compute._computing.add(threading.current_thread())

    def others_while_a_team_computes() -> float:
        seconds, start = compute._seconds_of_others(), time.monotonic()
        while time.monotonic() < start + 1.5:
            torch.relu(torch.zeros(1 << 22))
        threads.release_team()
        return (compute._seconds_of_others() - seconds) / (time.monotonic() - start)

    assert min(others_while_a_team_computes() for _ in range(3)) < LEAVE_CORE
