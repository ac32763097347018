"""Routes for traces: take home what just happened, and show a trace from elsewhere, without a model.

    GET  trace?since=STEP&format=jsonl|chrome    a file to save: what the engine's ring still holds, from
                                                 a step on (`EventBus.recording`); without `since`, all
    POST replay, the body a JSONL trace          {frames, summary}: see `frames`, `summary.summarise`

Nothing has to be started for that: the ring holds what just happened. An uploaded trace is not kept: the
answer is all that there is of it. What goes wrong is said as {error} with a status of 4xx or 503, with the
`line` of the trace if it is about one.
"""

from __future__ import annotations

import gzip
import io
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.trace import Trace, TraceError, TraceLimits, parse_trace, trace_lines
from visualizer.breath import Breathe, hold
from visualizer.chrome_trace import chrome_json
from visualizer.frames import dumps, trace_frames
from visualizer.host import EngineHost, LiveEngine
from visualizer.http import HeavyWork, HttpError, gzipped_answer, read_upload
from visualizer.summary import summarise

LIMITS = TraceLimits(
    most_bytes=16 << 20,
    most_line_bytes=2 << 20,
    most_records=40_000,
    most_blocks=16_384,
    most_slots=512,
    most_live=4096,
)
MOST_CHARS = 48 << 20  # of a replay's frames
MOST_UPLOADS = 4  # that arrive at the same time
FORMATS = {"jsonl": "application/x-ndjson", "chrome": "application/json"}


def live_engine(host: EngineHost) -> LiveEngine:
    """The engine. Raises HttpError while there is none."""
    if host.live is None:
        raise HttpError(503, "The model is not ready yet. Please wait until it is loaded.")
    return host.live


def trace_file(request: Request, trace_gz: bytes, form: str, stem: str) -> Response:
    """The answer that a browser saves as a file."""
    suffix = "jsonl" if form == "jsonl" else "chrome.json"
    return gzipped_answer(request, trace_gz, FORMATS[form], f"glass-engine-{stem}.{suffix}")


def pack(trace: Trace, form: str, breathe: Breathe) -> bytes:
    """A trace in a format, gzipped."""
    if form == "chrome":
        text = chrome_json(trace, breathe)
    else:
        lines = []
        for line in trace_lines(*trace):
            lines.append(line)
            breathe()
        text = "".join(lines)
    return gzip.compress(text.encode(), compresslevel=1)


def check_format(form: Any) -> str:
    if not isinstance(form, str) or form not in FORMATS:
        raise HttpError(400, f"Choose the format {' or '.join(FORMATS)}.")
    return form


class _Lines(io.BytesIO):
    """A file that is read with a breath after each line."""

    def __init__(self, body: bytes, breathe: Breathe):
        super().__init__(body)
        self._breathe = breathe

    def readline(self, size: int | None = -1, /) -> bytes:
        self._breathe()
        return super().readline(size)


def replay(body: bytes, breathe: Breathe = hold) -> bytes:
    """The answer to an upload, gzipped. Raises HttpError naming what is wrong with it."""
    try:
        trace = parse_trace(_Lines(body, breathe), LIMITS)
        frames = trace_frames(trace, MOST_CHARS, breathe)
    except TraceError as error:
        raise HttpError(400, f"This trace cannot be shown: {error}.", line=error.line) from None
    text = f'{{"summary":{dumps(summarise(trace))},"frames":[{",".join(frames)}]}}'
    return gzip.compress(text.encode(), compresslevel=1)


def build_trace_routes(host: EngineHost, work: HeavyWork) -> APIRouter:
    router = APIRouter()
    uploads: list[Request] = []
    cache: dict[tuple, bytes] = {}  # the latest file, for all who ask for the same

    @router.get("/trace")
    async def download(request: Request, since: int = 0, format: str = "jsonl") -> Response:
        form = check_format(format)
        bus = live_engine(host).runner.events

        def build(breathe: Breathe) -> bytes:
            trace = Trace(*bus.recording(since))
            key = (form, trace.keyframe.seq, len(trace.events))  # many a `since` asks for the same
            if key not in cache:
                packed = pack(trace, form, breathe)
                cache.clear()
                cache[key] = packed
            return cache[key]

        return trace_file(request, await work.run(build), form, "trace")

    @router.post("/replay")
    async def upload(request: Request) -> Response:
        if len(uploads) >= MOST_UPLOADS:
            raise HttpError(503, "Other visitors are uploading too. Please try again in a moment.")
        uploads.append(request)
        try:
            body = await read_upload(request, LIMITS.most_bytes)
            packed = await work.run(lambda breathe: replay(body, breathe))
        finally:
            uploads.remove(request)
        return gzipped_answer(request, packed)

    return router
