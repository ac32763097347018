"""Two traces of the same requests, side by side on one clock."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from engine.trace import Trace
from visualizer.figures.source import Source, load, steps_of
from visualizer.figures.theme import dress, inks
from visualizer.figures.timeline import add_marks, add_slots
from visualizer.summary import difference, summarise


def race(a: Source, b: Source, *, theme: str = "light") -> go.Figure:
    """Slots of both arms, then output tokens and KV blocks over time, with each one's finish line.

    "x times faster" is said only if both did the same work. Raises ValueError if one has no steps.
    """
    arms = [load(a), load(b)]
    if not all(steps_of(trace) for trace in arms):
        raise ValueError("there is nothing to race: one of the traces has no steps")
    ink = inks(theme)
    numbers = [summarise(trace) for trace in arms]
    names = _names(numbers)
    reason = difference(*arms)
    ends = [number["seconds"] for number in numbers]
    verdict, sentence = _verdict(names, ends, reason)
    rows = max(trace.keyframe.info.max_num_seqs for trace in arms)
    tall = max(9, min(20, 340 // rows))
    heights = [tall * trace.keyframe.info.max_num_seqs for trace in arms] + [110, 110]
    height = sum(heights) + 116 + 76 + 3 * 46
    titles = [
        f"<b>{name}</b>: {number['steps']:,} steps, {number['wasted']:,} slot-steps idle while others waited"
        for name, number in zip(names, numbers, strict=True)
    ]
    figure = make_subplots(
        rows=4,
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=46 / (height - 192),
        subplot_titles=[*titles, "Output tokens so far", "KV blocks in use"],
    )
    wasted = "; ".join(f"{name} took {end:.1f} s" for name, end in zip(names, ends, strict=True))
    dress(
        figure,
        ink,
        verdict,
        sentence,
        f"A race of {names[0]} against {names[1]}: {verdict}; {wasted}.",
        height,
        barmode="overlay",
        margin_t=116,
        uniformtext={"minsize": 8, "mode": "hide"},
        hovermode="closest",
    )
    for annotation in figure.layout.annotations:
        annotation.update(x=0, xanchor="left", font={"size": 13, "color": ink.ink})
    for row, trace in enumerate(arms, 1):
        steps = steps_of(trace)
        add_slots(figure, trace, steps, ink, row, "seconds", legend=True)
        add_marks(figure, trace, steps, ink, row, "seconds")
    _name_once(figure)
    for trace, name, number, dash in zip(arms, names, numbers, ("solid", "dot"), strict=True):
        colour = ink.mode(number["modes"][-1])
        tokens, blocks = _curves(trace)
        for row, (x, y), unit in ((3, tokens, "tokens"), (4, blocks, "blocks")):
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines",
                line={"color": colour, "width": 2, "dash": dash, "shape": "hv"},
                name=name,
                legendgroup=name,
                showlegend=row == 3,
                hovertemplate=f"{name}: %{{y:,}} {unit} after %{{x:.2f}} s<extra></extra>",
                row=row,
                col=1,
            )
    for row in (1, 2, 3, 4):
        for place, (name, number, end) in enumerate(zip(names, numbers, ends, strict=True)):
            if row <= 2 and place != row - 1:
                continue
            colour = ink.mode(number["modes"][-1])
            figure.add_vline(x=end, line={"color": colour, "width": 1.5, "dash": "dash"}, row=row, col=1)
            if row == place + 1:
                _add_flag(figure, row, end, max(ends), f"{name} done: {end:.1f} s", colour)
    figure.update_xaxes(range=[0, max(ends) * 1.03])
    figure.update_xaxes(title_text="seconds", row=4, col=1)
    for row, title in ((3, "tokens"), (4, "blocks")):
        figure.update_yaxes(title_text=title, rangemode="tozero", nticks=4, row=row, col=1)
    return figure


def _name_once(figure: go.Figure) -> None:
    """What both arms have stands in the legend once."""
    seen: set[str] = set()
    for trace in figure.data:
        if trace.showlegend is not False:
            trace.showlegend = trace.name not in seen
            seen.add(trace.name)


def _names(numbers: list[dict]) -> list[str]:
    names = [" then ".join(number["modes"]) for number in numbers]
    return names if names[0] != names[1] else [f"{names[0]} (1)", f"{names[1]} (2)"]


def _verdict(names: list[str], ends: list[float], reason: str) -> tuple[str, str]:
    """The title and the sentence under it."""
    if reason:
        return "No winner: the work was not the same", f"no speed-up is given, since {reason}"
    slow, fast = (0, 1) if ends[0] >= ends[1] else (1, 0)
    ratio = ends[slow] / ends[fast] if ends[fast] > 0 else 1.0
    sentence = f"the same requests: {names[fast]} took {ends[fast]:.1f} s, {names[slow]} {ends[slow]:.1f} s"
    return f"{names[fast].capitalize()} is {ratio:.1f}× faster", sentence


def _curves(trace: Trace) -> tuple[tuple[list[float], list[int]], tuple[list[float], list[int]]]:
    """Output tokens so far, and blocks in use, each over the trace's seconds."""
    xs, tokens, blocks = [0.0], [0], [sum(bool(block.owners) for block in trace.keyframe.blocks)]
    for event in steps_of(trace):
        xs.append(event.time - trace.keyframe.time)
        tokens.append(tokens[-1] + sum(use.num_sampled for use in event.slots))
        blocks.append(event.num_used)
    return (xs, tokens), (xs, blocks)


def _add_flag(figure: go.Figure, row: int, end: float, latest: float, words: str, colour: str) -> None:
    """The finish line's words: on the side where there is room."""
    left = end > 0.6 * latest
    figure.add_annotation(
        x=end,
        y=1,
        yref=f"y{'' if row == 1 else row} domain",
        text=f"<b>{words}</b>",
        font={"color": colour, "size": 12},
        showarrow=False,
        xanchor="right" if left else "left",
        yanchor="bottom",
        xshift=-4 if left else 4,
        row=row,
        col=1,
    )
