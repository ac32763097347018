"""Routes for lessons, which are recordings and need no engine.

GET lessons             {lessons: [...]}: see `lessons.json`
GET lessons/trace/NAME  {mode, frames} of a recording
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from visualizer.frames import dumps
from visualizer.http import HttpError, gzipped_answer, json_answer
from visualizer.lessons import lessons, packed_frames


def build_lesson_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/lessons")
    def all_lessons() -> Response:
        return json_answer(dumps({"lessons": lessons()}))

    @router.get("/lessons/trace/{name}")
    def recording(request: Request, name: str) -> Response:
        try:
            return gzipped_answer(request, packed_frames(name))
        except KeyError:
            raise HttpError(404, "There is no such recording.") from None

    return router
