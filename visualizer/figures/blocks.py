"""The KV block pool at one moment: one cell a block."""

from __future__ import annotations

from collections import defaultdict

import plotly.graph_objects as go

from engine.events import BlockDelta
from visualizer.figures.source import Source, load, state_after
from visualizer.figures.theme import Inks, Look, inks, new_figure, slot_look
from visualizer.letters import slot_letter

WIDE, TALL = 0.84, 1.15  # of a cell; the next one is 1 to the right, 1.3 below
DOWN = 1.3
WIDTH = 900  # pixels that the figure is laid out for
ROWS = ((64, 2), (200, 4), (800, 8), (2048, 16))  # (most blocks, rows)
MARGIN, TOP, BOTTOM = 28, 84, 12  # pixels around it
GAP, LEGEND, KEY = 22, 30, 16  # pixels: above the legend, its height, and what is 1 to the right in it


class _Shapes:
    """Polygons gathered by look, so that thousands of cells are a few traces."""

    def __init__(self) -> None:
        self._groups: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))

    def add(self, style: tuple, points: list[tuple[float, float]]) -> None:
        xs, ys = self._groups[style]
        for x, y in [*points, points[0]]:
            xs.append(x)
            ys.append(y)
        xs.append(None)
        ys.append(None)

    def draw(self, figure: go.Figure, axes: str = "") -> None:
        for (fill, line, dash, width, pattern), (xs, ys) in self._groups.items():
            figure.add_scatter(
                x=xs,
                y=ys,
                mode="lines",
                line={"color": line, "width": width, "dash": dash},
                fill="toself" if fill else None,
                fillcolor=fill or None,
                fillpattern={"shape": "/", "fgcolor": pattern, "bgcolor": "rgba(0,0,0,0)", "size": 6}
                if pattern
                else None,
                hoverinfo="skip",
                showlegend=False,
                xaxis=f"x{axes}",
                yaxis=f"y{axes}",
            )


