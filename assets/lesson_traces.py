"""Record what the lessons show: `make lessons`. The runs are the guide's, seeded, on the real model."""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs import runs
from engine import LLM
from engine.model import LoadedModel
from engine.trace import Trace, write_trace
from visualizer.lessons import TRACES, trace_names


def record(loaded: LoadedModel) -> dict[str, Trace]:
    """All recordings by the names that `lessons.json` uses."""
    batching = runs.batching(loaded).traces
    memory = runs.memory(loaded).traces
    injection = runs.injection(loaded).traces
    chunks = runs.chunks(loaded).traces
    sharing = runs.sharing(loaded).traces
    return {
        **{f"batching-{mode}": trace for mode, trace in batching.items()},
        **{f"memory-{way}": trace for way, trace in memory.items()},
        **{f"injection-{mode}": trace for mode, trace in injection.items()},
        "chunks-64": chunks["budget 64"],
        "chunks-512": chunks["budget 512"],
        "preemption": runs.preemption(loaded).traces["preemption"],
        "sharing-off": sharing["without"],
        "sharing-on": sharing["with prefix caching"],
        "forks": runs.forks(loaded).traces["forks"],
    }


def main() -> None:
    loaded = LLM("auto", num_blocks=1).loaded
    record(loaded)  # once to warm up: the first steps of a process are slow
    traces = record(loaded)
    TRACES.mkdir(exist_ok=True)
    for name in trace_names():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.jsonl"
            write_trace(traces[name], file)
            packed = gzip.compress(file.read_bytes(), compresslevel=9, mtime=0)
        (TRACES / f"{name}.jsonl.gz").write_bytes(packed)
        print(f"{name}: {len(packed) / 1000:.1f} kB")


if __name__ == "__main__":
    main()
