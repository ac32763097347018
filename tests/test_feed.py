"""The feed: frames reproduce what the engine holds, numbers mean what they say, and no text gets in."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import replace

import pytest

from engine import SamplingParams
from engine.events import EngineInfo, EventBus, LifecycleEvent, Replica, SlotUse, StepEvent, StepTimes
from engine.trace import Trace, TraceError
from tests.support import tiny_llm
from tests.test_events import busy_life
from visualizer.feed import Feed
from visualizer.frames import MARKED, moments, trace_frames
from visualizer.measures import LONGEST_GAP, MIN_TOKENS, WINDOW, Measures, percentile
from visualizer.summary import summarise
from visualizer.tracks import Tracks

INFO = EngineInfo("tiny", "float32", "cpu", 4, 16, 4, 32, 64)


def poll(feed: Feed, cursor: str | None) -> dict:
    return json.loads("{" + feed.read(cursor) + "}")


class Picture:
    """What the page's store makes of frames, in Python."""

    def __init__(self) -> None:
        self.keyframes = 0

    def apply(self, frame: dict) -> None:
        if info := frame.get("info"):
            self.keyframes += 1
            self.blocks = [("free", (), -1, 0, 0)] * info["num_blocks"]
            self.steps: list = []
            self.bins: list = []
            self.marks: list = []
        for block, state, owners, index, refs, filled, _ in frame["blocks"]:
            self.blocks[block] = (state, tuple(owners), index, refs, filled)
        self.steps += frame["steps"]
        self.bins += frame["bins"]
        self.marks += frame["marks"]
        self.slots = {slot: key for slot, key, *_ in frame["slots"]}
        self.strip = frame["strip"]
        self.t = frame["t"]


class Viewer(Picture):
    """One who polls a feed."""

    def __init__(self, feed: Feed):
        super().__init__()
        self.feed = feed
        self.cursor: str | None = None

    def poll(self) -> None:
        answer = poll(self.feed, self.cursor)
        self.cursor = answer["cursor"]
        for frame in answer["frames"]:
            self.apply(frame)


def seen_by_engine(llm, feed: Feed) -> tuple[list, dict]:
    """Blocks and slots from the bus itself, with request ids replaced by their public numbers."""
    return picture_of(Replica(llm.engine.events.read().keyframe), feed._framer.tracks.key)


def picture_of(replica: Replica, key) -> tuple[list, dict]:
    blocks = [
        (b.state, tuple(key(owner) for owner in b.owners), b.table_index, b.ref_count, b.filled)
        for b in replica.blocks
    ]
    slots = {slot: key(owner) for slot, owner in enumerate(replica.slots) if owner}
    return blocks, slots


@pytest.mark.parametrize("mode", ["naive", "static", "continuous"])
def test_frames_reproduce_the_engine(mode):
    """Viewers that poll at random times, one that comes late, all see the engine's blocks and slots."""
    rng = random.Random(7)
    llm = tiny_llm(mode=mode, num_blocks=24, max_model_len=40)
    feed = Feed(llm.engine.events)
    eager, lazy = Viewer(feed), Viewer(feed)
    eager.poll()
    lazy.poll()
    for number in range(14):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 16))]
        params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0, ignore_eos=True)
        llm.engine.add_request(f"r{number}", prompt, params)
        for _ in range(rng.randrange(4)):
            llm.engine.step()
        if number == 6:
            llm.engine.abort("r5")
        feed.tick()
        eager.poll()
        if rng.random() < 0.3:
            lazy.poll()
        assert (eager.blocks, eager.slots) == seen_by_engine(llm, feed)
    while llm.engine.has_unfinished():
        llm.engine.step()
        feed.tick()
        eager.poll()
    late = Viewer(feed)
    for viewer in (eager, lazy, late):
        viewer.poll()
        assert (viewer.blocks, viewer.slots) == seen_by_engine(llm, feed)
        assert viewer.steps == eager.steps
        assert viewer.bins == eager.bins
    assert eager.keyframes == late.keyframes == 1  # the lazy one may have fallen behind
    assert [step[0] for step in eager.steps] == list(range(eager.steps[0][0], eager.steps[-1][0] + 1))


@pytest.mark.parametrize(
    "cursor", [None, "", "x", "abc.1", ".", "1.", "{epoch}.x", "{epoch}.-1", "{epoch}.999"]
)
def test_a_cursor_that_leads_nowhere_gets_a_keyframe(cursor):
    feed = Feed(EventBus(INFO, "continuous", 0.0))
    (frame,) = poll(feed, cursor and cursor.replace("{epoch}", feed.epoch))["frames"]
    assert frame["info"]["num_blocks"] == INFO.num_blocks


