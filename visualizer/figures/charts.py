"""Throughput by mode, and the anatomy of a step."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from engine.events import StepEvent
from engine.trace import Trace
from visualizer.figures.source import Source, load, steps_of
from visualizer.figures.theme import Inks, dress, inks, new_figure
from visualizer.measures import LONGEST_GAP, Measures

STAGES = ("forward", "prepare", "sample", "schedule", "postprocess")  # from the bottom up
POINTS = 60  # of a throughput curve, about


def busy_rates(trace: Trace) -> list[tuple[float, float, str]]:
    """(seconds of work, output tokens a second, mode): the throughput curve, pauses left out."""
    steps = steps_of(trace)
    busy: list[float] = []
    last: StepEvent | None = None
    for event in steps:
        goes_on = last is not None and last.num_running + last.num_waiting > 0
        gap = event.time - last.time if last is not None and goes_on else event.times.total
        busy.append(min(gap, event.times.total + LONGEST_GAP))
        last = event
    width = max(sum(busy) / POINTS, 1e-6)
    points: list[tuple[float, float, str]] = []
    done = seconds = 0.0
    tokens = 0
    for place, (event, length) in enumerate(zip(steps, busy, strict=True)):
        seconds += length
        tokens += sum(use.num_sampled for use in event.slots)
        ends = place + 1 == len(steps) or steps[place + 1].mode != event.mode
        if seconds > 0 and (seconds >= width or ends):
            points.append((done + seconds / 2, tokens / seconds, event.mode))
            done, seconds, tokens = done + seconds, 0.0, 0
    return points


def throughput(*sources: Source, theme: str = "light") -> go.Figure:
    """Output tokens a second over seconds of work, coloured by mode, with each mode's mean.

    Means count only time in which there were two requests or more to serve, and a speed-up is given only
    of modes that made enough tokens in such time, as on the page (`measures`). Several traces lie over
    each other, each from 0.
    """
    if not sources:
        raise ValueError("give at least one trace")
    ink = inks(theme)
    traces = [load(source) for source in sources]
    measures = Measures(traces[0].keyframe.info)
    for trace in traces:
        _count(measures, trace)
    means = {mode: t.mean for mode, t in measures.totals.items() if t.tokens}
    listed = ", ".join(f"{mode} {mean:,.0f}" for mode, mean in means.items()) or "nothing measured"
    ratios = [found for mode in means if mode != "naive" and (found := measures.speedup(mode))]
    faster = "; ".join(f"{mode} {ratio:.1f}× naive" for mode, ratio in ratios)
    sentence = f"mean tokens a second while several were served: {listed}" + (f"; {faster}" if faster else "")
    figure = new_figure(
        ink,
        "Throughput",
        sentence,
        f"Throughput over time: {sentence}.",
        height=360,
        margin_b=52,
        hovermode="closest",
    )
    shown: set[str] = set()
    for trace in traces:
        for mode, points in _by_mode(busy_rates(trace)):
            figure.add_scatter(
                x=[x for x, _ in points],
                y=[rate for _, rate in points],
                mode="lines+markers",
                line={"color": ink.mode(mode), "width": 2},
                marker={"size": 4, "symbol": _SYMBOLS[mode]},
                name=mode,
                legendgroup=mode,
                showlegend=False,
                hovertemplate=f"{mode}: %{{y:.0f}} tokens/s<extra></extra>",
            )
            _add_mean(figure, ink, mode, means.get(mode), points, named=mode in shown)
            shown.add(mode)
    figure.update_xaxes(title_text="seconds of work", rangemode="tozero")
    figure.update_yaxes(title_text="output tokens a second", rangemode="tozero")
    return figure


_SYMBOLS = {"naive": "circle", "static": "square", "continuous": "diamond"}


def _count(measures: Measures, trace: Trace) -> None:
    """Add a trace to the totals. What the trace before it left open is over."""
    measures.pause()
    for event in steps_of(trace):
        measures.step(event)


def _by_mode(points: list[tuple[float, float, str]]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Runs of points of one mode."""
    runs: list[tuple[str, list[tuple[float, float]]]] = []
    for x, rate, mode in points:
        if not runs or runs[-1][0] != mode:
            runs.append((mode, []))
        runs[-1][1].append((x, rate))
    return runs


def _add_mean(
    figure: go.Figure,
    ink: Inks,
    mode: str,
    mean: float | None,
    points: list[tuple[float, float]],
    named: bool,
) -> None:
    """A dashed line at the mean, and, once for each mode, its name and mean above the curve."""
    left, right = points[0][0], points[-1][0]
    if mean is not None:
        figure.add_scatter(
            x=[left, right],
            y=[mean, mean],
            mode="lines",
            line={"color": ink.mode(mode), "width": 1.2, "dash": "dash"},
            hoverinfo="skip",
            showlegend=False,
        )
    if not named:
        figure.add_annotation(
            x=(left + right) / 2,
            y=max(rate for _, rate in points),
            text=f"<b>{mode}{'' if mean is None else f' {mean:,.0f}'}</b>",
            font={"color": ink.mode(mode), "size": 13},
            showarrow=False,
            yshift=14,
        )


def step_anatomy(
    source: Source, *, first_step: int | None = None, last_step: int | None = None, theme: str = "light"
) -> go.Figure:
    """One bar a step: milliseconds by stage, and below, prefill and decode tokens in its batch.

    Raises ValueError if no step is left to show.
    """
    trace = load(source)
    steps = steps_of(trace)
    shown = [
        s
        for s in steps
        if (first_step is None or s.step >= first_step) and (last_step is None or s.step <= last_step)
    ]
    if not shown:
        raise ValueError("nothing to show of this trace: it has no such steps")
    ink = inks(theme)
    total = sum(event.times.total for event in shown)
    forward = sum(event.times.forward for event in shown)
    share = f", {100 * forward / total:.0f}% of it forward" if total else ""
    sentence = f"{1000 * total / len(shown):.1f} ms a step{share}, mean of {len(shown):,} steps"
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.66, 0.34], vertical_spacing=0.09)
    dress(
        figure,
        ink,
        "Anatomy of a step",
        sentence,
        f"Time of each step by stage, and tokens in its batch: {sentence}.",
        height=480,
        barmode="stack",
        legend_traceorder="normal",
        bargap=0.12 if len(shown) <= 200 else 0,
        hovermode="x unified",
    )
    x = [event.step for event in shown]
    for stage in STAGES:
        ms = [1000 * getattr(event.times, stage) for event in shown]
        figure.add_bar(
            x=x,
            y=ms,
            name=stage,
            marker={"color": getattr(ink, stage), "line": {"width": 0}},
            hovertemplate=f"{stage}: %{{y:.2f}} ms<extra></extra>",
            row=1,
            col=1,
        )
    for phase, colour in (("decode", ink.ink), ("prefill", ink.edge)):
        figure.add_bar(
            x=x,
            y=[sum(use.num_tokens for use in event.slots if use.phase == phase) for event in shown],
            name=f"{phase} tokens",
            marker={
                "color": colour,
                "line": {"width": 0},
            },
            hovertemplate=f"{phase}: %{{y}} tokens<extra></extra>",
            row=2,
            col=1,
        )
    figure.update_yaxes(title_text="milliseconds", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="tokens", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    return figure
