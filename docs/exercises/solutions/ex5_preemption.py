"""Solution of exercise 5."""

from __future__ import annotations

from engine.request import Request


def choose_victim(running: list[Request]) -> Request:
    return max(running, key=lambda request: request.sort_key)
