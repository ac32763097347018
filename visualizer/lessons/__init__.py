"""The lessons: five short experiments on the page, each to be predicted before it is shown.

Their words are in `lessons.json`. What they show was recorded from real, seeded runs by
`assets/lesson_traces.py`, and is in `traces/`; so they need no engine, and can be walked while a model loads.
"""

from __future__ import annotations

import gzip
import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.trace import Trace, parse_trace
from visualizer.frames import trace_frames

FOLDER = Path(__file__).parent
TRACES = FOLDER / "traces"


@lru_cache(maxsize=1)
def lessons() -> list[dict[str, Any]]:
    """All lessons, in order. Each: title, intro, scenes, question, solution, code, chapter."""
    return json.loads((FOLDER / "lessons.json").read_text())


def trace_names() -> list[str]:
    """The recordings that the lessons show."""
    return sorted({name for lesson in lessons() for scene in lesson["scenes"] for name in scene["traces"]})


def lesson_trace(name: str) -> Trace:
    """A recording. Raises KeyError for a name that no lesson uses."""
    if name not in trace_names():
        raise KeyError(name)
    return parse_trace(io.BytesIO(gzip.decompress((TRACES / f"{name}.jsonl.gz").read_bytes())))


@lru_cache(maxsize=32)
def packed_frames(name: str) -> bytes:
    """{mode, frames} of a recording as gzipped JSON, made once. Raises KeyError as `lesson_trace` does."""
    trace = lesson_trace(name)
    mode = next(event.mode for event in trace.events if hasattr(event, "mode"))
    text = f'{{"mode":{json.dumps(mode)},"frames":[{",".join(trace_frames(trace))}]}}'
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)
