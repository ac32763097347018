"""The feed: frames reproduce what the engine holds, numbers mean what they say, and no text gets in."""

from __future__ import annotations

import json
import random

import pytest

from engine import SamplingParams
from engine.events import EngineInfo, EventBus, LifecycleEvent, Replica, SlotUse, StepEvent, StepTimes
from tests.support import tiny_llm
from visualizer.feed import Feed
from visualizer.measures import MIN_TOKENS, Measures

INFO = EngineInfo("tiny", "float32", "cpu", 4, 16, 4, 32, 64)


def poll(feed: Feed, cursor: str | None) -> dict:
    return json.loads("{" + feed.read(cursor) + "}")


class Viewer:
    """What the page's store does with frames, in Python."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.cursor: str | None = None
        self.keyframes = 0

    def poll(self) -> None:
        answer = poll(self.feed, self.cursor)
        self.cursor = answer["cursor"]
        for frame in answer["frames"]:
            self.apply(frame)

    def apply(self, frame: dict) -> None:
        if info := frame.get("info"):
            self.keyframes += 1
            self.blocks = [("free", (), -1, 0, 0)] * info["num_blocks"]
            self.steps: list = []
            self.bins: list = []
        for block, state, owners, index, refs, filled, _ in frame["blocks"]:
            self.blocks[block] = (state, tuple(owners), index, refs, filled)
        self.steps += frame["steps"]
        self.bins += frame["bins"]
        self.slots = {slot: key for slot, key, *_ in frame["slots"]}
        self.strip = frame["strip"]


def seen_by_engine(llm, feed: Feed) -> tuple[list, dict]:
    """Blocks and slots from the bus itself, with request ids replaced by their public numbers."""
    replica = Replica(llm.engine.events.read().keyframe)
    key = feed._tracks.key
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
