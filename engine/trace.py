"""Traces: an engine's events in a file, one JSON value a line.

Line 1 is a header with format and version, line 2 the keyframe, then every event. The same trace
feeds replay, lessons, figures and documents, so whatever they show did happen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from engine.events import (
    BlockDelta,
    EngineInfo,
    Event,
    EventBus,
    Keyframe,
    LifecycleEvent,
    RequestView,
    SlotUse,
    StepEvent,
    StepTimes,
)

FORMAT = "glass-engine-trace"
VERSION = 1
_TYPES: dict[str, type] = {"keyframe": Keyframe, "step": StepEvent, "lifecycle": LifecycleEvent}
_NAMES = {cls: name for name, cls in _TYPES.items()}
# Fields that hold tuples of records: JSON turns those into lists of lists, so reading rebuilds them.
_RECORDS = {"slots": SlotUse, "blocks": BlockDelta, "requests": RequestView}
_RECORD = {"times": StepTimes, "info": EngineInfo}


class TraceError(ValueError):
    """A file that is not a trace, is damaged, or is of a version this engine cannot read."""


class Trace(NamedTuple):
    keyframe: Keyframe
    events: list[Event]


def to_json(record: Keyframe | Event) -> dict[str, Any]:
    """A keyframe or event as plain JSON data; its parts become lists, in field order."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {"type": _NAMES[type(record)], **values}


def from_json(data: dict[str, Any]) -> Keyframe | Event:
    """The inverse of `to_json`. Raises TraceError on anything it does not know."""
    try:
        values = dict(data)
        cls = _TYPES[values.pop("type")]
        for name, value in values.items():
            if name in _RECORDS:
                values[name] = tuple(_record(_RECORDS[name], item) for item in value)
            elif name in _RECORD:
                values[name] = _RECORD[name](*value)
        return cls(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"not a trace record: {error!r}") from error


def _record(cls: Any, item: list) -> Any:
    if cls is BlockDelta:
        block, state, owners, *rest = item
        return BlockDelta(block, state, tuple(owners), *rest)
    return cls(*item)


class TraceRecorder:
    """Writes everything a bus publishes to a file, from a thread of its own, until closed.

    Use as a context manager. The engine never waits for the disk; should the disk fall so far behind
    that the ring overruns it, a new keyframe is written and the trace stays readable.
    """

    def __init__(self, bus: EventBus, path: str | Path, period: float = 0.05):
        self._bus = bus
        self._period = period
        self._cursor: int | None = None
        self._closing = threading.Event()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._write({"format": FORMAT, "version": VERSION})
        self._drain()
        self._thread = threading.Thread(target=self._run, name="trace-recorder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            self._drain()

    def _drain(self) -> None:
        keyframe, events, self._cursor = self._bus.read(self._cursor)
        for record in ([keyframe] if keyframe else []) + events:
            self._write(to_json(record))

    def _write(self, value: dict) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._drain()
        self._file.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Raises TraceError naming the line if the file is foreign, damaged or too new."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = _json_lines(file)
        header = next(lines, (1, None))[1]
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise TraceError(f"{path} is not a Glass Engine trace: its first line is no trace header")
        if header.get("version") != VERSION:
            raise TraceError(
                f"{path} is a version {header.get('version')} trace; this engine reads version {VERSION}"
            )
        number, first = next(lines, (2, None))
        keyframe = from_json(first) if isinstance(first, dict) else None
        if not isinstance(keyframe, Keyframe):
            raise TraceError(f"{path}, line {number}: a trace must start with a keyframe")
        events: list[Event] = []
        seq = keyframe.seq
        for number, value in lines:
            record = from_json(value)
            if isinstance(record, Keyframe):  # the recorder fell behind: what came before has a gap
                keyframe, events, seq = record, [], record.seq
                continue
            if record.seq != seq:
                raise TraceError(f"{path}, line {number}: event {record.seq} where {seq} should be")
            events.append(record)
            seq += 1
    return Trace(keyframe, events)


def _json_lines(file) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"line {number} is damaged: {error}") from error