def blocks(
    source: Source, step: int | None = None, *, columns: int | None = None, theme: str = "light"
) -> go.Figure:
    """The block pool just after a step; at the end of the trace if `step` is None.

    Colour and letter: the slot that owns a block; the height of its fill: tokens in it. Free blocks are
    hollow, cached ones dotted, reserved but unused ones hatched, shared ones split, with their reference
    count; a thick border: written in this step. columns: cells in a row. Raises ValueError if the trace
    has no such step.
    """
    trace = load(source)
    replica, tracks, written = state_after(trace, step)
    ink, info = inks(theme), trace.keyframe.info
    across = columns or _columns(info.num_blocks)
    rows = -(-info.num_blocks // across)
    held = [block for block in replica.blocks if block.owners]
    cached = sum(block.state == "cached" for block in replica.blocks)
    empty = sum(info.block_size - block.filled for block in held)
    free = info.num_blocks - len(held) - cached
    places = len(held) * info.block_size
    vacant = f", with {empty:,} of their {places:,} token places empty" if held else ""
    sentence = f"{len(held)} of {info.num_blocks} blocks held{vacant}; {cached} cached, {free} free"
    cell = min(34.0, (WIDTH - 60) / across)
    high = rows * DOWN * cell + GAP + LEGEND  # pixels, without margins
    figure = new_figure(
        ink,
        f"KV block pool after step {replica.step:,}, {replica.mode}",
        sentence,
        f"KV block pool of {info.model} after step {replica.step}, {replica.mode} mode: {sentence}.",
        height=round(high + TOP + BOTTOM),
        margin={"l": MARGIN, "r": MARGIN, "t": TOP, "b": BOTTOM},
        hovermode="closest",
    )
    slots = {view.request_id: view.slot for view in replica.requests.values()}
    shapes, grounds, above = _Shapes(), _Shapes(), _Shapes()
    words: list[tuple[float, float, str, str, bool]] = []
    dots: list[tuple[float, float]] = []
    hover: list[tuple[float, float, str]] = []
    for block in replica.blocks:
        x, y = float(block.block % across), -DOWN * (block.block // across)
        owners = [slots.get(owner) for owner in block.owners]
        _draw(shapes, block, x, y, info.block_size, [slot_look(slot, ink) for slot in owners], ink)
        middle = (x + WIDE / 2, y - TALL / 2)
        if block.state == "cached":
            dots.append(middle)
        if owners and cell >= 13:
            full = block.filled / info.block_size > 0.7 and len(owners) == 1
            letter = slot_letter(owners[0]) if owners[0] is not None else "·"
            colour = slot_look(owners[0], ink).text if full else ink.ink
            word = letter if len(owners) == 1 else f"×{len(owners)}"
            words.append((*middle, word, colour, not full))
        if cell >= 13 and (len(owners) > 1 or block.state == "reserved"):
            grounds.add((ink.panel, ink.panel, "solid", 0, ""), _ground(*middle, len(owners) > 1))
        if block.block in written:
            above.add(("", ink.ink, "solid", 2.2, ""), _box(x, y, 1.0))
        names = [f"#{tracks.key(owner)}" for owner in block.owners]
        hover.append((*middle, _explain(block, names, owners, info.block_size)))
    for layer in (shapes, grounds, above):
        layer.draw(figure)
    _add_words(figure, words, cell, ink)
    _add_dots(figure, dots, ink)
    figure.add_scatter(
        x=[x for x, _, _ in hover],
        y=[y for _, y, _ in hover],
        mode="markers",
        marker={"size": cell * 0.8, "opacity": 0},
        text=[text for _, _, text in hover],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(visible=False, range=[-0.1, across], constrain="domain", constraintoward="left")
    figure.update_yaxes(
        visible=False,
        range=[-DOWN * rows, 0.15],
        domain=[(GAP + LEGEND) / high, 1],
        scaleanchor="x",
        scaleratio=1,
        constrain="domain",
        constraintoward="top",
    )
    kinds = {"shared" if len(block.owners) > 1 else block.state for block in replica.blocks}
    _add_legend(figure, ink, kinds | ({"written"} if written else set()), LEGEND / high)
    return figure


def _columns(num_blocks: int) -> int:
    """Few rows for a small pool, small cells for a large one."""
    rows = next((rows for most, rows in ROWS if num_blocks <= most), 32)
    return -(-num_blocks // rows)


def _box(x: float, y: float, share: float) -> list[tuple[float, float]]:
    """The corners of a cell's lower part."""
    low, high = y - TALL, y - TALL * (1 - share)
    return [(x, low), (x + WIDE, low), (x + WIDE, high), (x, high)]


def _ground(x: float, y: float, wide: bool) -> list[tuple[float, float]]:
    """A plain field in the middle of a cell, so that its letter or count can be read."""
    half = WIDE / 2 - 0.04 if wide else 0.24
    return [(x - half, y - 0.27), (x + half, y - 0.27), (x + half, y + 0.27), (x - half, y + 0.27)]


def _draw(
    shapes: _Shapes, block: BlockDelta, x: float, y: float, size: int, looks: list[Look], ink: Inks
) -> None:
    whole = _box(x, y, 1.0)
    if block.state == "free":
        shapes.add(("", ink.line, "solid", 1, ""), whole)
    elif block.state == "cached":
        shapes.add(("", ink.edge, "dot", 1.2, ""), whole)
    elif block.state == "reserved":
        shapes.add(("rgba(0,0,0,0)", looks[0].edge, "solid", 1, looks[0].edge), whole)
    else:
        share = block.filled / size
        parts = looks[:4]
        for place, look in enumerate(parts):
            left, right = (x + WIDE * (place + i) / len(parts) for i in (0, 1))
            low, high = y - TALL, y - TALL * (1 - share)
            shapes.add(
                (look.fill, look.fill, "solid", 0, ""),
                [(left, low), (right, low), (right, high), (left, high)],
            )
        shapes.add(("", parts[0].edge if len(parts) == 1 else ink.ink, "solid", 1, ""), whole)


def _explain(block: BlockDelta, names: list[str], slots: list[int | None], size: int) -> str:
    first = f"<b>Block {block.block}</b>: {'in use' if block.state == 'used' else block.state}"
    if not names:
        return first + (f", {block.filled} tokens of a prefix" if block.state == "cached" else "")
    who = [
        f"{name} in slot {slot_letter(slot)}"
        for name, slot in zip(names, slots, strict=True)
        if slot is not None
    ]
    lines = [first, f"{block.filled} of {size} tokens", f"piece {block.table_index + 1} of its block table"]
    return "<br>".join(lines + who[:6] + ([f"and {len(who) - 6} more"] if len(who) > 6 else []))


def _add_dots(figure: go.Figure, dots: list[tuple[float, float]], ink: Inks, axes: str = "") -> None:
    figure.add_scatter(
        x=[x for x, _ in dots],
        y=[y for _, y in dots],
        mode="markers",
        marker={"color": ink.edge, "size": 3},
        hoverinfo="skip",
        showlegend=False,
        xaxis=f"x{axes}",
        yaxis=f"y{axes}",
    )


def _add_words(
    figure: go.Figure, words: list[tuple[float, float, str, str, bool]], cell: float, ink: Inks
) -> None:
    by_look: dict[tuple[str, bool, float], list] = defaultdict(list)
    for x, y, text, colour, halo in words:
        by_look[colour, halo, 0.42 if len(text) == 1 else 0.34].append((x, y, text))
    # Where a cell is filled in part, its letter lies half on the fill and half on the ground.
    ways = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1) if x or y]
    around = ", ".join(f"{x}px {y}px 1px {ink.panel}" for x, y in ways)
    for (colour, halo, share), items in by_look.items():
        font = {"size": min(13, max(8, cell * share)), "color": colour}
        figure.add_scatter(
            x=[x for x, _, _ in items],
            y=[y for _, y, _ in items],
            text=[f"<b>{text}</b>" for _, _, text in items],
            mode="text",
            textfont=font | ({"shadow": around} if halo else {}),
            hoverinfo="skip",
            showlegend=False,
        )


KEYS = (  # of the legend: (what is to be seen, a block of 16 that shows it, its owners' slots, in words)
    ("used", BlockDelta(0, "used", ("a",), 0, 1, 11), (4,), "in use, filled from below"),
    ("reserved", BlockDelta(0, "reserved", ("a",), 0, 1, 0), (4,), "reserved, nothing in it"),
    ("shared", BlockDelta(0, "used", ("a", "b"), 0, 2, 16), (0, 1), "shared, with its count"),
    ("cached", BlockDelta(0, "cached", (), -1, 0, 16), (), "cached, idle"),
    ("free", BlockDelta(0, "free", (), -1, 0, 0), (), "free"),
    ("written", BlockDelta(0, "used", ("a",), 0, 1, 11), (4,), "written in this step"),
)


def _add_legend(figure: go.Figure, ink: Inks, kinds: set[str], share: float) -> None:
    """Small cells, drawn as the large ones are, of what is to be seen. share: of the height, its own."""
    shapes, above, x = _Shapes(), _Shapes(), 0.0
    for kind, block, slots, words in KEYS:
        if kind not in kinds:
            continue
        _draw(shapes, block, x, 0.0, 16, [slot_look(slot, ink) for slot in slots], ink)
        if kind == "written":
            above.add(("", ink.ink, "solid", 2.2, ""), _box(x, 0.0, 1.0))
        if kind == "cached":
            _add_dots(figure, [(x + WIDE / 2, -TALL / 2)], ink, "2")
        place = {"x": x + 1.2, "y": -TALL / 2, "xref": "x2", "yref": "y2", "xanchor": "left"}
        figure.add_annotation(text=words, showarrow=False, font={"size": 12}, **place)
        x += 3.0 + 6.4 * len(words) / KEY
    shapes.draw(figure, "2")
    above.draw(figure, "2")
    around = LEGEND / KEY - TALL
    across = [-0.1, (WIDTH - 2 * MARGIN) / KEY]
    figure.update_layout(
        xaxis2={"visible": False, "range": across, "anchor": "y2"},
        yaxis2={
            "visible": False,
            "range": [-TALL - around / 2, around / 2],
            "domain": [0, share],
            "anchor": "x2",
        },
    )
