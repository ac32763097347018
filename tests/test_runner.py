"""The background runner: many callers, one engine thread, nothing lost and nobody left hanging."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest

from engine import EngineRunner, RequestHandle, SamplingParams, Turns
from engine.detokenizer import make_decoder
from tests.support import assert_clean, assert_solo, greedy, tiny_llm


@pytest.fixture
def runner():
    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    runner.llm = llm
    yield runner
    runner.shutdown(drain=False, timeout=20)
    assert_clean(llm)


def test_many_threads_submit_and_each_gets_its_own(runner):
    results = {}

    def client(number):
        handle = runner.submit([number, number + 1], greedy(12))
        results[number] = [token for delta in handle for token in delta.outputs[0].token_ids]

    threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 12
    for number, tokens in results.items():
        assert len(tokens) == 12
        assert_solo([number, number + 1], tokens)


def test_async_iteration_gets_every_delta(runner):
    async def client(number):
        handle = runner.submit([number], greedy(10))
        return [token async for delta in handle for token in delta.outputs[0].token_ids]

    async def clients():
        return await asyncio.wait_for(asyncio.gather(*(client(n) for n in range(8))), 30)

    for number, tokens in enumerate(asyncio.run(clients())):
        assert len(tokens) == 10
        assert_solo([number], tokens)


def test_handle_shows_the_whole_so_far(runner):
    handle = runner.submit("hello", greedy(20))
    output = handle.result(timeout=20)
    assert output.outputs[0].text == handle.text
    assert handle.num_output_tokens == 20 and handle.finished and handle.finish_reason == "length"
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time


def test_refused_requests_raise_at_once_and_queue_nothing(runner):
    with pytest.raises(ValueError, match="empty"):
        runner.submit_all([([1], greedy(3)), ("", greedy(3))])
    with pytest.raises(ValueError, match="max_tokens"):
        runner.submit([1], SamplingParams(max_tokens=-1))
    with pytest.raises(ValueError, match="unknown mode"):
        runner.set_mode("warp")
    assert runner.submit([1], greedy(2)).result(20).finished
    assert sum(runner.stats().num_finished.values()) == 1


def test_abort_waiting_and_running(runner):
    handles = runner.submit_all([([n], greedy(400)) for n in range(8)])  # four run, four wait
    next(iter(handles[0]))
    for handle in (handles[0], handles[7]):
        handle.abort()
        handle.abort()
        assert handle.result(20).outputs[0].finish_reason == "abort"
    for handle in handles[1:7]:
        handle.abort()
    assert all(handle.result(20).finished for handle in handles)
    runner.check_integrity(20)


def test_mode_switch_and_pause_and_single_steps(runner):
    runner.pause()
    handles = runner.submit_all([([n], greedy(6)) for n in range(3)])
    assert runner.step_once(20) and runner.stats().num_running == 3
    runner.set_mode("naive")
    runner.step_once(20)
    assert (runner.stats().mode, runner.stats().num_running) == ("naive", 1)
    runner.resume()
    for number, handle in enumerate(handles):
        assert_solo([number], handle.result(20).outputs[0].token_ids)


def test_exception_in_a_step_fails_its_requests_and_the_thread_lives(runner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runner.llm.engine._runner, "forward", lambda batch: 1 / 0)
        output = runner.submit([1], greedy(5)).result(20)
        assert output.outputs[0].finish_reason == "error" and "division" in output.error
    assert_solo([1], runner.submit([1], greedy(5)).result(20).outputs[0].token_ids)
    assert runner.healthy


def test_exception_in_the_engines_own_books_fails_all_and_says_so(runner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runner.llm.engine._scheduler, "schedule", lambda: 1 / 0)
        outputs = [handle.result(20) for handle in runner.submit_all([([1], greedy(5)), ([2], greedy(5))])]
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert runner.healthy  # the books still add up, so work goes on
    assert runner.submit([1], greedy(2)).result(20).outputs[0].finish_reason == "length"


def test_text_that_cannot_be_made_fails_its_request_alone(runner, monkeypatch):
    """A tokenizer that raises: in decoding one request's token, and again when that request is ended."""
    runner.pause()
    bad, good = runner.submit_all([([1], greedy(5)), ([2], greedy(5))])
    runner.step_once(20)
    detokenizer = runner.llm.engine._groups[bad.request_id][0].detokenizer
    monkeypatch.setattr(detokenizer._decoder, "_decode", lambda token_ids: 1 / 0)
    runner.resume()
    assert bad.result(20).outputs[0].finish_reason == "error"
    assert "division" in bad.error
    assert_solo([2], good.result(20).outputs[0].token_ids)
    assert runner.healthy


