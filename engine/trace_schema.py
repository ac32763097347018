"""What each field of a trace record may hold, and the reading of records by that.

A trace may come from anybody, so nothing in it is taken on trust: a record is built only from values of
the right type and range. Every check is one small function that returns the value as the record holds
it, or raises `BadValue` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from engine.events import (
    BlockDelta,
    BlockState,
    EngineInfo,
    Event,
    Keyframe,
    LifecycleEvent,
    LifecycleKind,
    Mode,
    Phase,
    RequestView,
    SlotUse,
    StepEvent,
    StepTimes,
    WaitReason,
)

Check = Callable[[Any], Any]

MOST = 2**53 - 1  # what a browser still counts exactly
MOST_SECONDS = 1e12
MOST_CHARS = 300


class BadValue(ValueError):
    """A value that no engine writes; the message says where in the record, and what is wrong."""


def _show(value: Any) -> str:
    """A value for an error message: recognisable, but never long."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**40:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _integer(least: int = 0, most: int = MOST) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int:
            raise BadValue(f"must be a whole number, not {_show(value)}")
        if not least <= value <= most:
            raise BadValue(f"must lie in {least} to {most}, unlike {_show(value)}")
        return value

    return check


def _seconds(value: Any) -> float:
    if type(value) not in (int, float):
        raise BadValue(f"must be a number, not {_show(value)}")
    if not (-MOST_SECONDS <= value <= MOST_SECONDS):  # NaN is in no range
        raise BadValue(f"must be a time in seconds, unlike {_show(value)}")
    return float(value)


def _duration(value: Any) -> float:
    seconds = _seconds(value)
    if seconds < 0 or not math.isfinite(seconds):
        raise BadValue(f"must be a duration, unlike {_show(value)}")
    return seconds


def _text(value: Any) -> str:
    if type(value) is not str:
        raise BadValue(f"must be a string, not {_show(value)}")
    if len(value) > MOST_CHARS:
        raise BadValue(f"must have at most {MOST_CHARS} characters, not {len(value)}")
    return value


def _one_of(literal: Any) -> Check:
    known = frozenset(get_args(literal))

    def check(value: Any) -> str:
        if type(value) is not str or value not in known:
            raise BadValue(f"must be one of {', '.join(sorted(map(repr, known)))}, not {_show(value)}")
        return value

    return check


def _optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _list(value: Any) -> list:
    if type(value) is not list:
        raise BadValue(f"must be a list, not {_show(value)}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple([_text(item) for item in _list(value)])


def _row(cls: Any, *checks: Check) -> Check:
    """A named tuple, which JSON holds as the list of its fields."""
    names = cls._fields
    assert len(names) == len(checks)

    def check(value: Any) -> Any:
        items = _list(value)
        if len(items) != len(names):
            raise BadValue(f"must have {len(names)} parts ({', '.join(names)}), not {len(items)}")
        built = []
        for name, inner, item in zip(names, checks, items, strict=True):
            try:
                built.append(inner(item))
            except BadValue as error:
                raise BadValue(f"{name} {error}") from None
        return cls(*built)

    return check


def _rows(row: Check) -> Check:
    def check(value: Any) -> tuple:
        built = []
        for place, item in enumerate(_list(value)):
            try:
                built.append(row(item))
            except BadValue as error:
                raise BadValue(f"number {place}: {error}") from None
        return tuple(built)

    return check


_count, _positive = _integer(), _integer(1)
_slot, check_mode = _optional(_count), _one_of(Mode)
_blocks = _rows(_row(BlockDelta, _count, _one_of(BlockState), _texts, _integer(-1), _count, _count))
_uses = _rows(_row(SlotUse, _count, _text, _one_of(Phase), _count, _count, _count, _count))
_info = _row(EngineInfo, _text, _text, _text, _positive, _positive, _positive, _positive, _positive)
_request = _row(RequestView, _text, _slot, _count, _count, _count, _count, _seconds, _optional(_seconds))

FIELDS: dict[type, dict[str, Check]] = {
    Keyframe: {
        "seq": _count,
        "time": _seconds,
        "step": _count,
        "mode": check_mode,
        "info": _info,
        "blocks": _blocks,
        "requests": _rows(_request),
    },
    StepEvent: {
        "seq": _count,
        "time": _seconds,
        "step": _count,
        "mode": check_mode,
        "times": _row(StepTimes, *[_duration] * 5),
        "slots": _uses,
        "blocks": _blocks,
        "num_used": _count,
        "num_cached": _count,
        "num_free": _count,
        "num_running": _count,
        "num_waiting": _count,
        "wait_reason": _one_of(WaitReason),
    },
    LifecycleEvent: {
        "seq": _count,
        "time": _seconds,
        "step": _count,
        "kind": _one_of(LifecycleKind),
        "request_id": _text,
        "slot": _slot,
        "num_tokens": _count,
        "reason": _text,
        "blocks": _blocks,
    },
}
TYPES: dict[str, type] = {"keyframe": Keyframe, "step": StepEvent, "lifecycle": LifecycleEvent}


def read_record(data: Any) -> Keyframe | Event:
    """A record from its JSON data. Raises BadValue naming the field."""
    if type(data) is not dict:
        raise BadValue(f"not a trace record, but {_show(data)}")
    name = data.get("type")
    cls = TYPES.get(name) if type(name) is str else None
    if cls is None:
        raise BadValue(f"not a trace record: its type is {_show(name)}")
    fields = FIELDS[cls]
    if data.keys() - {"type"} != fields.keys():
        missing, foreign = fields.keys() - data.keys(), data.keys() - fields.keys() - {"type"}
        if missing:
            raise BadValue(f"a {name} record without its {', '.join(sorted(missing))}")
        raise BadValue(f"a {name} record with an unknown field, {_show(min(foreign))}")
    values = {}
    for field, check in fields.items():
        try:
            values[field] = check(data[field])
        except BadValue as error:
            raise BadValue(f"in a {name} record, {field} {error}") from None
    return cls(**values)
