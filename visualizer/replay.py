"""A recorded run as one page that needs nothing: `python -m visualizer.replay TRACE [TRACE] -o page.html`.

The file holds the page's own panels, the frames and a player, so it opens from a disk, on a static host or
behind a slide, without server, network or Python. With two traces it shows them side by side on one clock.

Its scripts are the modules of `static/`, as they are: each becomes a `data:` address in an import map, under
a name of its own, since a module in a `data:` address has no folder to be relative to.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.trace import Trace, TraceError, read_trace
from visualizer.frames import dumps, trace_frames
from visualizer.summary import summarise

STATIC = Path(__file__).parent / "static"
ENTRY = "replay.js"
MODE_WORDS = {"naive": "one at a time", "static": "batch by batch", "continuous": "at every step"}

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body class="glass-replay">
<header><h1>{title}</h1><button type="button" id="theme">Light or dark</button></header>
<main id="replay"><noscript>This recording is drawn by scripts: please allow them.</noscript></main>
<footer>{footer}</footer>
<script type="importmap">{importmap}</script>
<script type="application/json" id="recording">{recording}</script>
<script type="module">import {{ start }} from 'glass/{entry}'; start();</script>
</body>
</html>
"""


def replay_page(traces: Sequence[tuple[str, Trace]], title: str = "Glass Engine: a recorded run") -> str:
    """The page for named traces. Raises ValueError if there is none, or one without steps."""
    if not traces:
        raise ValueError("name at least one trace")
    arms = []
    for name, trace in traces:
        summary = summarise(trace)
        if not trace.events:
            raise ValueError(f"{name} holds no steps")
        frames = [json.loads(frame) for frame in trace_frames(trace)]
        arms.append({"title": name, "mode": (summary["modes"] or [None])[0], "frames": frames})
    packed = gzip.compress(dumps(arms).encode(), compresslevel=9, mtime=0)
    info = traces[0][1].keyframe.info
    footer = (
        f"{info.model}, {info.dtype} on {info.device}. Recorded from a real run by Glass Engine; "
        "it holds ids, slots, lengths and block numbers, and no word of text."
    )
    return _PAGE.format(
        title=html.escape(title),
        style=(STATIC / "glass.css").read_text(),
        footer=html.escape(footer),
        importmap=dumps({"imports": _modules(ENTRY)}),
        recording=dumps({"gzip": base64.b64encode(packed).decode()}),
        entry=ENTRY,
    )


def _modules(entry: str) -> dict[str, str]:
    """`data:` addresses of a module and of all that it imports, by the names used in them."""
    modules: dict[str, str] = {}
    pending = [entry]
    while pending:
        name = pending.pop()
        if f"glass/{name}" in modules:
            continue
        source = (STATIC / name).read_text()
        pending += re.findall(r"from '\./([\w-]+\.js)'", source)
        source = re.sub(r"from '\./", "from 'glass/", source)
        encoded = base64.b64encode(source.encode()).decode()
        modules[f"glass/{name}"] = f"data:text/javascript;base64,{encoded}"
    return modules


def main(argv: list[str] | None = None) -> int:
    """Write the page. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m visualizer.replay", description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, nargs="+", help="JSONL traces; two are shown side by side")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="page.html")
    parser.add_argument("--title", default="Glass Engine: a recorded run")
    args = parser.parse_args(argv)
    if len(args.trace) > 2:
        parser.error("one trace, or two side by side")
    try:
        traces: list[tuple[str, Any]] = []
        for path in args.trace:
            trace = read_trace(path)
            modes = summarise(trace)["modes"]
            name = f"{modes[0]}: {MODE_WORDS[modes[0]]}" if len(modes) == 1 else path.stem
            traces.append((name, trace))
        page = replay_page(traces, args.title)
        args.output.write_text(page)
    except (TraceError, ValueError, OSError) as error:
        print(f"visualizer.replay: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {len(page.encode()) / 1000:,.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
