"""The race: equal work, each arm alone on its own clock, one at a time, and no speed-up where none is due."""

from __future__ import annotations

import gzip
import json
import threading
import time
from dataclasses import replace

import pytest

from engine import EngineRunner, SamplingParams
from engine.events import LifecycleEvent, StepEvent
from engine.trace import Trace, parse_trace, trace_lines
from tests.support import assert_solo, greedy, tiny_llm
from visualizer import race as race_module
from visualizer import races as races_module
from visualizer.race import SIZES, RaceError, race_requests, run_race
from visualizer.races import RaceRefused, Races
from visualizer.siblings import Siblings
from visualizer.summary import difference, summarise, work_of


@pytest.fixture(scope="module")
def siblings() -> Siblings:
    return Siblings(tiny_llm(num_blocks=128, max_model_len=200, max_num_batched_tokens=64))


@pytest.fixture(scope="module")
def race(siblings):
    told = []
    race = run_race(siblings, ("naive", "continuous"), 8, progress=lambda *args: told.append(args))
    return race, told


def test_requests_are_the_same_for_the_same_seed():
    for size in SIZES:
        requests = race_requests(size, 512)
        assert requests == race_requests(size, 512) != race_requests(size, 512, seed=1)
        assert len(requests) == size
        arrivals = [request.arrival for request in requests]
        assert arrivals == sorted(arrivals) and arrivals[size // 2 - 1] == 0 < arrivals[-1]
    assert race_requests(32, 512)[:4] == tuple(replace(r) for r in race_requests(32, 512)[:4])
    for request in race_requests(32, 20):  # a small engine: shorter, but never too long
        assert 1 <= len(request.prompt) <= 10 and 1 <= request.num_output <= 10


def test_both_arms_do_the_same_work(race):
    race, told = race
    first, second = race.arms
    assert (first.mode, second.mode) == ("naive", "continuous")
    for arm in race.arms:
        work = work_of(arm.trace)
        assert set(work) == {request.request_id for request in race.requests}
        for request in race.requests:
            assert work[request.request_id] == (len(request.prompt), request.num_output, "length")
        assert arm.summary["output_tokens"] == sum(request.num_output for request in race.requests)
        assert arm.summary["modes"] == [arm.mode]
    total = 2 * first.summary["output_tokens"]
    assert told[-1] == (1, total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert race.refused == ""
    assert race.speedup == pytest.approx(
        max(a.summary["seconds"] for a in race.arms) / min(a.summary["seconds"] for a in race.arms)
    )
    assert race.winner == min(race.arms, key=lambda arm: arm.summary["seconds"]).mode
    # Serving one at a time takes a step for each token; serving many, fewer.
    assert first.summary["steps"] >= total / 2 > second.summary["steps"]
    assert first.summary["wasted"] > second.summary["wasted"] == 0


def test_an_arms_trace_is_a_trace_on_a_clock_of_its_own(race):
    race, _ = race
    for arm in race.arms:
        assert parse_trace("".join(trace_lines(*arm.trace)).encode()) == arm.trace
        assert arm.trace.keyframe.time == 0
        steps = [event for event in arm.trace.events if isinstance(event, StepEvent)]
        assert arm.summary["seconds"] == pytest.approx(steps[-1].time, abs=1e-4)
        arrivals = {request.request_id: request.arrival * race.beat for request in race.requests}
        for event in arm.trace.events:
            if isinstance(event, LifecycleEvent) and event.kind == "submitted":
                assert event.time >= arrivals[event.request_id] - 1e-9


def test_time_of_others_does_not_count(siblings, monkeypatch):
    """Somebody who takes turns with the race makes it last longer, but its clock only shows its own steps."""
    done = threading.Event()
    slept = []

    def other():
        while not done.is_set():
            with siblings.turns:
                time.sleep(0.002)
                slept.append(0.002)

    thread = threading.Thread(target=other)
    thread.start()
    started = time.monotonic()
    race = run_race(siblings, ("static", "continuous"), 8)
    took = time.monotonic() - started
    done.set()
    thread.join()
    on_clock = sum(arm.summary["seconds"] for arm in race.arms)
    steps = sum(arm.summary["steps"] for arm in race.arms)
    assert len(slept) >= steps  # it had a turn between any two of ours
    assert on_clock <= took - 0.002 * steps


def test_the_live_engine_goes_on_unharmed(siblings):
    llm = tiny_llm()
    runner = EngineRunner(llm.engine, siblings.turns)
    handles = [runner.submit([n, n], greedy(150)) for n in range(4)]
    run_race(siblings, ("naive", "continuous"), 8)
    for number, handle in enumerate(handles):
        assert_solo([number, number], handle.result(60).outputs[0].token_ids)
    runner.check_integrity(20)
    runner.shutdown(timeout=20)


def test_unequal_work_gets_no_speedup(race):
    race, _ = race
    first, second = race.arms
    assert difference(first.trace, second.trace) == ""
    ended = next(e for e in second.trace.events if getattr(e, "kind", "") == "finished")

    def changed(**values) -> Trace:
        events = [replace(e, **values) if e is ended else e for e in second.trace.events]
        return Trace(second.trace.keyframe, events)

    name = ended.request_id
    assert f"request {name} took" in difference(first.trace, changed(num_tokens=ended.num_tokens - 1))
    assert f"request {name} did not come to its end (error)" in difference(
        first.trace, changed(reason="error")
    )
    assert "(abort)" in difference(first.trace, changed(kind="aborted", reason=""))
    assert "still running" in difference(first.trace, changed(kind="first_token"))
    empty = Trace(first.trace.keyframe, [])
    assert difference(empty, empty) == "no request was submitted"
    fewer = [e for e in second.trace.events if getattr(e, "request_id", "") != name]
    assert "7" in difference(first.trace, Trace(second.trace.keyframe, fewer))
    unequal = replace(race, refused="they did not")
    assert unequal.speedup is None and unequal.winner is None


def test_a_failing_arm_gets_no_speedup(siblings, monkeypatch):
    original = race_module._run_arm

    def failing(engine, *args):
        if engine.mode == "continuous":
            monkeypatch.setattr(engine._runner, "forward", lambda batch: 1 / 0)
        return original(engine, *args)

    monkeypatch.setattr(race_module, "_run_arm", failing)
    race = run_race(siblings, ("naive", "continuous"), 8)
    assert "did not come to its end (error)" in race.refused and race.speedup is None


def test_a_race_that_takes_too_long_is_ended(siblings, monkeypatch):
    monkeypatch.setattr(race_module, "MOST_SECONDS", 0.001)
    with pytest.raises(RaceError, match="naive arm took more than"):
        run_race(siblings, ("naive", "continuous"), 8)


def test_summary_counts_what_the_trace_tells():
    llm = tiny_llm(max_num_seqs=2, num_blocks=9)
    for number in range(5):
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        llm.engine.add_request(str(number), [number % 2] * 9, params)
    while llm.engine.has_unfinished():
        llm.engine.step()
    numbers = summarise(Trace(*llm.engine.events.recording()))
    stats = llm.engine.stats()
    assert numbers["output_tokens"] == stats.num_output_tokens == 45
    assert numbers["preemptions"] == stats.num_preemptions
    assert numbers["prefix_hit_tokens"] == stats.num_prefix_hit_tokens > 0
    assert numbers["steps"] == stats.step and numbers["slot_steps"] == 2 * stats.step
    assert numbers["requests"] == 5 and 0 < numbers["peak_blocks"] <= 9
    assert 0 < numbers["ttft"][0] <= numbers["ttft"][1] <= numbers["seconds"]
    nothing = summarise(Trace(*tiny_llm().engine.events.recording()))
    assert (nothing["rate"], nothing["ttft"], nothing["gap"], nothing["steps"]) == (None, None, None, 0)


# -- races for everybody ----------------------------------------------------------------------------


def wait(races: Races, status: dict) -> dict:
    while status["state"] == "running":
        time.sleep(0.02)
        status = races.status(status["id"])
    return status


@pytest.fixture
def races(siblings):
    races = Races(siblings)
    yield races
    races.close()


def test_a_result_is_there_for_everybody(races):
    first = races.start("naive", "continuous", 8)
    assert races.start("naive", "continuous", 8)["id"] == first["id"]  # whoever comes meanwhile joins it
    done = wait(races, first)
    assert (done["state"], done["done"]) == ("done", done["total"]) and done["error"] == ""
    assert races.status() == done
    assert races.start("naive", "continuous", 8)["id"] == first["id"]
    assert races.start("naive", "continuous", 8, again=True)["id"] == first["id"]  # it is fresh
    result = json.loads(gzip.decompress(races.result(first["id"])))
    assert result["modes"] == ["naive", "continuous"] == [arm["mode"] for arm in result["arms"]]
    assert result["speedup"] > 0 and result["winner"] in result["modes"] and result["refused"] == ""
    assert len(result["requests"]) == 8
    for number, arm in enumerate(result["arms"]):
        assert "info" in arm["frames"][0] and arm["frames"][0]["t"] == 0
        assert sum(len(frame["steps"]) for frame in arm["frames"]) == arm["summary"]["steps"]
        assert arm["frames"][-1]["t"] == pytest.approx(arm["summary"]["seconds"], abs=1e-3)
        ended = [mark for frame in arm["frames"] for mark in frame["marks"] if mark[2] == "finished"]
        assert len(ended) == 8
        assert summarise(races.trace(first["id"], number))["steps"] == arm["summary"]["steps"]
    assert races.trace(first["id"], 2) is None and races.trace("x", 0) is None
    assert races.result("no-such-race") is None and races.status("no-such-race") is None


def test_it_can_be_run_anew_after_a_while(races, monkeypatch):
    first = wait(races, races.start("static", "continuous", 8))
    monkeypatch.setattr(races_module, "PAUSE", 0.0)
    second = wait(races, races.start("static", "continuous", 8, again=True))
    assert second["id"] != first["id"] and races.result(second["id"]) != b""


def test_only_one_runs_and_the_others_are_told(races, siblings):
    with siblings.turns:  # nobody steps meanwhile
        first = races.start("naive", "continuous", 8)
        with pytest.raises(RaceRefused, match=r"naive against continuous is being run.*Only one"):
            races.start("static", "continuous", 8)
        assert races.result(first["id"]) is None and races.trace(first["id"], 0) is None
    wait(races, first)
    assert wait(races, races.start("static", "continuous", 8))["state"] == "done"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("warp", "continuous", 8), "Unknown mode 'warp'"),
        ((None, "continuous", 8), "Unknown mode None"),
        (([], "continuous", 8), "Unknown mode"),
        (("naive", "naive", 8), "two different"),
        (("naive", "static", 9), "8, 16, 32"),
        (("naive", "static", True), "8, 16, 32"),
        (("naive", "static", "8"), "8, 16, 32"),
    ],
)
def test_wrong_races_are_refused(races, args, message):
    with pytest.raises(RaceRefused, match=message):
        races.start(*args)
    assert races.status() is None