@pytest.mark.parametrize("broken", ["remove", "check_integrity"])
def test_engine_that_cannot_even_end_its_requests_is_unhealthy_and_leaves_nobody_waiting(broken, monkeypatch):
    llm = tiny_llm(max_num_seqs=1)
    runner = EngineRunner(llm.engine)
    handles = runner.submit_all([([n], greedy(400, n=2)) for n in range(3)])
    next(iter(handles[0]))

    def break_books():
        raise AssertionError("the books")

    monkeypatch.setattr(llm.engine._scheduler, broken, lambda *_: break_books())
    if broken == "remove":
        handles[2].abort()  # a command that fails in the books is as bad as a step
    else:
        monkeypatch.setattr(llm.engine._scheduler, "schedule", break_books)
    for handle in handles:
        output = handle.result(20)
        assert [one.finish_reason for one in output.outputs] == ["error"] * 2 and output.error
    assert not runner.healthy
    with pytest.raises(RuntimeError, match="unhealthy"):
        runner.submit([1], greedy(2))
    runner.shutdown(timeout=20)
    assert not runner._thread.is_alive()


class Panic(BaseException):
    """What a panic inside a library written in Rust looks like from Python: no Exception."""


def test_panic_in_the_tokenizer_fails_its_request_alone(runner, monkeypatch):
    runner.pause()
    bad, good = runner.submit_all([([1], greedy(5)), ([2], greedy(5))])
    runner.step_once(20)
    detokenizer = runner.llm.engine._groups[bad.request_id][0].detokenizer

    class Panicking:
        def decode(self, *args, **options):
            raise Panic("index out of range")

    monkeypatch.setattr(detokenizer._decoder, "_decode", make_decoder(Panicking()))
    runner.resume()
    assert bad.result(20).outputs[0].finish_reason == "error" and "index out of range" in bad.error
    assert_solo([2], good.result(20).outputs[0].token_ids)
    assert runner.healthy


def test_panic_in_the_text_of_logprobs_fails_its_request_alone(runner, monkeypatch):
    class Panicking:
        def decode(self, *args, **options):
            raise Panic("index out of range")

    monkeypatch.setattr(runner.llm.engine, "_decode", make_decoder(Panicking()))
    bad, good = runner.submit_all([([1], greedy(5, logprobs=2)), ([2], greedy(5))])
    assert bad.result(20).outputs[0].finish_reason == "error" and "index out of range" in bad.error
    assert_solo([2], good.result(20).outputs[0].token_ids)
    assert runner.healthy


def test_panic_over_a_prompt_refuses_it(monkeypatch):
    llm = tiny_llm()

    class Panicking:
        chat_template = "any"

        def apply_chat_template(self, *args, **options):
            return "text"

        def __call__(self, *args, **options):
            raise Panic("index out of range")

    monkeypatch.setattr(llm, "tokenizer", Panicking())
    monkeypatch.setattr(llm.engine._factory, "_tokenizer", Panicking())
    with pytest.raises(ValueError, match="cannot read this prompt: index out of range"):
        llm.chat([{"role": "user", "content": "x"}], greedy(1))
    with pytest.raises(ValueError, match="cannot read this prompt: index out of range"):
        llm.generate("x", greedy(1))
    assert not llm.engine.has_unfinished()