def test_nothing_new_is_an_empty_answer():
    feed = Feed(EventBus(INFO, "continuous", 0.0))
    cursor = poll(feed, None)["cursor"]
    feed.tick()
    assert poll(feed, cursor) == {"cursor": cursor, "frames": []}


def step_event(step: int, mode="continuous", tokens=1, waiting=0, running=1, seconds=0.1) -> StepEvent:
    slots = tuple(SlotUse(slot, f"r{slot}", "decode", 1, 5, 6, 1) for slot in range(tokens))
    times = StepTimes(0.0, 0.0, seconds, 0.0, 0.0)
    return StepEvent(0, step * seconds, step, mode, times, slots, (), 0, 0, 16, running, waiting, "")


def test_a_ring_that_ran_over_restarts_the_picture():
    bus = EventBus(INFO, "continuous", 0.0, capacity=8)
    feed = Feed(bus)
    viewer = Viewer(feed)
    viewer.poll()
    bus.publish(LifecycleEvent(0, 0.0, 0, "submitted", "r0", num_tokens=3))
    for step in range(20):
        bus.publish(step_event(step))
    feed.tick()
    viewer.poll()
    assert viewer.keyframes == 2
    assert viewer.strip["waiting"] == 1  # r0 is known, though its event was lost
    bus.publish(step_event(21))
    feed.tick()
    viewer.poll()
    assert viewer.keyframes == 2 and [column[0] for column in viewer.steps] == [21]


def test_a_run_that_begins_in_the_middle_counts_its_own_tokens_in_all_modes():
    llm = tiny_llm(num_blocks=9)
    busy_life(llm)
    steps = [event.step for event in llm.engine.events.read(0).events if isinstance(event, StepEvent)]
    trace = Trace(*llm.engine.events.recording(steps[3]))
    assert trace.keyframe.requests  # some are in the middle of their answers
    frames = [json.loads(frame)["strip"] for frame in trace_frames(trace)]
    summary = summarise(trace)
    assert summary["modes"] == ["continuous", "static"] and summary["wasted"] > 0
    last = frames[-1]
    assert (last["all_tokens"], last["all_wasted"]) == (summary["output_tokens"], summary["wasted"])
    assert last["finished"] == sum(getattr(event, "kind", "") == "finished" for event in trace.events)
    for name in ("all_tokens", "all_wasted", "finished"):
        counted = [strip[name] for strip in frames]
        assert counted[0] == 0 and counted == sorted(counted)


class Unwalked(deque):
    def __iter__(self):
        raise AssertionError("whoever asks for the rate must not pay for every step of the last seconds")


def test_the_rate_costs_the_same_however_many_steps_there_were():
    """A crafted trace may have thousands of steps at one time."""
    measures = Measures(INFO)
    measures._recent = Unwalked()
    rng = random.Random(3)
    steps: list[tuple[float, float, int]] = []
    time = last = 0.0
    for number in range(400):
        time += rng.choice((0.0, 0.0, 0.01, 0.3, 2.5))
        event = replace(step_event(number, tokens=rng.randrange(5), seconds=0.02), time=time)
        measures.step(event)
        busy = min(time - last, event.times.total + LONGEST_GAP) if number else event.times.total
        steps.append((time, busy, len(event.slots)))
        last = time
        recent = [step for step in steps if step[0] >= time - WINDOW]
        seconds = sum(busy for _, busy, _ in recent)
        expected = sum(tokens for *_, tokens in recent) / seconds if seconds else 0.0
        assert measures.rate(quiet=0.0) == pytest.approx(expected)


def test_means_are_tokens_over_busy_time():
    measures = Measures(INFO)
    for step in range(1, 201):
        measures.step(step_event(step, "naive", tokens=1, waiting=3))
    for step in range(1000, 1100):  # the pause before it is nobody's busy time
        measures.step(step_event(step, "continuous", tokens=4, running=4))
    numbers = measures.numbers("continuous", quiet=0.0)
    assert numbers["means"]["naive"][0] == pytest.approx(10, rel=0.02)
    assert numbers["means"]["continuous"][0] == pytest.approx(40, rel=0.03)
    assert numbers["speedup"] == ["continuous", pytest.approx(4, rel=0.05)]
    assert measures.of("naive").idle_slot_steps == 200 * 3  # three free slots while three waited
    assert measures.of("continuous").idle_slot_steps == 0
    assert numbers["rate"] == pytest.approx(40, rel=0.01)
    assert measures.rate(quiet=5.0) == 0
    assert {mode for *_, mode in measures.bins} == {"naive", "continuous"}


