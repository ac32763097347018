"""Draw the guide's pictures and fill in its tables, from real runs with the real model.

    make screenshots

    .venv/bin/python assets/figures.py memory-paging    # one picture, and the run it needs

`docs/runs.py` has the runs. What a chapter says about them stands between two comments, and is written
anew: `<!-- run: NAME -->` holds a table that is the same everywhere, `<!-- measured: NAME -->` one with
seconds in it and the machine they were measured on, `<!-- figure: NAME -->` a picture, light and dark.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import plotly
import plotly.graph_objects as go
from playwright.sync_api import Page, sync_playwright

from bench.machine import hardware
from docs.runs import RUNS, Run, bytes_a_second, load_for, peak_step, step_of, transitions
from visualizer import figures
from visualizer.figures.theme import inks, new_figure

DOCS, FIGURES = ROOT / "docs", ROOT / "docs" / "figures"
WIDTH = 900  # pixels of a figure on the page; its picture has twice as many
THEMES = ("light", "dark")

Draw = Callable[[dict[str, Run], str], go.Figure]


def kv_time(runs: dict[str, Run], theme: str) -> go.Figure:
    """Milliseconds of the next token over the length of the context."""
    curves, ink = runs["kv-time"].curves, inks(theme)
    contexts = curves["context"]
    sentence = (
        f"milliseconds of one token, with {contexts[0]} to {contexts[-1]} tokens before it: "
        "computing all of them again takes longer and longer"
    )
    figure = new_figure(ink, "What the KV cache saves", sentence, f"A chart: {sentence}.", height=360)
    for key, name, colour in (
        ("anew", "everything anew", ink.naive),
        ("cached", "with the KV cache", ink.continuous),
    ):
        ms = [1000 * seconds for seconds in curves[key]]
        figure.add_scatter(
            x=contexts, y=ms, name=name, mode="lines+markers", line={"color": colour, "width": 2.5}
        )
    figure.update_xaxes(title_text="tokens of context")
    figure.update_yaxes(title_text="milliseconds", rangemode="tozero")
    return figure


def batch_time(runs: dict[str, Run], theme: str) -> go.Figure:
    """Tokens a second over the batch size, and what they would be if a step took no longer for more."""
    curves, ink = runs["batch-time"].curves, inks(theme)
    sizes, seconds = curves["sizes"], curves["seconds"]
    rates = [size / s for size, s in zip(sizes, seconds, strict=True)]
    best = rates.index(max(rates))
    sentence = (
        f"{rates[0]:.0f} for one request, {rates[best]:.0f} for {sizes[best]} together: "
        f"{rates[best] / rates[0]:.1f} times as many. Both axes grow by factors"
    )
    figure = new_figure(
        ink, "Tokens a second by batch size", sentence, f"A chart: tokens a second, {sentence}.", height=460
    )
    figure.add_scatter(
        x=sizes,
        y=[size * rates[0] for size in sizes],
        name="if a step took as long as for one",
        mode="lines",
        line={"color": ink.edge, "width": 1.5, "dash": "dot"},
    )
    figure.add_scatter(
        x=sizes,
        y=rates,
        name="measured",
        mode="lines+markers+text",
        text=[f"{rate:.0f}" for rate in rates],
        textposition="bottom right",
        textfont={"color": ink.ink},
        line={"color": ink.continuous, "width": 2.5},
    )
    if roof := curves["roof"]:
        figure.add_scatter(
            x=[sizes[0], sizes[-1]],
            y=[roof, roof],
            name=f"the roof: {roof:.0f}",
            mode="lines",
            line={"color": ink.alarm, "width": 1.5, "dash": "dash"},
        )
    figure.update_xaxes(title_text="requests in the step", type="log", tickvals=sizes, range=[-0.05, 1.95])
    # Both axes by factors: what grows in proportion is a straight line, and a roof is a bend in it.
    ticks = [
        step for step in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if step < sizes[-1] * rates[0]
    ]
    lowest, highest = math.log10(0.6 * rates[0]), math.log10(1.1 * sizes[-1] * rates[0])
    figure.update_yaxes(title_text="tokens a second", type="log", tickvals=ticks, range=[lowest, highest])
    return figure


def timeline(run: str, trace: str) -> Draw:
    return lambda runs, theme: figures.timeline(runs[run].traces[trace], theme=theme)


def anatomy(budget: int) -> Draw:
    def draw(runs: dict[str, Run], theme: str) -> go.Figure:
        trace = runs["chunks"].traces[f"budget {budget}"]
        figure = figures.step_anatomy(trace, first_step=5, last_step=24, theme=theme)
        figure.layout.title.text = f"<b>Anatomy of a step: at most {budget} tokens</b>"
        return figure

    return draw


def blocks(run: str, trace: str, step: Callable[[object], int]) -> Draw:
    def draw(runs: dict[str, Run], theme: str) -> go.Figure:
        source = runs[run].traces[trace]
        return figures.blocks(source, step(source), theme=theme)

    return draw


def before_preemption(trace) -> int:
    return transitions(trace, "preempted")[0].step - 1


PICTURES: dict[str, Draw] = {
    "kv-time": kv_time,
    "batching-naive": timeline("batching", "naive"),
    "batching-static": timeline("batching", "static"),
    "batching-continuous": timeline("batching", "continuous"),
    "memory-reserving": blocks("memory", "reserving", peak_step),
    "memory-paging": blocks("memory", "paging", peak_step),
    "injection-static": timeline("injection", "static"),
    "injection-continuous": timeline("injection", "continuous"),
    "chunks-64": anatomy(64),
    "chunks-512": anatomy(512),
    "preemption": timeline("preemption", "preemption"),
    "preemption-blocks": blocks("preemption", "preemption", before_preemption),
    "sharing": blocks("sharing", "with prefix caching", lambda trace: step_of(trace, "first_token", "r6")),
    "forks": blocks("forks", "forks", peak_step),
    "batch-time": batch_time,
}


def main(only: list[str]) -> None:
    """Make all runs and pictures, or only those with the given names, and the runs that those need."""
    if unknown := set(only) - PICTURES.keys() - RUNS.keys():
        sys.exit(f"There is no {', '.join(sorted(unknown))}. There are: {', '.join([*RUNS, *PICTURES])}.")
    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed.")
    pictures = [name for name in PICTURES if not only or name in only]
    wanted = {run for run in RUNS if not only or run in only} | {run_of(name) for name in pictures}
    runs: dict[str, Run] = {}
    for name in RUNS:
        if name in wanted:
            print(f"run {name}", flush=True)
            runs[name] = RUNS[name](load_for(name))
    for name, run in runs.items():
        if name.endswith("-time"):
            fill("measured", name, f"{run.table}\n\n{describe(load_for(name))}")
        else:
            fill("run", name, run.table)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1200}, device_scale_factor=2)
        page.set_content("<body style='margin:0'><div id='figure'></div></body>")
        page.add_script_tag(path=Path(plotly.__file__).parent / "package_data" / "plotly.min.js")
        for name in pictures:
            for theme in THEMES:
                figure = PICTURES[name](runs, theme)
                save(page, figure, FIGURES / f"{name}-{theme}.png")
            fill("figure", name, picture(name, figures.alt_text(figure)))
        browser.close()


def run_of(picture: str) -> str:
    """The run that a picture is named after: the longest name that it begins with."""
    return max((run for run in RUNS if picture.startswith(run)), key=len)


def describe(loaded) -> str:
    """The machine that seconds were measured on, in a line."""
    facts = hardware()
    name = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores, {', '.join(facts['isa'])}"
    dtype = str(loaded.dtype).removeprefix("torch.")
    return (
        f"*Measured with {loaded.name}, {dtype}, on {name}; memory read at "
        f"{bytes_a_second(loaded.device.type) / 1e9:.0f} GB/s; torch {facts['torch']}.*"
    )


def save(page: Page, figure: go.Figure, path: Path) -> None:
    """Draw a figure in the browser and save what is to be seen."""
    height = int(figure.layout.height)
    spec = json.dumps({"width": WIDTH, "height": height, "figure": json.loads(figure.to_json())})
    page.evaluate(
        """async (given) => {
            const { width, height, figure } = JSON.parse(given);
            const place = document.getElementById('figure');
            place.style = `width: ${width}px; height: ${height}px`;
            await Plotly.newPlot(place, figure.data, { ...figure.layout, width }, { displayModeBar: false });
        }""",
        spec,
    )
    path.parent.mkdir(exist_ok=True)
    page.locator("#figure").screenshot(path=path)
    page.evaluate("Plotly.purge('figure')")
    print(path.relative_to(ROOT), path.stat().st_size // 1024, "KiB", flush=True)


def picture(name: str, alt: str) -> str:
    """A picture as GitHub shows it: the dark one where the reader prefers dark."""
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="figures/{name}-dark.png">\n'
        f'  <img alt="{alt}" src="figures/{name}-light.png" width="{WIDTH}">\n'
        "</picture>"
    )


def fill(kind: str, name: str, content: str) -> None:
    """Write between the two comments of that name, in every chapter that has them."""
    place = re.compile(f"(<!-- {kind}: {re.escape(name)} -->\n).*?(<!-- /{kind} -->)", re.DOTALL)
    for chapter in sorted(DOCS.glob("*.md")):
        old = chapter.read_text()
        new = place.sub(lambda found: f"{found[1]}{content}\n{found[2]}", old)
        if new != old:
            chapter.write_text(new)


if __name__ == "__main__":
    main(sys.argv[1:])
