"""Traces: an engine's events in a file, one JSON value a line.

Line 1 is a header with format and version, line 2 the keyframe, then every event. The same trace
feeds replay, lessons, figures and documents, so whatever they show did happen.

Reading trusts nothing: see `trace_schema` for what a record may hold, `trace_check` for what may follow
what, and `TraceLimits` for how much of it.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from engine.events import Event, EventBus, Keyframe
from engine.trace_check import Follower
from engine.trace_schema import TYPES, BadValue, read_record

FORMAT = "glass-engine-trace"
VERSION = 1
_NAMES = {cls: name for name, cls in TYPES.items()}
_MOST_HEADER = 4096  # bytes


class TraceError(ValueError):
    """A file that is not a trace, is damaged, too large, or of a version this engine cannot read.

    `line` is the line that shows it, from 1; None if it is not about a line.
    """

    def __init__(self, reason: str, line: int | None = None):
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.line = line


class Trace(NamedTuple):
    keyframe: Keyframe
    events: list[Event]


@dataclass(frozen=True)
class TraceLimits:
    """How much a reader takes. The defaults are for one's own files; a server sets tighter ones."""

    most_bytes: int = 4 << 30
    most_line_bytes: int = 256 << 20
    most_records: int = 50_000_000
    most_blocks: int = 16 << 20
    most_slots: int = 65_536
    most_live: int = 10_000_000  # requests waiting and running at a time


# -- writing --------------------------------------------------------------------------------------


def to_json(record: Keyframe | Event) -> dict[str, Any]:
    """A keyframe or event as plain JSON data; its parts become lists, in field order."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {"type": _NAMES[type(record)], **values}


def _line(value: dict) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


HEADER = _line({"format": FORMAT, "version": VERSION})


def trace_lines(keyframe: Keyframe, events: Iterable[Event]) -> Iterator[str]:
    """The lines of a trace file, each with its line end."""
    yield HEADER
    yield _line(to_json(keyframe))
    for event in events:
        yield _line(to_json(event))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a whole trace to a file, replacing what is there. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(trace_lines(*trace))


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
        self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._file.write(HEADER)
        self._drain()
        self._thread = threading.Thread(target=self._run, name="trace-recorder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            self._drain()

    def _drain(self) -> None:
        keyframe, events, self._cursor = self._bus.read(self._cursor)
        for record in ([keyframe] if keyframe else []) + events:
            self._file.write(_line(to_json(record)))

    def close(self) -> None:
        """Write what was published until now and close the file; what comes later is not recorded."""
        self._closing.set()
        self._thread.join()
        self._drain()
        self._file.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


# -- reading --------------------------------------------------------------------------------------


def read_trace(path: str | Path, limits: TraceLimits | None = None) -> Trace:
    """Read a trace from a file. Raises TraceError naming the line and the reason, or OSError."""
    with open(path, "rb") as file:
        return parse_trace(file, limits)


def parse_trace(source: bytes | BinaryIO, limits: TraceLimits | None = None) -> Trace:
    """Read a trace from bytes or a binary file, line by line.

    It takes time and memory in proportion to what it reads, and reads no more than the limits allow.
    Raises TraceError naming the line and the reason.
    """
    limits = limits or TraceLimits()
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    _check_header(file.readline(_MOST_HEADER))
    trace: Trace | None = None
    follower: Follower | None = None
    num_bytes = 0
    for number, line in enumerate(iter(lambda: file.readline(limits.most_line_bytes + 1), b""), start=2):
        num_bytes += len(line)
        try:
            _check_size(line, number, num_bytes, limits)
            if line.isspace():
                continue  # as an editor may leave at the end
            record = read_record(_parse(line))
            if isinstance(record, Keyframe):  # the first; or a recorder fell behind, and before is a gap
                _check_info(record, limits)
                follower, trace = Follower(record), Trace(record, [])
            elif trace is None or follower is None:
                raise BadValue("a trace must start with a keyframe, and this is none")
            else:
                follower.follow(record)
                trace.events.append(record)
                if follower.num_live > limits.most_live:
                    raise BadValue(f"more than {limits.most_live:,} requests live at a time")
        except BadValue as error:
            raise TraceError(str(error), number) from None
    if trace is None:
        raise TraceError("the file ends after the header: a trace goes on with a keyframe", 2)
    return trace


def _check_header(line: bytes) -> None:
    """Raise TraceError unless this is the first line of a trace that this engine reads."""
    if b'"traceEvents"' in line:
        raise TraceError(
            "this is a Chrome trace, made for Perfetto; what can be replayed is the JSONL file", 1
        )
    try:
        header = _parse(line.removeprefix(b"\xef\xbb\xbf"))
    except BadValue:
        header = None
    if type(header) is not dict or header.get("format") != FORMAT:
        raise TraceError("not a Glass Engine trace: the first line is no trace header", 1)
    version = header.get("version")
    if type(version) is not int or version != VERSION:
        raise TraceError(f"a version {version!r:.20} trace, and this engine reads version {VERSION}", 1)


def _check_size(line: bytes, number: int, num_bytes: int, limits: TraceLimits) -> None:
    if len(line) > limits.most_line_bytes:
        raise BadValue(f"longer than {limits.most_line_bytes:,} bytes")
    if num_bytes > limits.most_bytes:
        raise BadValue(f"the file is larger than {limits.most_bytes:,} bytes")
    if number - 1 > limits.most_records:
        raise BadValue(f"more than {limits.most_records:,} records")


def _check_info(keyframe: Keyframe, limits: TraceLimits) -> None:
    info = keyframe.info
    if info.num_blocks > limits.most_blocks:
        raise BadValue(f"{info.num_blocks:,} blocks; {limits.most_blocks:,} is the most here")
    if info.max_num_seqs > limits.most_slots:
        raise BadValue(f"{info.max_num_seqs:,} slots; {limits.most_slots:,} is the most here")


def _refuse_constant(name: str) -> None:
    raise BadValue(f"damaged: {name} is no number of JSON")


def _parse(line: bytes) -> Any:
    """The JSON value in a line. Raises BadValue on whatever may be wrong with it."""
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except BadValue:
        raise
    except json.JSONDecodeError as error:
        raise BadValue(f"damaged: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError as error:
        raise BadValue(f"damaged: not UTF-8 at byte {error.start + 1}") from None
    except RecursionError:
        raise BadValue("damaged: nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise BadValue("damaged: a number with too many digits") from None
