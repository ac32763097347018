"""The page's own HTTP routes, outside Gradio's queue, so that looking never waits for asking.

They lie under /gradio_api/ because everything that stands before a Gradio app forwards that prefix.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from visualizer.frames import dumps
from visualizer.host import EngineHost

PREFIX = "/gradio_api/glass"
STATIC = Path(__file__).parent / "static"
MAX_BODY = 16_384  # bytes
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}
_NEVER = {"Cache-Control": "no-store"}


class StaticFiles:
    """The page's scripts, read once. Their address carries a hash, so a browser keeps them for good."""

    def __init__(self, folder: Path = STATIC):
        self.files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.*"))}
        digest = hashlib.sha256()
        for name, content in self.files.items():
            digest.update(name.encode() + b"\0" + content)
        self.version = digest.hexdigest()[:12]


@lru_cache(maxsize=1)
def plotly_script() -> bytes:
    """Plotly's script from the installed package, gzipped: 1.5 MB, fetched once, and no CDN."""
    import plotly

    path = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return gzip.compress(path.read_bytes(), compresslevel=6)


def build_routes(host: EngineHost, static: StaticFiles) -> APIRouter:
    """The routes: feed (public), poll and stop (one visitor's own), scripts."""
    router = APIRouter(prefix=PREFIX)

    def public(cursor: str | None) -> str:
        members = f'"status":{dumps(host.status())}'
        return f"{members},{host.live.feed.read(cursor)}" if host.live else members

    @router.get("/feed")
    def feed(cursor: str | None = None) -> Response:
        """Frames since the cursor. Everybody may read it: it holds no text."""
        return _json("{" + public(cursor) + "}")

    @router.post("/poll")
    async def poll(request: Request) -> Response:
        """Frames since the cursor, and what is new on the cards of the token's visitor."""
        body = await _body(request)
        cursor, token, have = body.get("cursor"), body.get("token"), body.get("have")
        members = public(cursor if isinstance(cursor, str) else None)
        if host.live and isinstance(token, str):
            own = host.live.visitors.view(token, have if isinstance(have, dict) else {})
            members += f',"own":{dumps(own)}'
        return _json("{" + members + "}")

    @router.post("/stop")
    async def stop(request: Request) -> Response:
        """Stop one of the visitor's own requests."""
        body = await _body(request)
        token, card = body.get("token"), body.get("card")
        done = False
        if host.live and isinstance(token, str) and isinstance(card, int):
            done = await run_in_threadpool(host.live.visitors.stop, token, card)
        return _json(dumps({"stopped": done}))

    @router.get("/static/{version}/{name}")
    def script(version: str, name: str) -> Response:
        content = static.files.get(name)
        if content is None:
            return Response(status_code=404)
        headers = _FOREVER if version == static.version else _NEVER
        return Response(content, media_type=_TYPES.get(Path(name).suffix), headers=headers)

    @router.get("/plotly/{version}/plotly.min.js")
    def plotly(version: str) -> Response:
        headers = {**_FOREVER, "Content-Encoding": "gzip"}
        return Response(plotly_script(), media_type=_TYPES[".js"], headers=headers)

    return router


def _json(text: str) -> Response:
    return Response(text, media_type="application/json", headers=_NEVER)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in a request; an empty one if it is too large, or not that."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            return {}
    try:
        body = json.loads(data)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
