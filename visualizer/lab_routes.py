"""Routes for races, which are everybody's, and for sandboxes, each of which is one visitor's.

    GET  race[?id=ID]           {race: status or null, sizes, modes}: of this race, or of the latest
    POST race {modes: [a, b], size, again}      {race: status}; an {error} with 409 if it cannot be now
    GET  race/ID/result         the result, once its state is "done"
    GET  race/ID/trace?arm=0&format=jsonl|chrome        one arm's trace, to save

    POST sandbox {token, do, value}             {sandbox: status or null}
    POST sandbox/trace {token, format}          what its engine's ring still holds, to save

Status and result of a race: see `races`. A sandbox's commands: "open" (while a visitor has a sandbox, what
it submits goes there), "close", and those of `Sandbox.command`: "pause", "resume", "step" (value: 1 to 32),
"mode" (value: a mode). Its status, or null, also comes with each poll of its visitor (`own.sandbox`), and
its frames if the poll says `source: "sandbox"`; the answer's `source` says whose frames it brings. The cards
that were asked there say `where: "sandbox"`. A token is a secret of its page: it is in no address.
"""

from __future__ import annotations

from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from engine.events import Mode, StepEvent
from engine.trace import Trace
from visualizer.frames import dumps
from visualizer.host import EngineHost, LiveEngine
from visualizer.http import HeavyWork, HttpError, gzipped_answer, json_answer, read_json
from visualizer.race import SIZES
from visualizer.races import RaceRefused
from visualizer.sandbox import SandboxRefused
from visualizer.trace_routes import check_format, live_engine, pack, trace_file

NO_SANDBOX = "You have no sandbox. One that is not used for some minutes is closed."


def build_lab_routes(host: EngineHost, work: HeavyWork) -> APIRouter:
    router = APIRouter()

    @router.get("/race")
    async def race_status(id: str | None = None) -> Response:
        status = live_engine(host).races.status(id)
        return json_answer(dumps({"race": status, "sizes": SIZES, "modes": get_args(Mode)}))

    @router.post("/race")
    async def start_race(request: Request) -> Response:
        body = await read_json(request)
        modes, again = body.get("modes"), body.get("again") is True
        if not isinstance(modes, list) or len(modes) != 2:
            raise HttpError(400, "Choose two modes.")
        try:
            status = live_engine(host).races.start(modes[0], modes[1], body.get("size"), again)
        except RaceRefused as error:
            raise HttpError(409, str(error)) from None
        return json_answer(dumps({"race": status}))

    @router.get("/race/{race_id}/result")
    async def race_result(request: Request, race_id: str) -> Response:
        body = live_engine(host).races.result(race_id)
        if body is None:
            raise HttpError(404, "There is no such result. It may be too old: run the race again.")
        return gzipped_answer(request, body)

    @router.get("/race/{race_id}/trace")
    async def race_trace(request: Request, race_id: str, arm: int = 0, format: str = "jsonl") -> Response:
        form = check_format(format)
        trace = live_engine(host).races.trace(race_id, arm)
        if trace is None:
            raise HttpError(404, "There is no such trace. It may be too old: run the race again.")
        packed = await work.run(lambda breathe: pack(trace, form, breathe))
        (mode,) = {event.mode for event in trace.events if isinstance(event, StepEvent)}
        return trace_file(request, packed, form, f"race-{mode}")

    def check_token(live: LiveEngine, token: Any) -> str:
        if not isinstance(token, str) or not live.visitors.knows(token):
            raise HttpError(403, "The server does not know this page. Please load it again.")
        return token

    @router.post("/sandbox")
    async def sandbox(request: Request) -> Response:
        body = await read_json(request)
        live = live_engine(host)
        token, action = check_token(live, body.get("token")), body.get("do")
        if not isinstance(action, str):
            raise HttpError(400, "Say what to do.")
        try:
            await run_in_threadpool(command, live, token, action, body.get("value"))
        except SandboxRefused as error:
            raise HttpError(409, str(error), sandbox=live.sandboxes.status(token)) from None
        return json_answer(dumps({"sandbox": live.sandboxes.status(token)}))

    @router.post("/sandbox/trace")
    async def sandbox_trace(request: Request) -> Response:
        body = await read_json(request)
        live = live_engine(host)
        form = check_format(body.get("format"))
        box = live.sandboxes.get(check_token(live, body.get("token")), use=True)
        if box is None:
            raise HttpError(409, NO_SANDBOX)
        events = box.runner.events
        packed = await work.run(lambda breathe: pack(Trace(*events.recording()), form, breathe))
        return trace_file(request, packed, form, "sandbox")

    return router


def command(live: LiveEngine, token: str, action: str, value: Any) -> None:
    """Carry out what a visitor asks of its sandbox. Raises SandboxRefused."""
    if action == "open":
        live.sandboxes.open(token)
        if not live.visitors.knows(token):  # it left while the sandbox was made
            live.sandboxes.close(token)
    elif action == "close":
        live.sandboxes.close(token)
    elif box := live.sandboxes.get(token, use=True):
        box.command(action, value)
    else:
        raise SandboxRefused(NO_SANDBOX)