def test_panic_anywhere_else_leaves_nobody_waiting(runner, monkeypatch):
    def panic(*args):
        raise Panic

    with monkeypatch.context() as patch:
        patch.setattr(runner.llm.engine._runner, "forward", panic)
        handles = runner.submit_all([([1], greedy(5)), ([2], greedy(5))])
        assert {handle.result(20).outputs[0].finish_reason for handle in handles} == {"error"}
    assert_solo([3], runner.submit([3], greedy(4)).result(20).outputs[0].token_ids)


def test_thread_that_ends_unforeseen_is_unhealthy_and_leaves_nobody_waiting(monkeypatch):
    runner = EngineRunner(tiny_llm().engine)
    handle = runner.submit([1], greedy(400))
    next(iter(handle))
    monkeypatch.setattr(runner, "_obey", lambda wait: (_ for _ in ()).throw(Panic()) if wait else None)
    monkeypatch.setattr(runner, "_has_work", lambda: (_ for _ in ()).throw(Panic()))
    assert handle.result(20).finished
    runner.shutdown(timeout=20)
    assert not runner.healthy
    with pytest.raises(RuntimeError):
        runner.submit([1], greedy(2))


def test_pausing_while_it_drains_does_not_stop_it():
    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    handle = runner.submit([1], greedy(300))
    next(iter(handle))
    threading.Thread(target=runner.shutdown).start()
    while True:
        try:
            runner.pause()
        except RuntimeError:
            break
        time.sleep(0.001)  # without it this thread, not the engine's, would have Python nearly all the time
    assert handle.result(20).outputs[0].finish_reason == "length"
    runner.shutdown(timeout=20)
    assert not llm.engine.is_driven


def test_second_shutdown_may_hurry_the_first():
    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    runner.pause()
    handle = runner.submit([1], greedy(400))
    runner.shutdown(timeout=0.0)
    runner.shutdown(drain=False, timeout=20)
    assert handle.finished and not llm.engine.is_driven
    assert llm.generate([[1]], greedy(2), use_tqdm=False)[0].finished
    for call in (runner.pause, runner.resume, lambda: runner.set_mode("naive")):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    runner.abort("unknown")  # still no matter


def test_one_engine_one_driver(runner):
    with pytest.raises(RuntimeError, match="another EngineRunner"):
        EngineRunner(runner.llm.engine)
    with pytest.raises(RuntimeError, match="submit"):
        runner.llm.engine.add_request("r5", [1], greedy(2))
    engine = runner.llm.engine
    request = engine.make_request("r5", [1], greedy(2))
    for call in (
        engine.step,
        lambda: engine.enqueue(request),
        lambda: engine.abort("r5"),
        lambda: engine.fail("r5", "no reason"),
        lambda: engine.set_mode("naive"),
    ):
        with pytest.raises(RuntimeError, match="use the runner's methods"):
            call()
    assert engine.mode == "continuous"


def test_requests_added_by_hand_before_keep_their_ids():
    llm = tiny_llm()
    for taken in ("r1", "rr0"):
        llm.engine.add_request(taken, [9, 9], greedy(30))
    runner = EngineRunner(llm.engine)
    handles = runner.submit_all([([n], greedy(8)) for n in range(3)])
    for number, handle in enumerate(handles):
        assert_solo([number], handle.result(20).outputs[0].token_ids)
        assert handle.output.prompt_token_ids == [number]
    runner.shutdown(timeout=20)
    assert_clean(llm)


def test_iterating_again_or_twice_at_once_ends(runner):
    handle = runner.submit([1], greedy(6))
    assert len(list(handle)) == 6
    assert list(handle) == []

    async def collect_from(handle):
        return [delta async for delta in handle]

    async def two_consumers():
        handle = runner.submit([2], greedy(12))
        parts = await asyncio.wait_for(asyncio.gather(collect_from(handle), collect_from(handle)), 20)
        return sum(map(len, parts)), await asyncio.wait_for(collect_from(handle), 20)

    assert asyncio.run(two_consumers()) == (12, [])


def test_consumer_ends_while_another_holds_the_last_word(runner):
    handle = runner.submit([1], greedy(3))
    while handle._deltas.get() is not None:  # taken by another consumer, who has not put it back yet
        pass
    handle.result(20)

    async def consume():
        return [delta async for delta in handle]

    assert asyncio.run(asyncio.wait_for(consume(), 10)) == []


