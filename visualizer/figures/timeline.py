"""Slots over time: who sat where, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from engine.events import StepEvent
from engine.trace import Trace
from visualizer.figures.source import Source, keys_of, load, steps_of, transitions_of
from visualizer.figures.theme import Inks, dress, inks, slot_look
from visualizer.letters import slot_letter

KINDS = ("prefill", "decode", "held", "idle")


@dataclass
class _Bars:
    """Bars of one kind: runs of equal steps in a slot."""

    slots: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    hover: list[str] = field(default_factory=list)


def timeline(
    source: Source,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    clock: str = "steps",
    theme: str = "light",
) -> go.Figure:
    """Slots (rows) over steps: prefill striped, decode plain, idle while somebody waits hatched.

    Triangles mark injections in the middle of others' decoding and preemptions; the lower chart is the
    length of the queue. clock: "steps", or "seconds" since the trace began. Raises ValueError if no
    step is left to show.
    """
    if clock not in ("steps", "seconds"):
        raise ValueError(f"unknown clock {clock!r}; choose steps or seconds")
    trace = load(source)
    steps = _range(trace, first_step, last_step)
    ink, info = inks(theme), trace.keyframe.info
    idle = sum(info.max_num_seqs - len(event.slots) for event in steps if event.num_waiting)
    modes = list(dict.fromkeys(event.mode for event in steps))
    sentence = (
        f"{len(steps):,} steps, {', then '.join(modes)}; {idle:,} of {len(steps) * info.max_num_seqs:,} "
        "slot-steps idle while somebody waited"
    )
    tall = max(9, min(22, 420 // info.max_num_seqs))
    height = tall * info.max_num_seqs + 104 + 76 + 90
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[tall * info.max_num_seqs, 60],
        vertical_spacing=22 / (height - 180),
    )
    dress(
        figure,
        ink,
        "Slots over time",
        sentence,
        f"Slots over time, {info.max_num_seqs} slots: {sentence}.",
        height,
        barmode="overlay",
        margin_t=104,
        uniformtext={"minsize": 8, "mode": "hide"},
    )
    add_slots(figure, trace, steps, ink, row=1, clock=clock, legend=True)
    add_marks(figure, trace, steps, ink, row=1, clock=clock)
    edges = _edges(steps, trace.keyframe.time, clock)
    _add_modes(figure, steps, edges, ink)
    waiting = [event.num_waiting for event in steps]
    figure.add_scatter(
        x=[x for edge in edges for x in edge],
        y=[count for count in waiting for _ in (0, 1)],
        mode="lines",
        line={"color": ink.muted, "width": 1},
        fill="tozeroy",
        fillcolor=ink.hatch,
        name="waiting",
        showlegend=False,
        hovertemplate="%{y} waiting<extra></extra>",
        row=2,
        col=1,
    )
    ticks = {"dtick": 1} if max(waiting) <= 3 else {"nticks": 3}  # there is no half a request
    figure.update_yaxes(title_text="queue", rangemode="tozero", row=2, col=1, **ticks)
    figure.update_xaxes(range=[edges[0][0], edges[-1][1]])
    figure.update_xaxes(title_text="step" if clock == "steps" else "seconds", row=2, col=1)
    return figure


def _add_modes(
    figure: go.Figure, steps: list[StepEvent], edges: list[tuple[float, float]], ink: Inks
) -> None:
    """Name each mode where it begins, if there are several."""
    begins = [0] + [i for i in range(1, len(steps)) if steps[i].mode != steps[i - 1].mode]
    for place in begins if len(begins) > 1 else ():
        mode, left = steps[place].mode, edges[place][0]
        colour = ink.mode(mode)
        if place:
            line = {"color": colour, "width": 1.5, "dash": "dot"}
            figure.add_vline(x=left, line=line, row=1, col=1)
        figure.add_annotation(
            x=left,
            y=1,
            yref="y domain",
            text=f"<b>{mode}</b>",
            font={"color": colour, "size": 12},
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            yshift=4,
        )


def _range(trace: Trace, first: int | None, last: int | None) -> list[StepEvent]:
    steps = steps_of(trace)
    shown = [s for s in steps if (first is None or s.step >= first) and (last is None or s.step <= last)]
    if not shown:
        known = f"it has steps {steps[0].step} to {steps[-1].step}" if steps else "it has no steps"
        raise ValueError(f"nothing to show of this trace: {known}")
    return shown


def _edges(steps: list[StepEvent], began: float, clock: str) -> list[tuple[float, float]]:
    """Where each step begins and ends on the axis."""
    if clock == "steps":
        return [(event.step - 0.5, event.step + 0.5) for event in steps]
    edges, before = [], 0.0
    for event in steps:
        end = event.time - began
        edges.append((max(before, end - event.times.total), end))
        before = end
    return edges


def add_slots(
    figure: go.Figure, trace: Trace, steps: list[StepEvent], ink: Inks, row: int, clock: str, legend: bool
) -> None:
    """Add one bar for each run of equal steps in a slot; the legend names the kinds that there are."""
    keys, num_slots = keys_of(trace), trace.keyframe.info.max_num_seqs
    edges = _edges(steps, trace.keyframe.time, clock)
    bars = {kind: _Bars() for kind in KINDS}
    for slot in range(num_slots):
        _runs(bars, slot, steps, edges, keys)
    for kind in KINDS:
        _add_bars(figure, bars[kind], kind, ink, row)
        if legend and bars[kind].slots:
            _add_key(figure, kind, ink)
    letters = [slot_letter(slot) for slot in range(num_slots)]
    every = 1 if num_slots <= 40 else 4
    figure.update_yaxes(
        range=[num_slots - 0.5, -0.5],
        tickvals=list(range(0, num_slots, every)),
        ticktext=letters[::every],
        tickfont={"size": 12 if num_slots <= 20 else 9},
        showgrid=False,
        row=row,
        col=1,
    )


def _runs(
    bars: dict[str, _Bars],
    slot: int,
    steps: list[StepEvent],
    edges: list[tuple[float, float]],
    keys: dict[str, int],
) -> None:
    """Cut one slot's row into runs. A pause between two steps, on a clock of seconds, ends a run too."""
    run: tuple[str, str] | None = None
    start = end = tokens = count = first = 0.0

    def close() -> None:
        if run is None:
            return
        kind, name = run
        bar = bars[kind]
        bar.slots.append(slot)
        bar.starts.append(start)
        bar.lengths.append(end - start)
        bar.labels.append(f"#{name}" if kind == "decode" else "")
        span = f"step {first:.0f}" if count == 1 else f"steps {first:.0f} to {first + count - 1:.0f}"
        what = f"idle while others wait, {span}" if kind == "idle" else f"request #{name}: {kind}, {span}"
        amount = f"<br>{tokens:.0f} tokens" if kind in ("prefill", "decode") else ""
        bar.hover.append(f"<b>Slot {slot_letter(slot)}</b><br>{what}{amount}")

    for event, (left, right) in zip(steps, edges, strict=True):
        use = next((use for use in event.slots if use.slot == slot), None)
        if use is not None:
            kind = use.phase if use.num_tokens else "held"
            now: tuple[str, str] | None = (kind, str(keys.get(use.request_id, "?")))
        else:
            now = ("idle", "") if event.num_waiting else None
        if now != run or left - end > 0.02 * (right - left) + 0.02:
            close()
            run, start, tokens, count, first = now, left, 0, 0, event.step
        end = right
        tokens += use.num_tokens if use else 0
        count += 1
    close()