def test_a_race_that_fails_says_so_and_the_next_one_runs(races, monkeypatch):
    def failing(error):
        def fail(*args, **kwargs):
            raise error

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(races_module, "run_race", failing(OSError("secret path")))
        status = wait(races, races.start("naive", "static", 8))
        assert status["state"] == "failed" and "secret" not in status["error"]
        patch.setattr(
            races_module, "run_race", lambda *a, **k: (_ for _ in ()).throw(RaceError("it was late"))
        )
        assert "it was late" in wait(races, races.start("naive", "static", 8))["error"]
    assert wait(races, races.start("naive", "static", 8))["state"] == "done"


def test_few_results_are_kept(races, monkeypatch):
    monkeypatch.setattr(races_module, "KEPT", 2)
    ids = [wait(races, races.start(*pair, 8))["id"] for pair in (("naive", "static"), ("static", "naive"))]
    last = wait(races, races.start("continuous", "static", 8))["id"]
    assert races.result(ids[0]) is None and races.result(ids[1]) and races.result(last)


def test_closing_ends_a_race(siblings):
    races = Races(siblings)
    with siblings.turns:
        status = races.start("naive", "continuous", 32)
        closer = threading.Thread(target=races.close)
        closer.start()
        while not races._closing:
            time.sleep(0.001)
    closer.join(20)
    assert races.status(status["id"])["state"] == "failed" and not races._thread.is_alive()
    with pytest.raises(RaceRefused, match="closing"):
        races.start("naive", "continuous", 8)