def test_no_speedup_from_a_handful_of_tokens():
    measures = Measures(INFO)
    for step in range(MIN_TOKENS - 1):
        measures.step(step_event(step, "naive", waiting=1))
    for step in range(200):
        measures.step(step_event(step, "static", tokens=4))
    assert measures.speedup("static") is None
    measures.step(step_event(201, "naive"))  # a request alone: all modes are the same, so it does not count
    assert measures.speedup("static") is None
    measures.step(step_event(202, "naive", waiting=1))
    assert measures.speedup("static")[0] == "static"
    assert measures.speedup("naive")[0] == "static"  # in naive mode: how much faster the other was


def test_a_request_is_told_from_queue_to_end():
    llm = tiny_llm(max_num_seqs=1)
    feed = Feed(llm.engine.events)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    for name in "abc":
        llm.engine.add_request(name, [1, 2, 3], params)
    llm.engine.step()
    feed.tick()
    assert feed.request("a").state == "decode" and feed.request("a").slot == 0
    assert [feed.request(name).place for name in "abc"] == [0, 1, 2]
    assert feed.request("nobody") is None
    while llm.engine.has_unfinished():
        llm.engine.step()
    feed.tick()
    state = feed.request("c")
    assert (state.state, state.slot, state.num_output, state.key) == ("finished", None, 5, 3)
    assert state.rate > 0 and state.ttft > 0


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_a_frame_is_one_moment(num_blocks):
    """Every frame of a trace shows the engine after one step more, or after what came between two steps."""
    llm = tiny_llm(num_blocks=num_blocks)
    busy_life(llm)
    trace = Trace(*llm.engine.events.recording())
    keys = {e.request_id: n for n, e in enumerate((e for e in trace.events if e.step == 0), 1)}
    frames = [json.loads(frame) for frame in trace_frames(trace)]
    picture, replica = Picture(), Replica(trace.keyframe)
    groups = list(moments(trace.events))
    assert [event for group in groups for event in group] == trace.events
    picture.apply(frames[0])
    for frame, group in zip(frames[1:], groups, strict=True):
        for event in group:
            replica.apply(event)
        picture.apply(frame)
        assert len(frame["steps"]) <= 1
        assert (picture.blocks, picture.slots) == picture_of(replica, keys.__getitem__)
        states = [block.state for block in replica.blocks]
        strip = frame["strip"]
        assert strip["held"] == states.count("used") + states.count("reserved")
        assert (strip["cached"], strip["free"]) == (states.count("cached"), states.count("free"))
        assert strip["running"] + strip["waiting"] == len(replica.requests)
        owned = [block for block in replica.blocks if block.owners]
        assert strip["empty_tokens"] == sum(4 - block.filled for block in owned)
    assert [frame["n"] for frame in frames] == list(range(frames[0]["n"], frames[0]["n"] + len(frames)))
    times = [frame["t"] for frame in frames]
    assert times == sorted(times) and times[0] == 0
    seen = {(e.step, e.kind, keys[e.request_id]) for e in trace.events if getattr(e, "kind", "") in MARKED}
    marked = {(step, kind, key) for step, _, kind, key in picture.marks}
    assert marked <= seen and {kind for _, kind, _ in marked} >= {"injected", "finished", "resumed"}
    assert ("preempted" in {kind for _, kind, _ in marked}) == (num_blocks == 9)
    with pytest.raises(TraceError, match="too long to be shown"):
        trace_frames(trace, most_chars=10_000)


def test_steps_that_come_too_fast_share_frames():
    events = [step_event(step) for step in range(1, 101)]
    for most, sizes in ((100, {1}), (50, {2}), (24, {5}), (7, {15, 10}), (1, {100})):
        groups = list(moments(events, most))
        assert len(groups) <= most and {len(group) for group in groups} == sizes
        assert [event for group in groups for event in group] == events
    assert list(moments([], 5)) == []
    pause = [LifecycleEvent(0, time, 0, "submitted", str(time)) for time in (0.0, 0.1, 5.0, 5.1)]
    assert [len(group) for group in moments(pause)] == [2, 2]


def test_latency_percentiles_are_of_tokens_and_requests():
    measures = Measures(INFO)
    measures.step(step_event(1))
    for seconds in range(1, 21):
        measures.first_token("continuous", float(seconds))
    measures.gaps("continuous", [0.01] * 90 + [0.5] * 10)
    assert measures.numbers("continuous", 0.0)["latency"] == {"continuous": [10.0, 19.0, 0.01, 0.5]}
    assert percentile([], 0.5) is None
    tracks, step = Tracks(), step_event(1)
    replica = Replica.empty(INFO, "continuous", 0.0)
    replica.apply(LifecycleEvent(0, 0.0, 0, "submitted", "r0", num_tokens=3))
    tracks.follow(replica)
    assert tracks.step(step) == []  # its first token: no gap
    assert tracks.step(step_event(2)) == [pytest.approx(0.1)]
    assert tracks.step(step_event(5)) == [pytest.approx(0.3)]
    assert tracks.get("r0").num_output == 3
