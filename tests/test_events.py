"""The event bus and the trace: complete, in order, harmless, and without a word of anybody's text."""

from __future__ import annotations

import json

import pytest

from engine.events import EventBus, Keyframe, LifecycleEvent, Replica, StepEvent
from engine.trace import to_json
from tests.support import Mirror, greedy, run_to_end, tiny_llm


def busy_life(llm, check=lambda: None):
    """Sharing, preemption, abort and a mode switch."""
    for number in range(8):
        llm.engine.add_request(str(number), [number % 2] * 9, greedy(14))
        check()
    for step in range(12):
        llm.engine.step()
        check()
        if step == 6:
            llm.engine.abort("1")
            check()
        if step == 8:
            llm.engine.set_mode("static")
            check()
    run_to_end(llm)
    check()


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_events_reproduce_the_engine_at_every_moment(num_blocks):
    llm = tiny_llm(num_blocks=num_blocks)
    busy_life(llm, Mirror(llm).check)


def test_a_reader_that_starts_late_or_falls_behind_gets_a_keyframe():
    llm = tiny_llm()
    bus = EventBus(llm.engine.info, "continuous", 0.0, capacity=5)
    assert bus.read().keyframe is not None
    for number in range(9):
        bus.publish(LifecycleEvent(0, 1.0, 0, "submitted", str(number), num_tokens=3))
    behind = bus.read(2)
    assert behind.keyframe is not None and len(behind.keyframe.requests) == 9 and behind.events == []
    in_time = bus.read(6)
    assert in_time.keyframe is None and [event.seq for event in in_time.events] == [6, 7, 8]
    assert bus.read(in_time.cursor) == (None, [], 9)
    assert bus.read(999).keyframe is not None  # a cursor of another engine's life


def test_a_gap_is_noticed():
    llm = tiny_llm()
    replica = Replica(llm.engine.events.read().keyframe)
    with pytest.raises(ValueError, match="missing"):
        replica.apply(LifecycleEvent(replica.seq + 1, 0.0, 0, "submitted", "x"))


def test_step_events_say_what_the_step_did():
    llm = tiny_llm()
    llm.engine.add_request("a", [1] * 10, greedy(3))
    run_to_end(llm)
    events = llm.engine.events.read(0).events
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [(use.phase, use.num_tokens, use.num_sampled) for step in steps for use in step.slots] == [
        ("prefill", 10, 1),
        ("decode", 1, 1),
        ("decode", 1, 1),
    ]
    assert all(min(step.times) >= 0 and step.times.total > 0 for step in steps)
    kinds = [event.kind for event in events if isinstance(event, LifecycleEvent)]
    assert kinds == ["submitted", "admitted", "first_token", "finished"]
    assert [event.seq for event in events] == list(range(len(events)))


def test_slots_that_got_no_budget_are_shown_in_their_phase():
    """Switching modes puts all back; with their tokens cached, more of them decode than the budget serves."""
    llm = tiny_llm(block_size=1, max_num_batched_tokens=2)
    idle = []
    for turn in range(2):  # the later, more urgent two are served first
        for number in range(2):
            llm.engine.add_request(f"{turn} {number}", [10 * turn + number], greedy(20), priority=-turn)
        for _ in range(3):
            llm.engine.step()
        for mode in ("static", "continuous"):
            llm.engine.set_mode(mode)
    for _ in range(6):
        llm.engine.step()
        running = llm.engine._scheduler.running
        decoding = {request.slot for request in running if request.is_decoding}
        for use in llm.engine.events.read(0).events[-1].slots:
            if use.num_tokens == 0:
                assert use.phase == ("decode" if use.slot in decoding else "prefill")
                idle.append(use.phase)
    assert "decode" in idle


def test_wait_reasons():
    slots = tiny_llm(max_num_seqs=1)
    blocks = tiny_llm(num_blocks=8)
    batch = tiny_llm(mode="static")
    for llm, reason in ((slots, "slots"), (blocks, "blocks"), (batch, "batch")):
        llm.engine.add_request("a", [1] * 20, greedy(5))
        llm.engine.step()
        llm.engine.add_request("b", [2] * 20, greedy(5))
        llm.engine.step()
        last = llm.engine.events.read(0).events[-1]
        assert (last.wait_reason, last.num_waiting) == (reason, 1)


def test_no_text_in_any_event():
    llm = tiny_llm()
    llm.engine.add_request("a", "a very secret prompt", greedy(5))
    text = run_to_end(llm)["a"].outputs[0].text
    records = json.dumps([to_json(event) for event in llm.engine.events.read(0).events])
    assert "secret" not in records and (not text.strip() or text not in records)


@pytest.mark.parametrize("since", [0, 5, 9, 14, 999])
@pytest.mark.parametrize("capacity", [7, 40, 8192])
def test_recording_leads_from_the_end_of_a_step_to_now(capacity, since):
    llm = tiny_llm(num_blocks=9)
    bus = llm.engine.events
    bus._capacity = capacity
    busy_life(llm)
    keyframe, events = bus.recording(since)
    replica = Replica(keyframe)
    for event in events:
        replica.apply(event)
    now = bus.read().keyframe
    assert replica.keyframe() == now
    assert len(events) <= capacity and all(event.step >= since - 1 for event in events)
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    last = bus.read(now.seq - 1).events[0].step
    if capacity == 8192:  # nothing is lost: all that was asked for is there
        assert steps == list(range(max(1, since), last + 1))
        assert keyframe.step == max(0, min(since - 1, last))
    else:
        assert steps == list(range(keyframe.step + 1, last + 1))


def test_keyframe_is_immutable_and_a_copy():
    llm = tiny_llm()
    before = llm.engine.events.read().keyframe
    assert isinstance(before, Keyframe)
    llm.engine.add_request("a", [1], greedy(2))
    run_to_end(llm)
    assert before.requests == () and all(block.state == "free" for block in before.blocks)
