"""What the page's routes share: JSON in and out, compressed answers, heavy work one at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from visualizer.breath import Breath, Breathe
from visualizer.frames import dumps

MAX_BODY = 16_384  # bytes of a JSON request
UPLOAD_TIMEOUT = 60.0  # seconds for an upload to arrive
NEVER_KEEP = {"Cache-Control": "no-store"}

T = TypeVar("T")


class HttpError(Exception):
    """An answer that says what is wrong: a status, and the reason in words for the page."""

    def __init__(self, status: int, reason: str, **details: Any):
        super().__init__(reason)
        self.status = status
        self.details = details

    def answer(self) -> Response:
        return json_answer(dumps({"error": str(self), **self.details}), self.status)


def json_answer(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json", headers=NEVER_KEEP)


def gzipped_answer(
    request: Request, body: bytes, media_type: str = "application/json", name: str = ""
) -> Response:
    """An answer from a gzipped body, to a browser that takes it as it is or to a client that does not.

    name: of a file, if the answer is to be saved as one.
    """
    headers = dict(NEVER_KEEP)
    if name:
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    headers["Vary"] = "Accept-Encoding"
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        body = gzip.decompress(body)
    return Response(body, media_type=media_type, headers=headers)


async def _read(request: Request, most: int) -> bytes | None:
    """The whole body; None, and no more is read, if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)


async def read_upload(request: Request, most: int) -> bytes:
    """The whole body. Raises HttpError if it is too large, or takes too long."""
    declared = request.headers.get("content-length", "")
    too_large = declared.isascii() and declared.isdigit() and (len(declared) > 12 or int(declared) > most)
    try:
        body = None if too_large else await asyncio.wait_for(_read(request, most), UPLOAD_TIMEOUT)
    except (asyncio.TimeoutError, ClientDisconnect):
        raise HttpError(408, "The upload did not arrive in time. Please try again.") from None
    if body is None:
        raise HttpError(413, f"This file is too large: {most / 2**20:.0f} MiB is the most here.")
    return body


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in a request; an empty one if it is too large, or not that."""
    try:
        body = json.loads(await _read(request, MAX_BODY) or b"")
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


class HeavyWork:
    """Work that takes long, on behalf of visitors: one piece at a time, in a thread, and few may wait."""

    def __init__(self, most_waiting: int = 4):
        self._most_waiting = most_waiting
        self._num_waiting = 0
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[Breathe], T]) -> T:
        """What `work` returns. It is given what to call between small pieces of it (see `breath`).

        Raises HttpError if too many are waiting.
        """
        if self._num_waiting >= self._most_waiting:
            raise HttpError(503, "The server is busy with other visitors' files. Please try again soon.")
        self._num_waiting += 1
        try:
            async with self._lock:
                return await run_in_threadpool(lambda: work(Breath()))
        finally:
            self._num_waiting -= 1
