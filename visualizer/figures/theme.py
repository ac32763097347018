"""The looks of the figures: the page's colours (`static/theme.js`, `static/glass.css`), light and dark.

A slot's colour is one of eight hues (Okabe and Ito's, told apart by colour-blind eyes), full for slots A
to H and pale for I to P; the letter says which one it is without colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

HUES = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#8a8f98")
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'


@dataclass(frozen=True)
class Inks:
    """Names as in `glass.css`, where each is `--glass-NAME`."""

    dark: bool
    panel: str
    ink: str
    muted: str
    line: str
    edge: str
    idle: str
    hatch: str
    alarm: str
    naive: str
    static: str
    continuous: str
    forward: str
    prepare: str
    sample: str
    schedule: str
    postprocess: str

    def mode(self, name: str) -> str:
        return getattr(self, name)


LIGHT = Inks(
    dark=False,
    panel="#ffffff",
    ink="#1a1e26",
    muted="#5f6875",
    line="#d5d9e0",
    edge="#8b929d",
    idle="#e3e6eb",
    hatch="#9aa1ac",
    alarm="#c04f00",
    naive="#c65500",
    static="#00875f",
    continuous="#0072b2",
    forward="#0072b2",
    prepare="#56b4e9",
    sample="#009e73",
    schedule="#e69f00",
    postprocess="#cc79a7",
)
DARK = Inks(
    dark=True,
    panel="#171a20",
    ink="#eceff4",
    muted="#9aa3b0",
    line="#343a45",
    edge="#717a88",
    idle="#252a33",
    hatch="#626b79",
    alarm="#ff8a3d",
    naive="#ff8a3d",
    static="#2fc094",
    continuous="#56b4e9",
    forward="#2f8fc9",
    prepare="#8fd0f5",
    sample="#009e73",
    schedule="#e69f00",
    postprocess="#cc79a7",
)


def inks(theme: str) -> Inks:
    """The colours of a theme. Raises ValueError if there is none of that name."""
    if theme not in ("light", "dark"):
        raise ValueError(f"unknown theme {theme!r}; choose light or dark")
    return DARK if theme == "dark" else LIGHT


def _mix(start: str, end: str, share: float) -> str:
    channels = (
        round(int(start[i : i + 2], 16) * (1 - share) + int(end[i : i + 2], 16) * share) for i in (1, 3, 5)
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def luminance(colour: str) -> float:
    """Relative luminance of a "#rrggbb" colour, as WCAG defines it."""
    linear = []
    for i in (1, 3, 5):
        value = int(colour[i : i + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@dataclass(frozen=True)
class Look:
    """How a slot looks: its fill, an edge of 3:1 contrast to the page, and text on the fill."""

    fill: str
    edge: str
    text: str


def slot_look(slot: int | None, ink: Inks) -> Look:
    """None: nobody's."""
    if slot is None:
        return Look("#9aa0a9", "#7b828c", "#11151c")
    hue = HUES[slot % 8]
    pale = slot // 8 % 2 == 1
    background, share = ("#12151b", 0.42) if ink.dark else ("#ffffff", 0.45)
    fill = _mix(hue, background, share) if pale else hue
    edge = _mix(hue, "#ffffff", 0.3) if ink.dark else _mix(hue, "#000000", 0.4)
    return Look(fill, edge, "#11151c" if luminance(fill) > 0.22 else "#ffffff")


def new_figure(ink: Inks, title: str, sentence: str, alt: str, height: int, **layout: Any) -> go.Figure:
    """An empty figure with title, one sentence under it, and its text alternative."""
    figure = go.Figure()
    dress(figure, ink, title, sentence, alt, height, **layout)
    return figure


def dress(
    figure: go.Figure, ink: Inks, title: str, sentence: str, alt: str, height: int, **layout: Any
) -> None:
    """Give a figure the page's looks."""
    axis = {
        "color": ink.muted,
        "gridcolor": ink.line,
        "linecolor": ink.line,
        "zeroline": False,
        "tickfont": {"size": 12},
        "title": {"font": {"size": 12}, "standoff": 8},
    }
    figure.update_layout(
        template="none",
        title={
            "text": f"<b>{title}</b>",
            "subtitle": {"text": sentence, "font": {"size": 13, "color": ink.muted}},
            "font": {"size": 18, "color": ink.ink},
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 18},
        },
        paper_bgcolor=ink.panel,
        plot_bgcolor=ink.panel,
        font={"family": FONT, "size": 12, "color": ink.muted},
        hoverlabel={"bgcolor": ink.panel, "bordercolor": ink.edge, "font": {"color": ink.ink, "size": 12}},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "font": {"size": 12},
        },
        margin={"l": 56, "r": 28, "t": 84, "b": 76},
        height=height,
        meta={"alt": alt},
        bargap=0,
    )
    figure.update_xaxes(**axis, showgrid=False)
    figure.update_yaxes(**axis)
    figure.update_layout(**layout)


def alt_text(figure: go.Figure) -> str:
    """What the figure shows, in words."""
    return figure.layout.meta["alt"]