def test_consumers_on_many_event_loops_share_the_deltas_and_all_end(runner):
    for _ in range(20):
        handle, counts = runner.submit([1], greedy(12)), []

        def consume(handle=handle, counts=counts):
            async def count():
                return len([delta async for delta in handle])

            counts.append(asyncio.run(asyncio.wait_for(count(), 20)))

        threads = [threading.Thread(target=consume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(counts) == 4 and sum(counts) == 12


def test_counters_are_those_of_what_was_delivered(runner):
    for number in range(1, 21):
        assert runner.submit([number], greedy(2)).result(20).finished
        stats = runner.stats()
        assert (stats.num_finished["length"], stats.num_output_tokens) == (number, 2 * number)
        assert stats.num_running == 0
    handle = runner.submit([1], greedy(400))
    next(iter(handle))
    handle.abort()
    handle.result(20)
    assert runner.stats().num_finished["abort"] == 1 and runner.stats().num_running == 0


def test_leaving_python_while_requests_run_is_no_crash():
    code = """if True:
        from engine import EngineRunner
        from tests.support import greedy, tiny_llm
        handle = EngineRunner(tiny_llm(num_blocks=256).engine).submit([1], greedy(500))
        next(iter(handle))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_submitting_while_it_shuts_down_is_served_or_refused():
    for delay in range(6):
        runner = EngineRunner(tiny_llm().engine)
        handles: list[RequestHandle] = []

        def submit(runner=runner, handles=handles):
            with contextlib.suppress(RuntimeError):
                for _ in range(50):
                    handles.append(runner.submit([1], greedy(1)))

        thread = threading.Thread(target=submit)
        thread.start()
        time.sleep(delay / 1000)
        runner.shutdown(drain=delay % 2 == 0, timeout=20)
        thread.join(20)
        assert all(handle.result(5).finished for handle in handles)


def test_shutdown_drains():
    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    handles = runner.submit_all([([n], greedy(15)) for n in range(6)])
    runner.shutdown(drain=True, timeout=30)
    assert all(handle.finish_reason == "length" for handle in handles)
    with pytest.raises(RuntimeError, match="shut down"):
        runner.submit([1], greedy(1))
    assert_clean(llm)


def test_shutdown_without_draining_ends_everything_soon():
    runner = EngineRunner(tiny_llm().engine)
    handles = runner.submit_all([([n], greedy(400)) for n in range(8)])
    runner.shutdown(drain=False, timeout=30)
    assert {handle.result(5).outputs[0].finish_reason for handle in handles} == {"abort"}


def test_idle_runner_waits_without_spinning():
    runner = EngineRunner(tiny_llm().engine)
    runner.submit([1], greedy(2)).result(20)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
    runner.shutdown(timeout=20)


def test_turns_are_taken_in_the_order_of_asking():
    turns, order, asked = Turns(), [], []

    def work(number):
        asked.append(number)
        with turns:
            order.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(20)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._queue) <= number:  # until it stands in line
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(20)
    assert order == asked == list(range(20))
    with turns:  # free again
        pass
    assert not turns._taken


def test_engines_that_share_a_model_step_one_at_a_time_and_all_get_on(monkeypatch):
    turns, inside, most = Turns(), [], []
    runners = []
    for _ in range(3):
        llm = tiny_llm()
        step = llm.engine.step

        def counted(step=step):
            inside.append(1)
            most.append(len(inside))
            outputs = step()
            inside.pop()
            return outputs

        monkeypatch.setattr(llm.engine, "step", counted)
        runners.append(EngineRunner(llm.engine, turns))
    for runner in runners:
        runner.pause()
    handles = [runner.submit([n], greedy(40)) for n, runner in enumerate(runners)]
    for runner in runners:
        runner.resume()
    for number, handle in enumerate(handles):
        assert_solo([number], handle.result(30).outputs[0].token_ids)
    assert set(most) == {1}
    for runner in runners:
        runner.shutdown(timeout=20)
