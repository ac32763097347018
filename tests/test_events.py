"""The event bus and the trace: complete, in order, harmless, and without a word of anybody's text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.events import EventBus, Keyframe, LifecycleEvent, Replica, StepEvent
from engine.trace import TraceError, TraceRecorder, read_trace, to_json
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


@pytest.mark.parametrize("num_blocks", [12, 64])
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


def test_trace_replays_to_the_same_state(tmp_path):
    llm = tiny_llm(num_blocks=12)
    path = tmp_path / "life.jsonl"
    with TraceRecorder(llm.engine.events, path, period=0.001):
        busy_life(llm)
    trace = read_trace(path)
    replica = Replica(trace.keyframe)
    for event in trace.events:
        replica.apply(event)
    now = llm.engine.events.read().keyframe
    assert replace(replica.keyframe(), time=0) == replace(now, time=0)
    assert trace.events == llm.engine.events.read(0).events


def test_recorder_that_is_overrun_starts_again_with_a_keyframe(tmp_path):
    llm = tiny_llm()
    path = tmp_path / "gap.jsonl"
    bus = EventBus(llm.engine.info, "continuous", 0.0, capacity=3)
    with TraceRecorder(bus, path, period=1000.0):
        for number in range(10):
            bus.publish(LifecycleEvent(0, 1.0, 0, "submitted", str(number)))
    trace = read_trace(path)
    assert trace.keyframe.seq == 10 and len(trace.keyframe.requests) == 10 and trace.events == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: ["hello", *lines], "damaged"),
        (lambda lines: ['{"a": 1}', *lines], "not a Glass Engine trace"),
        (lambda lines: [], "not a Glass Engine trace"),
        (lambda lines: ['{"format": "glass-engine-trace", "version": 99}', *lines[1:]], "version 99"),
        (lambda lines: [lines[0], *lines[2:]], "keyframe"),
        (lambda lines: [*lines[:4], lines[4][:20]], "line 5"),
        (lambda lines: [*lines[:4], *lines[6:]], "line 5"),
        (lambda lines: [*lines[:3], '{"type": "party"}'], "not a trace record"),
        (lambda lines: [*lines[:3], "[1, 2]"], "not a trace record"),
    ],
)
def test_damaged_or_foreign_traces_are_named(tmp_path, damage, message):
    llm = tiny_llm()
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(llm.engine.events, path):
        busy_life(llm)
    path.write_text("\n".join(damage(path.read_text().splitlines())), encoding="utf-8")
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_keyframe_is_immutable_and_a_copy():
    llm = tiny_llm()
    before = llm.engine.events.read().keyframe
    assert isinstance(before, Keyframe)
    llm.engine.add_request("a", [1], greedy(2))
    run_to_end(llm)
    assert before.requests == () and all(block.state == "free" for block in before.blocks)
