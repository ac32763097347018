"""Traces in files: what is written is read again; what is damaged, foreign or hostile is refused by name."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.events import EventBus, LifecycleEvent, Replica
from engine.trace import (
    HEADER,
    Trace,
    TraceError,
    TraceLimits,
    TraceRecorder,
    parse_trace,
    read_trace,
    trace_lines,
    write_trace,
)
from tests.support import greedy, run_to_end, tiny_llm
from tests.test_events import busy_life


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """A trace with sharing, preemption, an abort and a mode switch."""
    llm = tiny_llm(num_blocks=9)
    busy_life(llm)
    return list(trace_lines(*llm.engine.events.recording()))


def encode(lines: list[str]) -> bytes:
    return "".join(lines).encode()


def test_a_recorder_writes_what_happened(tmp_path):
    llm = tiny_llm(num_blocks=9)
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
    write_trace(trace, tmp_path / "copy.jsonl")
    assert (tmp_path / "copy.jsonl").read_text() == path.read_text()


def test_the_longest_request_id_can_be_read_back(tmp_path):
    llm = tiny_llm()
    with pytest.raises(ValueError, match="at most 256 characters, not 257"):
        llm.engine.add_request("x" * 257, [1], greedy(1))
    with TraceRecorder(llm.engine.events, tmp_path / "trace.jsonl"):
        llm.engine.add_request("x" * 256, [1], greedy(1, n=12))
        run_to_end(llm)
    kinds = [getattr(event, "kind", "") for event in read_trace(tmp_path / "trace.jsonl").events]
    assert kinds.count("finished") == 12


def test_a_recorder_that_is_overrun_starts_again_with_a_keyframe(tmp_path):
    llm = tiny_llm()
    path = tmp_path / "gap.jsonl"
    bus = EventBus(llm.engine.info, "continuous", 0.0, capacity=3)
    with TraceRecorder(bus, path, period=1000.0):
        for number in range(10):
            bus.publish(LifecycleEvent(0, 1.0, 0, "submitted", str(number)))
    trace = read_trace(path)
    assert trace.keyframe.seq == 10 and len(trace.keyframe.requests) == 10 and trace.events == []


@pytest.mark.parametrize("seed", range(6))
def test_every_life_of_an_engine_is_a_trace_from_any_moment(seed):
    """The rules of the reader are those of the engine: recordings that start anywhere are accepted."""
    rng = random.Random(seed)
    llm = tiny_llm(num_blocks=rng.choice([10, 16, 40]), max_model_len=40, max_num_batched_tokens=12)
    engine = llm.engine
    engine.events._capacity = rng.choice([20, 60, 8192])
    for number in range(60):
        choice = rng.random()
        if choice < 0.4:
            prompt = [rng.randrange(3)] * rng.randint(1, 18)
            budget = rng.randint(1, 14)
            params = SamplingParams(max_tokens=budget, n=rng.choice([1, 1, 2]), ignore_eos=True)
            engine.add_request(f"r{number}", prompt, params)
        elif choice < 0.5 and engine.unfinished_ids:
            engine.abort(rng.choice(engine.unfinished_ids))
        elif choice < 0.55 and engine.unfinished_ids:
            engine.fail(rng.choice(engine.unfinished_ids), "made to")
        elif choice < 0.6:
            engine.set_mode(rng.choice(["naive", "static", "continuous"]))
        for _ in range(rng.randrange(3)):
            engine.step()
        recording = Trace(*engine.events.recording(rng.choice([0, 5, engine.stats().step - 3])))
        assert parse_trace(encode(list(trace_lines(*recording)))) == recording
        keyframe, events = engine.events.recording()
        cut = rng.randint(0, len(events))  # in the middle of a step, as a recorder's keyframe may be
        replica = Replica(keyframe)
        for event in events[:cut]:
            replica.apply(event)
        rest = Trace(replica.keyframe(), events[cut:])
        assert parse_trace(encode(list(trace_lines(*rest)))) == rest


def test_lines_may_end_as_editors_end_them(lines):
    trace = parse_trace(encode(lines))
    windows = b"\xef\xbb\xbf" + encode(lines).replace(b"\n", b"\r\n") + b"\r\n\r\n"
    assert parse_trace(windows) == trace
    assert parse_trace(encode(lines).rstrip(b"\n")) == trace


def changed(line: str, **values) -> str:
    return json.dumps({**json.loads(line), **values}) + "\n"


def of_type(lines: list[str], name: str, start: int = 2) -> int:
    """The place of the first step or lifecycle line from `start` on."""
    return next(i for i in range(start, len(lines)) if f'"type":"{name}"' in lines[i])


DAMAGE = {
    "foreign text": (lambda ls: ["hello\n", *ls], "line 1: not a Glass Engine trace"),
    "foreign json": (lambda ls: ['{"a": 1}\n', *ls], "line 1: not a Glass Engine trace"),
    "empty": (lambda ls: [], "line 1: not a Glass Engine trace"),
    "a chrome trace": (lambda ls: ['{"traceEvents": []}'], "line 1: this is a Chrome trace"),
    "newer": (
        lambda ls: ['{"format": "glass-engine-trace", "version": 99}\n', *ls[1:]],
        "line 1: a version 99",
    ),
    "version true": (lambda ls: ['{"format": "glass-engine-trace", "version": true}\n'], "version True"),
    "header alone": (lambda ls: ls[:1], "line 2: the file ends"),
    "no keyframe": (lambda ls: [ls[0], *ls[2:]], "line 2: a trace must start with a keyframe"),
    "cut line": (lambda ls: [*ls[:4], ls[4][:20]], "line 5: damaged: .* at character"),
    "lines lost": (lambda ls: [*ls[:4], *ls[6:]], r"line 5: event \d+ where \d+ should be"),
    "lines swapped": (lambda ls: [*ls[:4], ls[5], ls[4]], "line 5: event"),
    "unknown type": (lambda ls: [*ls[:3], '{"type": "party"}'], "line 4: not a trace record.*'party'"),
    "a list": (lambda ls: [*ls[:3], "[1, 2]"], "line 4: not a trace record, but a list of 2"),
    "a number": (lambda ls: [*ls[:3], "7"], "line 4: not a trace record, but 7"),
    "nan": (lambda ls: [*ls[:2], re.sub(r'"time":[\d.]+', '"time":NaN', ls[2])], "line 3: damaged: NaN"),
    "infinity": (lambda ls: [*ls[:2], re.sub(r'"time":[\d.]+', '"time":1e999', ls[2])], "line 3: .*time"),
    "huge number": (
        lambda ls: [*ls[:2], re.sub(r'"num_tokens":\d+', f'"num_tokens":{"9" * 60}', ls[2])],
        "line 3: .*num_tokens must lie in 0 to .* a huge number",
    ),
    "endless number": (
        lambda ls: [*ls[:2], re.sub(r'"num_tokens":\d+', f'"num_tokens":{"9" * 6000}', ls[2])],
        "line 3: ",
    ),
    "deep": (lambda ls: [*ls[:2], "[" * 200_000 + "]" * 200_000], "line 3: damaged: nested too deeply"),
    "not utf-8": (lambda ls: [*ls[:2], "\udcff\n"], "line 3: damaged: not UTF-8"),
    "text for a number": (lambda ls: [*ls[:2], changed(ls[2], step="1")], "line 3: .*step must be a whole"),
    "true for a number": (lambda ls: [*ls[:2], changed(ls[2], step=True)], "line 3: .*step must be a whole"),
    "null": (lambda ls: [*ls[:2], changed(ls[2], blocks=None)], "line 3: .*blocks must be a list"),
    "unknown kind": (lambda ls: [*ls[:2], changed(ls[2], kind="eaten")], "line 3: .*kind must be one of"),
    "unhashable kind": (lambda ls: [*ls[:2], changed(ls[2], kind=[])], "line 3: .*kind must be one of"),
    "long name": (lambda ls: [*ls[:2], changed(ls[2], request_id="x" * 301)], "line 3: .*at most 300"),
    "field too many": (lambda ls: [*ls[:2], changed(ls[2], mood="good")], "line 3: .*unknown field, 'mood'"),
    "time goes back": (lambda ls: [*ls[:2], changed(ls[2], time=-5.0)], "line 3: its time"),
    "too few blocks": (
        lambda ls: [ls[0], changed(ls[1], blocks=json.loads(ls[1])["blocks"][:-1])],
        "line 2: the keyframe has 8 blocks",
    ),
    "nobody's end": (
        lambda ls: [*ls[:2], changed(ls[2], kind="finished")],
        "line 3: request '0' is finished, but nobody",
    ),
    "submitted twice": (
        lambda ls: [*ls[:3], changed(ls[3], request_id="0")],
        "line 4: request '0' is submitted again",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_foreign_and_hostile_traces_are_named(lines, case):
    damage, message = DAMAGE[case]
    data = "".join(damage(lines)).encode("utf-8", "surrogateescape")
    with pytest.raises(TraceError, match=message) as caught:
        parse_trace(data)
    assert caught.value.line and len(str(caught.value)) < 400


def block(*values) -> dict:
    return {"blocks": [list(values)]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (block(9, "free", [], -1, 0, 0), "block 9 of a pool of 9"),
        (block(2**60, "free", [], -1, 0, 0), "must lie in"),
        (block(0, "free", [], -1, 0, 5), "holds 5 tokens, and 4 is the most"),
        (block(0, "used", ["stranger"], 0, 1, 1), "owned by 'stranger', who is not there"),
        (block(0, "used", ["0"], 0, 2, 1), "reference count"),
        (block(0, "free", ["0"], 0, 1, 1), "free with 1 owners"),
        (block(0, "used", ["0"], -1, 1, 1), "used with 1 owners"),
        ({"blocks": [[0, "free", [], -1, 0, 0]] * 2}, "there twice"),
        (block(0, "free", []), "must have 6 parts"),
        (block(0, "used", ["0"], 2**32 - 2, 1, 1), "piece 4294967294 of a table"),
        ({"slots": [[9, "0", "decode", 1, 1, 1, 1]]}, "slot 9 is out of order"),
        ({"slots": []}, "a request that has a slot is missing"),
        ({"num_free": 400}, "do not add up to 9"),
        ({"times": [0, 0, -1, 0, 0]}, "forward must be a duration"),
        ({"times": [0, 0]}, "must have 5 parts"),
    ],
)
def test_steps_that_cannot_be_are_refused(lines, values, message):
    place = of_type(lines, "step", of_type(lines, "step") + 1)
    damaged = [*lines[:place], changed(lines[place], **values)]
    with pytest.raises(TraceError, match=rf"line {place + 1}: .*{message}"):
        parse_trace(encode(damaged))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (TraceLimits(most_bytes=5000), "larger than 5,000 bytes"),
        (TraceLimits(most_line_bytes=100), "line 2: longer than 100 bytes"),
        (TraceLimits(most_records=3), "line 5: more than 3 records"),
        (TraceLimits(most_blocks=8), "9 blocks; 8 is the most"),
        (TraceLimits(most_slots=3), "4 slots; 3 is the most"),
        (TraceLimits(most_live=2), "more than 2 requests"),
    ],
)
def test_limits_are_said(lines, limits, message):
    with pytest.raises(TraceError, match=message):
        parse_trace(encode(lines), limits)


class Endless:
    """A file that never ends, and counts what was read of it."""

    def __init__(self, start: bytes):
        self.start, self.read = start, 0

    def readline(self, most: int) -> bytes:
        line, self.start = self.start or b"x" * most, b""
        self.read += len(line)
        return line


def test_no_more_is_read_than_allowed():
    for start in (b"", HEADER.encode()):
        file = Endless(start)
        with pytest.raises(TraceError):
            parse_trace(file, TraceLimits(most_line_bytes=10_000))
        assert file.read < 20_000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(2**53),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def mutate(value, path: list[int], new):
    """The JSON value with what lies at a path of places replaced."""
    if not path or not isinstance(value, list | dict) or not value:
        return new
    key = list(value)[path[0] % len(value)] if isinstance(value, dict) else path[0] % len(value)
    copy = value.copy()
    copy[key] = mutate(value[key], path[1:], new)
    return copy


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 50), max_size=4), VALUES)
def test_fuzzed_values_are_read_or_refused(lines, place, path, new):
    """Whatever stands in a trace, reading it ends with a trace that replays, or with a TraceError."""
    place %= len(lines)
    damaged = json.dumps(mutate(json.loads(lines[place]), path, new)) + "\n"
    try:
        trace = parse_trace(encode([*lines[:place], damaged, *lines[place + 1 :]]))
    except TraceError as error:
        assert error.line
    else:
        replica = Replica(trace.keyframe)
        for event in trace.events:
            replica.apply(event)
        assert replica.block_tables.keys() <= replica.requests.keys() and len(replica.slots) > 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_fuzzed_bytes_are_read_or_refused(lines, data):
    whole = bytearray(encode(lines[:30]))
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(whole)))
        end = start + data.draw(st.integers(0, 40))
        whole[start:end] = data.draw(st.binary(max_size=20))
    try:
        parse_trace(bytes(whole))
    except TraceError as error:
        assert error.line
