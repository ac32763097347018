"""The page's own HTTP routes, outside Gradio's queue, so that looking never waits for asking.

They lie under /gradio_api/ because everything that stands before a Gradio app forwards that prefix.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from visualizer.frames import dumps
from visualizer.host import EngineHost
from visualizer.http import NEVER_KEEP, HeavyWork, json_answer, read_json
from visualizer.lab_routes import build_lab_routes
from visualizer.lesson_routes import build_lesson_routes
from visualizer.trace_routes import build_trace_routes

PREFIX = "/gradio_api/glass"
STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}


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
    """The routes: feed (public), poll and stop (one visitor's own), scripts; traces, races, sandboxes."""
    router = APIRouter(prefix=PREFIX)

    def public(cursor: str | None) -> str:
        members = f'"status":{dumps(host.status())}'
        return f"{members},{host.live.feed.read(cursor)}" if host.live else members

    async def poll(request: Request) -> Response:
        """Frames since the cursor, and what is new on the cards of the token's visitor.

        With `source: "sandbox"`, the frames are those of the visitor's own sandbox, if it has one.
        """
        body = await read_json(request)
        cursor, token, have = body.get("cursor"), body.get("token"), body.get("have")
        cursor = cursor if isinstance(cursor, str) else None
        sandbox = None
        if host.live and isinstance(token, str) and body.get("source") == "sandbox":
            sandbox = host.live.sandboxes.get(token)
        if sandbox:
            members = f'"status":{dumps(host.status())},"source":"sandbox",{sandbox.read(cursor)}'
        else:
            members = f'"source":"live",{public(cursor)}'
        if host.live and isinstance(token, str):
            own = host.live.visitors.view(token, have if isinstance(have, dict) else {})
            members += f',"own":{dumps(own)},"pace":{host.live.visitors.pace}'
        return json_answer("{" + members + "}")

    # Twenty pages poll a hundred times a second. So this is a plain route of Starlette's, and the first:
    # another kind, or one looked for behind all the others, would cost twice as much.
    router.add_route(f"{PREFIX}/poll", poll, methods=["POST"])
    work = HeavyWork()
    router.include_router(build_trace_routes(host, work))
    router.include_router(build_lab_routes(host, work))
    router.include_router(build_lesson_routes())

    @router.get("/feed")
    def feed(cursor: str | None = None) -> Response:
        """Frames since the cursor. Everybody may read it: it holds no text."""
        return json_answer("{" + public(cursor) + "}")

    @router.post("/away")
    async def away(request: Request) -> Response:
        """The visitor's page is hidden, and will not poll for a while."""
        token = (await read_json(request)).get("token")
        if host.live and isinstance(token, str):
            host.live.visitors.go_away(token)
        return Response(status_code=204)

    @router.post("/stop")
    async def stop(request: Request) -> Response:
        """Stop one of the visitor's own requests."""
        body = await read_json(request)
        token, card = body.get("token"), body.get("card")
        done = False
        if host.live and isinstance(token, str) and isinstance(card, int):
            done = await run_in_threadpool(host.live.visitors.stop, token, card)
        return json_answer(dumps({"stopped": done}))

    @router.get("/static/{version}/{name}")
    def script(version: str, name: str) -> Response:
        content = static.files.get(name)
        if content is None:
            return Response(status_code=404)
        headers = _FOREVER if version == static.version else NEVER_KEEP
        return Response(content, media_type=_TYPES.get(Path(name).suffix), headers=headers)

    @router.get("/plotly/{version}/plotly.min.js")
    def plotly(version: str) -> Response:
        headers = {**_FOREVER, "Content-Encoding": "gzip"}
        return Response(plotly_script(), media_type=_TYPES[".js"], headers=headers)

    return router
