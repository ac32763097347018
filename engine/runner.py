"""`EngineRunner`: the engine on a thread of its own, for any number of callers.

Callers never touch the engine. They leave commands (submit, abort, change the mode) that the thread
carries out between two steps, and get a `RequestHandle` on which the deltas arrive.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from typing import TypeVar

from engine.config import check_mode
from engine.continuous_engine import ContinuousEngine
from engine.events import EngineInfo, EventBus, Mode
from engine.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.turns import Turns

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RequestHandle:
    """One submitted request, as its owner sees it. Safe to use from any thread.

    Iterate over it (also with `async for`) for the deltas. Each comes exactly once, so two consumers share
    them, and iterating again after the end brings none.
    `output`, `text` and the other properties show the whole so far, as often as wanted.
    """

    def __init__(self, runner: EngineRunner, request: Request, session: str | None):
        self.request_id = request.request_id
        self.session = session
        self._request = request
        self._runner: EngineRunner | None = runner  # None once finished: who keeps an answer keeps no engine
        self._deltas: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()  # None: that was all
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._done = threading.Event()
        self._wakers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def output(self) -> RequestOutput | None:
        """Everything so far in one `RequestOutput`; None before the first token."""
        with self._lock:
            return deepcopy(self._output)

    @property
    def text(self) -> str:
        """The text so far; with n > 1, of the first continuation."""
        return self._output.outputs[0].text if self._output else ""

    @property
    def num_output_tokens(self) -> int:
        """Tokens so far; with n > 1, of the first continuation."""
        return len(self._output.outputs[0].token_ids) if self._output else 0

    @property
    def finished(self) -> bool:
        """All of it is done, with n > 1 every continuation."""
        return self._done.is_set()

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, None while it goes on; with n > 1, of the first continuation."""
        return self._output.outputs[0].finish_reason if self._output else None

    @property
    def error(self) -> str | None:
        """What went wrong, in any of the continuations; None if nothing did."""
        return self._output.error if self._output else None

    def abort(self) -> None:
        """End the request; what it has so far stays, with finish_reason "abort". Returns at once."""
        if runner := self._runner:
            runner.abort(self.request_id)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the whole. Raises TimeoutError after `timeout` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s")
        output = self.output
        assert output is not None
        return output

    def __iter__(self) -> Iterator[RequestOutput]:
        while (delta := self._deltas.get()) is not None:
            yield delta
        self._deltas.put(None)  # for whoever else iterates, now or later

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        wake = asyncio.Event()
        waker = (asyncio.get_running_loop(), wake)
        self._wakers.append(waker)
        try:
            while True:
                wake.clear()  # before looking, so that a delta that comes meanwhile sets it again
                all_came = self._done.is_set()  # before looking too: then what is not there never comes
                try:
                    delta = self._deltas.get_nowait()
                except queue.Empty:
                    if all_came:  # another consumer holds the None that says so
                        return
                    await wake.wait()
                    continue
                if delta is None:
                    self._deltas.put(None)
                    return
                yield delta
        finally:
            self._wakers.remove(waker)

    def _lost(self, error: str) -> RequestOutput:
        """The last delta of a request that the engine can no longer end: of what is not done, an error."""
        request, so_far = self._request, self._output
        done = {output.index for output in so_far.outputs if output.finish_reason} if so_far else set()
        metrics = so_far.metrics if so_far else RequestMetrics(request.arrival_time)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=request.prompt_token_ids,
            num_cached_tokens=so_far.num_cached_tokens if so_far else 0,
            outputs=[CompletionOutput(i, "", [], "error") for i in range(request.params.n) if i not in done],
            finished=True,
            metrics=replace(metrics, finish_time=time.monotonic()),
            error=error,
        )

    def _deliver(self, delta: RequestOutput) -> None:
        with self._lock:
            if self._output is None:
                self._output = deepcopy(delta)
            else:
                self._output.extend(delta)
        self._deltas.put(delta)
        if delta.finished:
            self._deltas.put(None)
            self._runner = None
            self._done.set()


