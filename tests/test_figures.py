"""Figures from traces: they show what the trace tells, in the page's colours, and say it in words."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import fields, replace

import pytest

from engine.events import LifecycleEvent, Replica, StepEvent
from engine.trace import Trace, write_trace
from tests.support import tiny_llm
from tests.test_events import busy_life
from visualizer import figures
from visualizer.figures import theme
from visualizer.figures.source import state_after, steps_of
from visualizer.frames import trace_frames
from visualizer.letters import slot_letter
from visualizer.race import run_race
from visualizer.routes import STATIC
from visualizer.siblings import Siblings


@pytest.fixture(scope="module", params=[9, 64])
def trace(request) -> Trace:
    llm = tiny_llm(num_blocks=request.param)
    busy_life(llm)
    return Trace(*llm.engine.events.recording())


@pytest.fixture(scope="module")
def arms() -> tuple[Trace, Trace]:
    siblings = Siblings(tiny_llm(num_blocks=128, max_model_len=200, max_num_batched_tokens=64))
    first, second = run_race(siblings, ("naive", "continuous"), 8).arms
    return first.trace, second.trace


def bars(figure, kind: str) -> list[tuple[int, float, float]]:
    """(slot, start, length) of the bars of one kind."""
    (trace,) = [t for t in figure.data if t.type == "bar" and t.name == kind and t.hovertext is not None]
    return list(zip(trace.y, trace.base, trace.x, strict=True))


def test_a_timeline_shows_every_slot_step(trace):
    figure = figures.timeline(trace)
    steps = steps_of(trace)
    for kind in ("prefill", "decode", "held"):
        told = sum(
            (use.phase if use.num_tokens else "held") == kind for event in steps for use in event.slots
        )
        assert sum(length for *_, length in bars(figure, kind)) == told
    idle = sum(4 - len(event.slots) for event in steps if event.num_waiting)
    assert sum(length for *_, length in bars(figure, "idle")) == idle
    assert f"{idle:,} of {4 * len(steps):,} slot-steps idle" in figures.alt_text(figure)
    for kind in ("prefill", "decode", "held", "idle"):
        for slot, start, length in bars(figure, kind):
            assert 0 <= slot < 4 and start >= 0.5 and length >= 1
    told = [e for e in trace.events if isinstance(e, LifecycleEvent) and e.reason != "mode"]
    for kind, name in (("injected", "injected mid-decode"), ("preempted", "preempted")):
        (marks,) = [t for t in figure.data if t.name == name]
        assert len(marks.x) == sum(event.kind == kind for event in told)
    modes = {a.text for a in figure.layout.annotations}
    assert modes == {"<b>continuous</b>", "<b>static</b>"}


def test_a_timeline_on_a_clock(trace):
    figure = figures.timeline(trace, clock="seconds")
    spans = sorted(span for kind in ("prefill", "decode") for span in bars(figure, kind))
    end = trace.events[-1].time - trace.keyframe.time
    assert all(start >= 0 and start + length <= end + 1e-9 for _, start, length in spans)
    for (slot, start, length), (next_slot, next_start, _) in itertools.pairwise(spans):
        assert slot != next_slot or start + length <= next_start + 1e-9


def test_a_part_of_a_timeline(trace):
    figure = figures.timeline(trace, first_step=5, last_step=9)
    assert "5 steps" in figures.alt_text(figure)
    assert {start for _, start, _ in bars(figure, "decode")} <= {4.5, 5.5, 6.5, 7.5, 8.5}
    with pytest.raises(ValueError, match="it has steps 1 to"):
        figures.timeline(trace, first_step=10**6)
    with pytest.raises(ValueError, match="unknown clock"):
        figures.timeline(trace, clock="sundial")


def test_blocks_show_the_engine_after_each_step(trace):
    replica = Replica(trace.keyframe)
    for event in trace.events:
        replica.apply(event)
        if not isinstance(event, StepEvent):
            continue
        figure = figures.blocks(trace, event.step)
        (hover,) = [t for t in figure.data if t.text is not None and t.mode == "markers"]
        assert len(hover.text) == len(replica.blocks)
        for block, words in zip(replica.blocks, hover.text, strict=True):
            state = "in use" if block.state == "used" else block.state
            assert words.startswith(f"<b>Block {block.block}</b>: {state}")
            if block.owners:
                assert f"{block.filled} of 4 tokens" in words
        letters = [w for t in figure.data if t.mode == "text" for w in t.text]
        assert len(letters) == sum(bool(block.owners) for block in replica.blocks)
        shared = [block for block in replica.blocks if len(block.owners) > 1]
        assert letters.count("<b>×2</b>") == sum(len(block.owners) == 2 for block in shared)
        held = sum(bool(block.owners) for block in replica.blocks)
        assert f"{held} of {len(replica.blocks)} blocks held" in figures.alt_text(figure)


def test_a_legend_names_what_is_to_be_seen(trace, arms):
    words = {"held": "held without token budget", "idle": "idle while others wait"}
    for arm in arms:
        figure = figures.timeline(arm)
        expected = {
            words.get(kind, kind) for kind in ("prefill", "decode", "held", "idle") if bars(figure, kind)
        }
        shown = {t.name for t in figure.data if t.showlegend is not False and t.type == "bar"}
        assert shown == expected and len(shown) < 4
    race = [t.name for t in figures.race(*arms).data if t.showlegend]
    assert len(race) == len(set(race)) and {"decode", "idle while others wait"} <= set(race)
    states = state_after(trace, None)[0].blocks
    words = " ".join(a.text for a in figures.blocks(trace).layout.annotations)
    assert ("free" in words) == any(block.state == "free" for block in states)
    assert ("cached" in words) == any(block.state == "cached" for block in states)
    assert "reserved" not in words and "shared" not in words  # nobody is left
    alone = figures.blocks(arms[0], steps_of(arms[0])[0].step).layout.annotations
    assert {"in use, filled from below", "reserved, nothing in it"} <= {a.text for a in alone}


def test_blocks_of_no_step(trace):
    with pytest.raises(ValueError, match="step 4000 is not in this trace: it has steps 1 to"):
        figures.blocks(trace, 4000)
    with pytest.raises(ValueError, match="it has none"):
        figures.blocks(Trace(trace.keyframe, []), 1)
    assert "0 of" in figures.alt_text(figures.blocks(Trace(trace.keyframe, [])))


@pytest.mark.parametrize("num_blocks", [1, 16, 700, 4096])
def test_blocks_of_any_number(num_blocks):
    figure = figures.blocks(tiny_llm(num_blocks=num_blocks).engine.events.recording())
    across, down = figure.layout.xaxis.range[1], -figure.layout.yaxis.range[0] / 1.3
    assert across * down >= num_blocks and figure.layout.height < 1600
    assert len(figure.data) < 40  # however many cells


def test_what_was_written_is_what_was_computed(trace):
    """A step writes the blocks that its tokens lie in, and no block that it merely found in the cache."""
    frames = [json.loads(frame) for frame in trace_frames(trace)]
    replica = Replica(trace.keyframe)
    for event in trace.events:
        replica.apply(event)
        if not isinstance(event, StepEvent):
            continue
        expected = set()
        for use in event.slots:
            if use.request_id in replica.requests and use.num_tokens:
                first = (use.num_computed - use.num_tokens) // 4
                expected |= set(replica.block_tables[use.request_id][first : -(-use.num_computed // 4)])
        written = state_after(trace, event.step)[2]
        (frame,) = [f for f in frames if f["steps"] and f["steps"][0][0] == event.step]
        assert {block for block, *_, new in frame["blocks"] if new} == written
        # Who fills a block that is there already shares that one: it shows as shared, not as written.
        shared = {block.block for block in replica.blocks if len(block.owners) > 1}
        assert written <= expected and expected - written <= shared


def test_throughput_means_and_speedups(arms):
    figure = figures.throughput(*arms)
    names = {t.name for t in figure.data if t.name}
    assert names == {"naive", "continuous"}
    assert re.search(r"naive [\d,]+, continuous [\d,]+; continuous [\d.]+× naive", figures.alt_text(figure))
    for t in figure.data:
        assert all(y >= 0 for y in t.y) and list(t.x) == sorted(t.x)
    one = figures.throughput(arms[1])
    assert "×" not in figures.alt_text(one)  # nothing to compare with
    nothing = figures.throughput(Trace(arms[0].keyframe, []))
    assert "nothing measured" in figures.alt_text(nothing)
    with pytest.raises(ValueError, match="at least one"):
        figures.throughput()


def test_anatomy_adds_up(trace):
    figure = figures.step_anatomy(trace, first_step=3, last_step=12)
    steps = [event for event in steps_of(trace) if 3 <= event.step <= 12]
    stages = [t for t in figure.data if not t.name.endswith("tokens")]
    assert [t.name for t in stages] == ["forward", "prepare", "sample", "schedule", "postprocess"]
    for place, event in enumerate(steps):
        assert sum(t.y[place] for t in stages) == pytest.approx(1000 * event.times.total)
    for phase in ("prefill", "decode"):
        (tokens,) = [t for t in figure.data if t.name == f"{phase} tokens"]
        assert list(tokens.y) == [
            sum(use.num_tokens for use in event.slots if use.phase == phase) for event in steps
        ]
    with pytest.raises(ValueError, match="no such steps"):
        figures.step_anatomy(trace, first_step=10**6)


def test_a_race_names_the_winner_only_of_equal_work(arms):
    figure = figures.race(*arms)
    ends = [trace.events[-1].time for trace in arms]
    ratio = f"{max(ends) / min(ends):.1f}"
    assert f"is {ratio}× faster" in figure.layout.title.text
    flags = {a.text for a in figure.layout.annotations}
    assert {f"<b>naive done: {ends[0]:.1f} s</b>", f"<b>continuous done: {ends[1]:.1f} s</b>"} <= flags
    tokens = [t for t in figure.data if t.legendgroup and t.showlegend]
    assert [t.y[-1] for t in tokens] == [tokens[0].y[-1]] * 2
    ended = next(e for e in arms[1].events if getattr(e, "kind", "") == "finished")
    unequal = [replace(e, reason="error") if e is ended else e for e in arms[1].events]
    figure = figures.race(arms[0], Trace(arms[1].keyframe, unequal))
    assert "faster" not in str(figure.layout.title) and "did not come to its end" in str(figure.layout.title)
    with pytest.raises(ValueError, match="no steps"):
        figures.race(arms[0], Trace(arms[1].keyframe, []))
    twice = figures.race(arms[0], arms[0])
    assert "naive (1)" in twice.layout.annotations[0].text


def test_a_trace_may_be_a_file(trace, tmp_path):
    write_trace(trace, tmp_path / "t.jsonl")
    for source in (tmp_path / "t.jsonl", str(tmp_path / "t.jsonl"), (trace.keyframe, iter(trace.events))):
        assert figures.timeline(source).to_json() == figures.timeline(trace).to_json()


def test_every_figure_has_both_themes_a_title_and_words(trace, arms):
    with pytest.raises(ValueError, match="unknown theme"):
        figures.timeline(trace, theme="sepia")
    made = {}
    for name in ("light", "dark"):
        made[name] = [
            figures.blocks(trace, theme=name),
            figures.timeline(trace, theme=name),
            figures.step_anatomy(trace, theme=name),
            figures.throughput(*arms, theme=name),
            figures.race(*arms, theme=name),
        ]
        for figure in made[name]:
            assert figure.layout.title.text and figure.layout.title.subtitle.text
            assert len(figures.alt_text(figure)) > 40
            assert "<" not in figures.alt_text(figure)
            assert figure.layout.paper_bgcolor == theme.inks(name).panel
            figure.to_json()
    assert made["light"][0].layout.font.color != made["dark"][0].layout.font.color


# -- the page's looks -------------------------------------------------------------------------------


def test_colours_are_the_pages():
    script = (STATIC / "theme.js").read_text()
    assert tuple(re.findall(r"#[0-9a-f]{6}", script[script.index("HUES") : script.index("];")])) == theme.HUES
    style = (STATIC / "glass.css").read_text()
    root = dict(re.findall(r"--glass-(\w+): (#[0-9a-f]{6})", style[: style.index(".dark {")]))
    dark = root | dict(re.findall(r"--glass-(\w+): (#[0-9a-f]{6})", style[style.index(".dark {") :]))
    for ink, page in ((theme.LIGHT, root), (theme.DARK, dark)):
        for field in fields(ink):
            if field.name != "dark":
                assert getattr(ink, field.name) == page[field.name], field.name


def test_no_two_slots_have_the_same_letter():
    letters = [slot_letter(slot) for slot in range(256)]
    assert len(set(letters)) == 256 and max(map(len, letters)) == 2
    assert letters[:2] + letters[25:28] + letters[52:53] == ["A", "B", "Z", "AA", "AB", "BA"]


# How the colour-blind see: linear RGB to linear RGB (Machado, Oliveira and Fernandes, 2009).
SIGHT = {
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}


def seen_as(colour: str, sight: str) -> tuple[float, float, float]:
    """A colour in CIELAB, as somebody of that sight sees it."""
    linear = [
        theme.luminance("#" + "0" * 2 * i + colour[1 + 2 * i :][:2] + "0" * (4 - 2 * i)) for i in range(3)
    ]
    linear = [part / full for part, full in zip(linear, (0.2126, 0.7152, 0.0722), strict=True)]
    rgb = [max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))) for row in SIGHT[sight]]
    to_xyz = ((0.4339, 0.3763, 0.1898), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8727))  # white: 1, 1, 1
    x, y, z = (sum(a * b for a, b in zip(row, rgb, strict=True)) ** (1 / 3) for row in to_xyz)
    return 116 * y, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("ink", [theme.LIGHT, theme.DARK])
def test_the_colour_blind_tell_the_modes_apart(ink, sight):
    modes = [seen_as(ink.mode(mode), sight) for mode in ("naive", "static", "continuous")]
    assert all(math.dist(a, b) > 25 for a, b in itertools.combinations(modes, 2))


@pytest.mark.parametrize("ink", [theme.LIGHT, theme.DARK])
def test_slots_can_be_read(ink):
    """Text on a slot's colour has 4.5:1 contrast, as the page's; neighbours in the row do not look alike."""
    looks = [theme.slot_look(slot, ink) for slot in range(16)]
    assert len({look.fill for look in looks}) == 16
    for look in looks:
        light, dim = sorted(map(theme.luminance, (look.fill, look.text)), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 4.4, look
