"""The web application: the page's own routes, and the Gradio page behind them."""

from __future__ import annotations

from urllib.parse import quote

import gradio as gr
import plotly
from fastapi import FastAPI

from visualizer.host import EngineHost
from visualizer.http import HttpError
from visualizer.panel import build_page
from visualizer.routes import STATIC, StaticFiles, build_routes

SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
# Four blocks of the pool. In the page itself, so that it is there behind a proxy too: the root of a host,
# where a browser looks for an icon by itself, then belongs to somebody else.
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<path fill="#e69f00" d="M1 1h6v6H1z"/><path fill="#56b4e9" d="M9 1h6v6H9z"/>'
    '<path fill="#009e73" d="M1 9h6v6H1z"/><path fill="none" stroke="#8b929d" d="M9.5 9.5h5v5h-5z"/></svg>'
)
HEAD = f'<link rel="icon" href="data:image/svg+xml,{quote(_ICON)}">'
# Seconds between two looks of Gradio into its queue. By itself it looks a thousand times a second, which
# takes a twentieth of a core, and interrupts the engine as often.
QUEUE_PERIOD = 0.02
MONO = ("ui-monospace", "SFMono-Regular", "Consolas", "DejaVu Sans Mono", "monospace")


def build_app(host: EngineHost, root_path: str | None = None) -> FastAPI:
    """The page for an engine host, ready for uvicorn. The engine may still be loading.

    root_path: where a proxy shows the page, if not at its root ("/glass").
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HttpError, lambda request, error: error.answer())
    static = StaticFiles()
    app.include_router(build_routes(host, static))
    page = build_page(host, static.version, plotly.__version__)
    page._queue.sleep_when_free = QUEUE_PERIOD
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        root_path=root_path,
        theme=gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=SANS, font_mono=MONO),
        css_paths=[STATIC / "glass.css"],
        head=HEAD,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        show_error=False,
        mcp_server=False,
        max_file_size="1kb",
    )