def _add_bars(figure: go.Figure, bars: _Bars, kind: str, ink: Inks, row: int) -> None:
    looks = [slot_look(slot, ink) for slot in bars.slots]
    figure.add_bar(
        orientation="h",
        y=bars.slots,
        base=bars.starts,
        x=bars.lengths,
        width=0.78,
        marker=_marker(kind, [look.fill for look in looks], [look.edge for look in looks], ink),
        text=bars.labels,
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        textfont={"color": [look.text for look in looks], "size": 11},
        cliponaxis=True,
        hovertext=bars.hover,
        hovertemplate="%{hovertext}<extra></extra>",
        name=kind,
        showlegend=False,
        row=row,
        col=1,
    )


def _marker(kind: str, fills: Any, edges: Any, ink: Inks) -> dict[str, Any]:
    if kind == "idle":
        pattern = {"shape": "/", "fgcolor": ink.hatch, "bgcolor": ink.panel, "size": 6, "solidity": 0.22}
        return {"color": ink.panel, "line": {"width": 0}, "pattern": pattern}
    if kind == "held":
        return {"color": ink.panel, "line": {"color": edges, "width": 1}}
    marker: dict[str, Any] = {"color": fills, "line": {"color": edges, "width": 0.6}}
    if kind == "prefill":
        marker["pattern"] = {"shape": "\\", "fillmode": "overlay", "fgcolor": "#000000", "fgopacity": 0.55}
        marker["pattern"] |= {"size": 5, "solidity": 0.3}
    return marker


def _add_key(figure: go.Figure, kind: str, ink: Inks) -> None:
    """An entry of the legend. Its colour is no slot's, for it stands for all of them."""
    blue = slot_look(4, ink)
    names = {"idle": "idle while others wait", "held": "held without token budget"}
    figure.add_bar(
        x=[None],
        y=[None],
        orientation="h",
        marker=_marker(kind, blue.fill, blue.edge, ink),
        name=names.get(kind, kind),
    )


def add_marks(
    figure: go.Figure,
    trace: Trace,
    steps: list[StepEvent],
    ink: Inks,
    row: int,
    clock: str,
) -> None:
    """Add triangles: down where a request was injected, up where one was preempted."""
    keys = keys_of(trace)
    place = dict(zip((event.step for event in steps), _edges(steps, trace.keyframe.time, clock), strict=True))
    slots = {view.request_id: view.slot for view in trace.keyframe.requests}
    marks: dict[str, list[tuple[float, float, str]]] = {"injected": [], "preempted": []}
    for event in transitions_of(trace):
        if event.slot is not None:
            slots[event.request_id] = event.slot
        slot = slots.get(event.request_id)
        if event.kind not in marks or event.reason == "mode" or slot is None or event.step not in place:
            continue
        words = f"step {event.step}: #{keys.get(event.request_id, '?')} {event.kind}"
        marks[event.kind].append((place[event.step][0], slot, words))
    for kind, symbol, colour, shift, name in (
        ("injected", "triangle-down", ink.ink, -0.42, "injected mid-decode"),
        ("preempted", "triangle-up", ink.alarm, 0.42, "preempted"),
    ):
        points = marks[kind]
        figure.add_scatter(
            x=[x for x, _, _ in points],
            y=[slot + shift for _, slot, _ in points],
            mode="markers",
            marker={"symbol": symbol, "size": 9, "color": colour, "line": {"color": ink.panel, "width": 1.2}},
            text=[words for *_, words in points],
            hovertemplate="%{text}<extra></extra>",
            name=name,
            showlegend=bool(points),
            row=row,
            col=1,
        )
