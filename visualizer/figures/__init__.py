"""Plotly figures from a trace, for notebooks and documents. They show what the page shows, in its looks.

    from visualizer import figures
    figures.timeline("run.jsonl").show()

Every figure takes a trace (a path, a `Trace`, or a keyframe and events) and `theme="light"` or "dark". Its
title says what is to be seen, and `alt_text(figure)` says it in words, for whoever cannot see it.
"""

from visualizer.figures.blocks import blocks
from visualizer.figures.charts import step_anatomy, throughput
from visualizer.figures.race import race
from visualizer.figures.source import Source
from visualizer.figures.theme import alt_text
from visualizer.figures.timeline import timeline

__all__ = ["Source", "alt_text", "blocks", "race", "step_anatomy", "throughput", "timeline"]