class EngineRunner:
    """Steps an engine on a background thread until shut down.

    A failing step ends the requests it touched; the thread lives on. `healthy` turns False only if
    the engine's own books no longer add up; then all that is unfinished ends with an error, and whatever
    is submitted later is refused, by name.
    """

    def __init__(self, engine: ContinuousEngine, turns: Turns | None = None):
        """turns: shared with the runners of other engines over the same model, if there are any.

        Raises RuntimeError if another runner drives this engine.
        """
        if engine.is_driven:
            raise RuntimeError("another EngineRunner drives this engine already")
        self._engine = engine
        self._turns = turns or Turns()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._handles: dict[str, RequestHandle] = {}
        self._id_prefix = "r"
        while any(taken.startswith(self._id_prefix) for taken in engine.unfinished_ids):
            self._id_prefix += "r"  # somebody added requests by hand before
        self._ids = itertools.count()
        self._paused = False
        self._closing = False
        self._closed = False  # nobody reads commands any more
        self._door = threading.Lock()  # between "not closed yet" and putting a command
        self.healthy = True
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._engine.driver = self._thread
        self._thread.start()
        # A thread that is inside PyTorch when the interpreter ends takes the whole process down with it.
        atexit.register(self._stop_at_exit)

    # -- for any thread ---------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the engine is: its model, sizes and limits."""
        return self._engine.info

    @property
    def events(self) -> EventBus:
        """Where the engine publishes what it does; any thread may read it."""
        return self._engine.events

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        session: str | None = None,
        priority: int = 0,
    ) -> RequestHandle:
        """Queue a prompt. `session` is the caller's own label for the handle; the engine never sees it.

        Raises ValueError if the request is refused, RuntimeError if the runner is shut down.
        """
        return self.submit_all([(prompt, params)], session, priority)[0]

    def submit_all(
        self,
        prompts: Sequence[tuple[str | Sequence[int], SamplingParams | None]],
        session: str | None = None,
        priority: int = 0,
    ) -> list[RequestHandle]:
        """Queue (prompt, params) pairs between the same two steps: all of them, or none if one is refused."""
        self._check_open()
        requests = [
            self._engine.make_request(f"{self._id_prefix}{next(self._ids)}", prompt, params, priority)
            for prompt, params in prompts
        ]
        handles = [RequestHandle(self, request, session) for request in requests]

        def enqueue() -> None:
            self._handles.update((handle.request_id, handle) for handle in handles)
            for request in requests:
                self._engine.enqueue(request)

        self._put(enqueue)
        return handles

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is. No effect on one that is finished or unknown."""
        self._commands.put(lambda: self._deliver([self._engine.abort(request_id)]))

    def set_mode(self, mode: Mode) -> None:
        """Switch the mode before the next step.

        Raises ValueError on an unknown one, RuntimeError if the runner is shut down, as all below do.
        """
        check_mode(mode)
        self._put(lambda: self._engine.set_mode(mode))

    def pause(self) -> None:
        """Take no more steps until `resume`, except by `step_once`. Submitting goes on."""

        def pause() -> None:
            self._paused = not self._closing  # who is on the way out does not stop in the door

        self._put(pause)

    def resume(self) -> None:
        """Take steps again, after `pause`."""
        self._put(lambda: setattr(self, "_paused", False))

    def step_once(self, timeout: float | None = None) -> list[RequestOutput]:
        """Take one step now and return its deltas (they also reach their handles)."""
        return self._call(self._step, timeout)

    def stats(self) -> EngineStats:
        """Counters as of the last step or command."""
        return self._stats

    def check_integrity(self, timeout: float | None = None) -> None:
        """Check the engine's books on its own thread; raises AssertionError if they do not add up."""
        self._call(self._engine.check_integrity, timeout)

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop, and wait for the end, at most `timeout` seconds.

        drain: let unfinished requests run to their end first; otherwise they are aborted. A later call may
        wait on, or with drain=False end what an earlier one lets run.
        """

        def close() -> None:
            self._closing = True
            self._paused = False
            if not drain:
                self._abort_all()

        self._commands.put(close)
        self._thread.join(timeout)

    def _stop_at_exit(self) -> None:
        self.shutdown(drain=False, timeout=10)

    def _check_open(self) -> None:
        if self._closing or self._closed:
            raise RuntimeError("the engine runner is shut down")
        if not self.healthy:
            raise RuntimeError("the engine is unhealthy after an internal error: restart it")

    def _put(self, command: Callable[[], None]) -> None:
        """Leave a command that somebody waits for: it is carried out, or refused here."""
        with self._door:
            if self._closed:
                raise RuntimeError("the engine runner is shut down")
            self._commands.put(command)

    def _call(self, function: Callable[[], T], timeout: float | None) -> T:
        """Run a function on the engine's thread and return what it returns."""
        self._check_open()
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._put(command)
        return future.result(timeout)

    # -- on the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing or self._has_work():
                self._obey(wait=self._paused or not self._has_work())
                if self._has_work() and not self._paused:
                    self._step()
        except BaseException:
            logger.exception("the engine's thread ends")
            self.healthy = False
        finally:  # come what may, nobody is left waiting
            with self._door:
                self._closed = True
            self._obey(wait=False)  # what was submitted while the last step ran
            self._guard(self._abort_all)
            self._engine.driver = None
            atexit.unregister(self._stop_at_exit)

    def _has_work(self) -> bool:
        return self.healthy and self._engine.has_unfinished()

    def _obey(self, wait: bool) -> None:
        """Carry out the commands that are there; if there is nothing to step, wait for one.

        Those that come meanwhile have their turn after the next step: no flood of them can stop the work.
        """
        try:
            self._guard(self._commands.get(block=wait))
            for _ in range(self._commands.qsize()):
                self._guard(self._commands.get_nowait())
        except queue.Empty:
            pass
        self._stats = self._engine.stats()

    def _step(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []

        def step() -> None:
            with self._turns:
                outputs.extend(self._engine.step())
            self._deliver(outputs)

        self._guard(step)
        return outputs

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something to the engine. If that fails, and with it the engine's own books, every request ends.

        Failures in computing are no matter of this: the engine handles them.
        """
        try:
            action()
        except BaseException as error:  # a panic in Rust, from a tokenizer, is no Exception
            logger.exception("the engine broke; ending every request")
            self._fail_all(f"the engine failed: {error}")
        if not self.healthy:  # the engine may not even be able to end them
            lost = [handle._lost("the engine is unhealthy") for handle in self._handles.values()]
            self._deliver(lost)

    def _abort_all(self) -> None:
        self._deliver([self._engine.abort(request_id) for request_id in self._engine.unfinished_ids])

    def _fail_all(self, error: str) -> None:
        outputs: list[RequestOutput | None] = []
        try:
            for request_id in self._engine.unfinished_ids:
                outputs.append(self._engine.fail(request_id, error))
            self._engine.check_integrity()
        except BaseException:
            logger.exception("the engine's books do not add up")
            self.healthy = False
        self._deliver(outputs)  # last, so that whoever sees the error sees the state of health it left

    def _deliver(self, outputs: Sequence[RequestOutput | None]) -> None:
        self._stats = self._engine.stats()  # first, so that whoever sees the end of a request sees it counted
        wakers: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for output in outputs:
            handle = self._handles.get(output.request_id) if output else None
            if output is None or handle is None:
                continue
            handle._deliver(output)
            if output.finished:
                del self._handles[output.request_id]
            for loop, event in list(handle._wakers):
                wakers.setdefault(loop, []).append(event)
        for loop, events in wakers.items():  # one call per loop and step, however many handles it has
            try:
                loop.call_soon_threadsafe(_set_all, events)
            except RuntimeError:
                logger.debug("an event loop closed while requests of it ran")


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
