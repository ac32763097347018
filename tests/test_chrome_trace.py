"""The export for Perfetto obeys the Trace Event Format, and tells what the trace tells."""

from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest

from engine import SamplingParams
from engine.events import LifecycleEvent, StepEvent
from engine.trace import Trace, trace_lines, write_trace
from tests.support import tiny_llm
from tests.test_events import busy_life
from visualizer.chrome_trace import ENGINE, QUEUE, SLOTS, STAGES, STEPS, chrome_json, main

SCOPES = {"g", "p", "t"}


def check_format(document: dict, longest: int) -> None:
    """Raise AssertionError unless the document obeys the rules of the format."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    named: set[tuple] = set()
    tracks: dict[tuple, list] = defaultdict(list)
    waits: dict[str, list] = defaultdict(list)
    for entry in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= entry.keys()
        assert type(entry["pid"]) is int and type(entry["tid"]) is int and type(entry["name"]) is str
        if entry["ph"] == "M":
            named.add((entry["name"], entry["pid"], entry["tid"]))
            continue
        assert type(entry["ts"]) is int and 0 <= entry["ts"] <= longest
        match entry["ph"]:
            case "X":
                assert type(entry["dur"]) is int and entry["dur"] >= 0
                assert entry["ts"] + entry["dur"] <= longest
                tracks[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
            case "i":
                assert entry["s"] in SCOPES
            case "C":
                assert entry["args"] and all(type(v) in (int, float) for v in entry["args"].values())
            case "b" | "e":
                waits[entry["cat"], entry["id"]].append((entry["ph"], entry["ts"]))
            case other:
                raise AssertionError(f"phase {other}")
        assert ("process_name", entry["pid"], 0) in named, "a process has no name"
    for (pid, tid), slices in tracks.items():
        assert ("thread_name", pid, tid) in named
        check_nesting(slices)
    for steps in waits.values():
        assert [kind for kind, _ in steps] == ["b", "e"] and steps[0][1] <= steps[1][1]


def check_nesting(slices: list[tuple[int, int]]) -> None:
    """Of two slices on a track one lies inside the other, or they do not overlap."""
    open_ends: list[int] = []
    for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "slices overlap"
        open_ends.append(end)


def chrome_trace(trace: Trace) -> dict:
    return json.loads(chrome_json(trace))


def longest_of(trace: Trace) -> int:
    return round(1e6 * (trace.events[-1].time - trace.keyframe.time)) + 2


@pytest.fixture(scope="module", params=[9, 64])
def trace(request) -> Trace:
    llm = tiny_llm(num_blocks=request.param)
    busy_life(llm)
    return Trace(*llm.engine.events.recording())


def of_kind(document: dict, **wanted) -> list[dict]:
    return [e for e in document["traceEvents"] if wanted.items() <= e.items()]


def test_it_obeys_the_format_and_tells_the_trace(trace):
    document = chrome_trace(trace)
    check_format(document, longest_of(trace))
    steps = [event for event in trace.events if isinstance(event, StepEvent)]
    slices = of_kind(document, ph="X", pid=ENGINE, tid=STEPS, cat="step")
    assert [s["name"] for s in slices] == [f"step {event.step}" for event in steps]
    for entry, event in zip(slices, steps, strict=True):
        assert abs(entry["dur"] - 1e6 * event.times.total) <= 2
        inside = [
            s
            for s in of_kind(document, ph="X", cat="stage")
            if entry["ts"] <= s["ts"] and s["ts"] + s["dur"] <= entry["ts"] + entry["dur"]
        ]
        assert {s["name"] for s in inside} >= set(STAGES)
    for phase in ("prefill", "decode"):
        tokens = sum(u.num_tokens for e in steps for u in e.slots if u.phase == phase)
        assert sum(s["args"]["tokens"] for s in of_kind(document, ph="X", cat=phase)) == tokens
    blocks = of_kind(document, ph="C", name="KV blocks")
    assert [tuple(c["args"].values()) for c in blocks] == [
        (e.num_used, e.num_cached, e.num_free) for e in steps
    ]
    told = [event for event in trace.events if isinstance(event, LifecycleEvent)]
    assert len(of_kind(document, ph="i")) == len(told)
    names = {e["args"]["name"] for e in of_kind(document, ph="M", name="thread_name", pid=SLOTS)}
    assert names == {"Slot A", "Slot B", "Slot C", "Slot D"}
    waits = sum(e.kind in ("submitted", "preempted") for e in told)
    assert len(of_kind(document, ph="b", pid=QUEUE)) == waits


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_obey_the_format_from_any_moment(seed):
    rng = random.Random(seed)
    llm = tiny_llm(num_blocks=10, max_model_len=40, max_num_batched_tokens=12)
    engine = llm.engine
    engine.events._capacity = rng.choice([30, 8192])
    for number in range(50):
        if rng.random() < 0.5:
            params = SamplingParams(max_tokens=rng.randint(1, 14), n=rng.choice([1, 2]), ignore_eos=True)
            engine.add_request(f"r{number}", [rng.randrange(3)] * rng.randint(1, 18), params)
        elif engine.unfinished_ids:
            rng.choice([engine.abort, lambda r: engine.fail(r, "made to")])(rng.choice(engine.unfinished_ids))
        if rng.random() < 0.2:
            engine.set_mode(rng.choice(["naive", "static", "continuous"]))
        for _ in range(rng.randrange(4)):
            engine.step()
        recording = Trace(*engine.events.recording(rng.choice([0, engine.stats().step - 5])))
        if recording.events:
            check_format(chrome_trace(recording), longest_of(recording))


def test_nothing_happened():
    llm = tiny_llm()
    check_format(chrome_trace(Trace(*llm.engine.events.recording())), 0)


def test_the_command_line(trace, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write_trace(trace, path)
    main([str(path)])
    document = json.loads((tmp_path / "a.chrome.json").read_text())
    assert document == chrome_trace(trace)
    path.write_text("".join(list(trace_lines(*trace))[:1]) + "{}")
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "line 2" in capsys.readouterr().err
