"""The page that shows the engine live. It knows the engine's events and its runner, and nothing inside.

Reading order: `frames.py` (events to frames), `feed.py` (frames to viewers), `measures.py` and `tracks.py`
(what the numbers mean), `visitors.py` (whose text is whose), `routes.py` and `panel.py` (the page),
`static/main.js` (the drawing). Then what stands beside the live engine: `siblings.py`, `race.py` and
`races.py`, `sandbox.py`; and what is made of traces: `trace_routes.py`, `chrome_trace.py`, `figures/`.
"""

import os

# Gradio reads these when it is imported. It phones home otherwise, and it rebuilds a summary of its
# recent events after each one, which costs more than an answer to a poll.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000")
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")

from visualizer.host import EngineHost
from visualizer.web import build_app

__all__ = ["EngineHost", "build_app"]
