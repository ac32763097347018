"""How many threads compute a step: as many as there are cores that nobody else wants.

An operation on several threads is done when the last of them is, so on a core that another program shares
everybody waits for it, again at each of a step's thousand operations. Measured on 2 cores: beside a browser
that is busy all the time a step on both cores takes five times as long as alone, on one core less than
twice. Waiting threads must spin meanwhile, not sleep: waking them costs as much as the operation.

Each Python thread that computes has a team of its own, which waits for it for ever. As soon as the teams
together have more threads than there are cores, GNU's OpenMP lets none of them spin any more
(`GOMP_SPINCOUNT` in its manual): an engine on a thread of its own took twice as long for a step as one on
the thread that had loaded the model. So whoever has computed lets its team go.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import psutil
import torch

LOOK_SECONDS = 0.5  # the kernel counts processor time in hundredths of a second
# A core of which others take more than this share of the time is left to them; it is taken back when they
# take less than the smaller share. Between, a step on all cores and one on a core less took equally long.
LEAVE_CORE, TAKE_CORE = 0.3, 0.15


class ComputeThreads:
    """Decides before a step on the CPU with how many threads it runs; one for each engine.

    `torch.get_num_threads()` is the most it uses, so a user's `torch.set_num_threads` holds.
    """

    _all: ClassVar[weakref.WeakSet[ComputeThreads]] = weakref.WeakSet()  # one for each engine
    _computing: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()  # engines': they take turns

    def __init__(self) -> None:
        self._all.add(self)
        self._cores = core_ids()
        self._left = 0  # cores left to others
        self._seen: tuple[float, float] | None = None  # when, and seconds that others had computed by then

    @contextmanager
    def team(self) -> Iterator[int]:
        """While it is open, torch computes with the number of threads that it yields.

        An engine that is not alone lets its team go afterwards, since another one may be next.
        """
        most = torch.get_num_threads()
        if most == 1:
            yield 1
            return
        try:
            with self._size(most) as size:
                yield size
        finally:
            if len(self._all) > 1:
                release_team()

    @contextmanager
    def _size(self, most: int) -> Iterator[int]:
        self._computing.add(threading.current_thread())
        self._look()
        threads = min(most, max(1, len(self._cores) - self._left))
        if threads == most:
            yield most
            return
        torch.set_num_threads(threads)
        try:
            yield threads
        finally:
            torch.set_num_threads(most)

    def _look(self) -> None:
        now = time.monotonic()
        if self._seen is not None and now - self._seen[0] < LOOK_SECONDS:
            return
        try:
            others = self._seconds_of_others()
        except (psutil.Error, OSError):  # not everywhere may a process look at threads: then all compute
            self._left, self._seen = 0, (math.inf, 0.0)
            return
        if self._seen is not None:
            self._left = cores_to_leave((others - self._seen[1]) / (now - self._seen[0]), self._left)
        self._seen = (now, others)

    def _seconds_of_others(self) -> float:
        """Processor time on this process's cores that went neither to an engine's thread nor to its team."""
        cores = psutil.cpu_times(percpu=True)
        busy = sum(
            times.user + times.nice + times.system  # a guest's time is in user
            for core, times in enumerate(cores)
            if core in self._cores
        )
        computing = {thread.native_id for thread in self._computing}
        serving = {thread.native_id for thread in threading.enumerate()} - computing
        # What is no Python thread belongs to torch: the team of one of the engines. The process's own time
        # holds that of teams that were let go, which no list of threads does.
        process = psutil.Process()
        total = process.cpu_times()
        served = sum(
            thread.user_time + thread.system_time for thread in process.threads() if thread.id in serving
        )
        ours = total.user + total.system - served
        return busy - ours


def release_team() -> None:
    """End the threads that OpenMP keeps for this thread's next operation, which starts new ones in 0.1 ms."""
    if openmp := _gnu_openmp():
        openmp.omp_pause_resource_all(1)  # 1: omp_pause_soft, which keeps the settings


@functools.cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch has loaded, if it is GNU's; others let threads spin whatever their number."""
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # another OpenMP; a system that has no RTLD_NOLOAD
        return None


def cores_to_leave(others: float, left: int) -> int:
    """Cores to leave to others, who keep `others` cores busy, when `left` are left to them now."""
    if others > left + LEAVE_CORE:
        return math.ceil(others - LEAVE_CORE)
    if left and others < left - 1 + TAKE_CORE:
        return math.ceil(max(0.0, others - TAKE_CORE))
    return left


def core_ids() -> set[int]:
    """The cores that this process may run on, by the numbers that the system gives them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
