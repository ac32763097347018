"""The guide's runs: small, seeded, and the same wherever they are made. The chapters' tables come from here.

    .venv/bin/python docs/runs.py              # all of them
    .venv/bin/python docs/runs.py batching     # one

Prompts are random token ids and answers have a fixed length, so what a run counts (steps, slots, blocks,
tokens) does not depend on the model, the machine or the day. The runs named `...-time` measure seconds; they
differ from machine to machine, so their tables say which one it was. `assets/figures.py` draws the pictures.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.machine import read_bandwidth, weight_bytes
from engine import LLM, ContinuousEngine, SamplingParams
from engine.config import Dtype
from engine.events import Event, LifecycleEvent, Mode, StepEvent
from engine.model import LoadedModel
from engine.model.kv_cache import KVCache
from engine.trace import Trace

MODES: tuple[Mode, ...] = ("naive", "static", "continuous")


class Ask(NamedTuple):
    """One request. It arrives just before step `at`; its answer has exactly `num_output` tokens."""

    name: str
    prompt: list[int]
    num_output: int
    at: int = 1
    n: int = 1


@dataclass
class Run:
    """What came out: a table in Markdown, and the traces that figures are drawn from.

    curves: for the runs that measure seconds, what their figures plot.
    """

    table: str
    traces: dict[str, Trace] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)


def tokens(rng: random.Random, count: int) -> list[int]:
    """A prompt of random token ids that every tokenizer has."""
    return [rng.randrange(32, 250) for _ in range(count)]


def make_engine(loaded: LoadedModel, mode: Mode = "continuous", **options: Any) -> ContinuousEngine:
    """An engine of its own for a run, over a model that is loaded already."""
    defaults: dict[str, Any] = {"block_size": 16, "num_blocks": 128, "max_num_seqs": 4, "max_model_len": 512}
    return LLM.from_loaded(loaded, mode=mode, **(defaults | options)).engine


class Served(NamedTuple):
    """A finished run: its trace, the answers' token ids by request, and the seconds each step took."""

    trace: Trace
    answers: dict[str, list[int]]
    seconds: list[float]


def serve(engine: ContinuousEngine, asks: Iterable[Ask]) -> Served:
    """Submit each request when it is due, and step until all are answered."""
    pending = sorted(asks, key=lambda ask: ask.at)
    keyframe, _, cursor = engine.events.read()
    assert keyframe is not None  # whoever has no cursor gets one
    events: list[Event] = []
    answers: dict[str, list[int]] = {}
    seconds: list[float] = []
    step = 1
    while pending or engine.has_unfinished():
        while pending and pending[0].at <= step:
            ask = pending.pop(0)
            params = SamplingParams(
                max_tokens=ask.num_output, temperature=float(ask.n > 1), ignore_eos=True, n=ask.n, seed=1
            )
            engine.add_request(ask.name, ask.prompt, params)
        started = time.monotonic()
        for delta in engine.step():
            for output in delta.outputs:
                name = f"{delta.request_id}:{output.index}" if output.index else delta.request_id
                answers.setdefault(name, []).extend(output.token_ids)
        seconds.append(time.monotonic() - started)
        _, news, cursor = engine.events.read(cursor)
        events += news
        step += 1
    return Served(Trace(keyframe, events), answers, seconds)


# -- reading a trace --------------------------------------------------------------------------------


def steps_of(trace: Trace) -> list[StepEvent]:
    return [event for event in trace.events if isinstance(event, StepEvent)]


def transitions(trace: Trace, *kinds: str) -> list[LifecycleEvent]:
    return [event for event in trace.events if isinstance(event, LifecycleEvent) and event.kind in kinds]


def step_of(trace: Trace, kind: str, name: str) -> int:
    """The step in which something happened to a request for the first time."""
    return next(event.step for event in transitions(trace, kind) if event.request_id == name)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are aligned to the right."""
    body = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *body]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cells[i].ljust(width) if i == 0 else cells[i].rjust(width) for i, width in enumerate(widths)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(
        "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)
    )
    return "\n".join([line(list(header)), rule + "|", *(line(row) for row in body)])


# -- 1: the KV cache --------------------------------------------------------------------------------

KV_PROMPT, KV_OUTPUT = 32, 48


def kv(loaded: LoadedModel) -> Run:
    """48 tokens after a prompt of 32: with what is known kept, and with everything computed anew."""
    prompt = tokens(random.Random(1), KV_PROMPT)
    cached = serve(make_engine(loaded, enable_prefix_caching=False), [Ask("a", prompt, KV_OUTPUT)])
    engine = make_engine(loaded, enable_prefix_caching=False)
    known, anew = list(prompt), 0
    for number in range(KV_OUTPUT):
        # A request of one token for each token: nothing is left over from the one before.
        part = serve(engine, [Ask(f"a{number}", known, 1)])
        known += part.answers[f"a{number}"]
        anew += sum(use.num_tokens for event in steps_of(part.trace) for use in event.slots)
    kept = sum(use.num_tokens for event in steps_of(cached.trace) for use in event.slots)
    same = "yes" if known[KV_PROMPT:] == cached.answers["a"] else "NO"
    rows = [
        ("everything anew for each token", anew, KV_OUTPUT, "-"),
        ("with the KV cache", kept, KV_OUTPUT, same),
    ]
    return Run(
        markdown(("", "tokens computed", "tokens of the answer", "the same answer"), rows),
        {"kv": cached.trace},
    )


def kv_size(loaded: LoadedModel) -> Run:
    """What the cache takes, for the model at hand, in float32 on every machine."""
    config, block_size, dtype = loaded.config, 16, torch.float32
    block = KVCache.bytes_per_block(config, block_size, dtype)
    rows = [
        ("layers", config.num_layers),
        ("key and value heads in a layer", config.num_kv_heads),
        ("numbers in a head's key, or value", config.head_dim),
        ("bytes in a number (float32)", dtype.itemsize),
        ("bytes for one token", block // block_size),
        ("bytes for a block of 16 tokens", block),
        ("bytes for 512 tokens", block * 32),
    ]
    return Run(markdown((loaded.name, ""), rows))


def kv_time(loaded: LoadedModel) -> Run:
    """The seconds of each token, with the cache and without, as the context grows."""
    prompt, length = tokens(random.Random(1), KV_PROMPT), 224
    engine = make_engine(loaded, enable_prefix_caching=False)
    serve(engine, [Ask("warm-up", prompt, 8)])
    cached = serve(engine, [Ask("cached", prompt, length)]).seconds
    answer, positions, anew = list(prompt), list(range(0, length, 16)), []
    rng = random.Random(2)
    for position in positions:
        answer = prompt + tokens(rng, position)
        runs = [serve(engine, [Ask(f"anew-{position}-{i}", answer, 1)]).seconds[0] for i in range(3)]
        anew.append(statistics.median(runs))
    near = [statistics.median(cached[max(1, p - 4) : p + 5]) for p in positions]
    rows = [
        (f"{KV_PROMPT + p} tokens", f"{1000 * anew[i]:.0f} ms", f"{1000 * near[i]:.0f} ms")
        for i, p in enumerate(positions)
        if p in (0, 64, 128, 192)
    ]
    return Run(
        markdown(("context", "next token, everything anew", "next token, with the cache"), rows),
        curves={"context": [KV_PROMPT + p for p in positions], "anew": anew, "cached": near},
    )


# -- 2: batching ------------------------------------------------------------------------------------

BATCH_OUTPUTS = (6, 40, 10, 24, 8, 32, 12, 16, 30, 5, 14, 20)


def batching_asks() -> list[Ask]:
    rng = random.Random(2)
    return [Ask(f"r{i}", tokens(rng, 12), length) for i, length in enumerate(BATCH_OUTPUTS, 1)]


def batching(loaded: LoadedModel) -> Run:
    """Twelve requests, four slots, three modes."""
    traces = {mode: serve(make_engine(loaded, mode), batching_asks()).trace for mode in MODES}
    rows = []
    for mode, trace in traces.items():
        steps = steps_of(trace)
        busy = sum(len(event.slots) for event in steps)
        idle = sum(4 - len(event.slots) for event in steps)
        waiting = sum(4 - len(event.slots) for event in steps if event.num_waiting)
        rows.append((mode, len(steps), 4 * len(steps), busy, idle, waiting, f"{busy / 4 / len(steps):.0%}"))
    header = ("mode", "steps", "slot-steps", "busy", "idle", "idle while someone waits", "busy share")
    return Run(markdown(header, rows), traces)


# -- 3: memory --------------------------------------------------------------------------------------

MEMORY_BLOCKS, MEMORY_REQUESTS = 256, 80


def memory(loaded: LoadedModel) -> Run:
    """Eighty short requests in a pool of 256 blocks, reserving the limit of 512 tokens, and paging."""
    rng = random.Random(3)
    asks = [
        Ask(f"r{i}", tokens(rng, rng.randint(8, 40)), rng.randint(12, 32))
        for i in range(1, MEMORY_REQUESTS + 1)
    ]
    traces, rows = {}, []
    options = {"num_blocks": MEMORY_BLOCKS, "max_num_seqs": MEMORY_REQUESTS, "enable_prefix_caching": False}
    for mode, name in (("static", "reserving"), ("continuous", "paging")):
        trace = serve(make_engine(loaded, mode, **options), asks).trace
        steps = steps_of(trace)
        rows.append(
            (
                f"{name} ({mode})",
                max(len(event.slots) for event in steps),
                max(event.num_used for event in steps),
                f"{mean_filled(trace):.0%}",
                len(transitions(trace, "preempted")),
                len(steps),
            )
        )
        traces[name] = trace
    header = (
        "memory",
        "requests at once",
        "blocks held, at most",
        "filled, on average",
        "preemptions",
        "steps",
    )
    return Run(markdown(header, rows), traces)


def peak_step(trace: Trace) -> int:
    """The first step that holds the most requests, and among those the most blocks."""
    return max(steps_of(trace), key=lambda event: (len(event.slots), event.num_used, -event.step)).step


def mean_filled(trace: Trace) -> float:
    """The share of the held blocks' places that hold a token, on average over the steps."""
    blocks = list(trace.keyframe.blocks)
    shares = []
    for event in trace.events:
        for delta in event.blocks:
            blocks[delta.block] = delta
        if isinstance(event, StepEvent):
            held = [block.filled for block in blocks if block.owners]
            shares += [statistics.mean(held) / trace.keyframe.info.block_size] if held else []
    return statistics.mean(shares)


# -- 4: waiting -------------------------------------------------------------------------------------


def injection(loaded: LoadedModel) -> Run:
    """Three long answers are under way when a short question comes, before step 20."""
    rng = random.Random(4)
    asks = [Ask(f"long{i}", tokens(rng, 12), 60) for i in (1, 2, 3)]
    asks.append(Ask("short", tokens(rng, 12), 8, at=20))
    traces = {mode: serve(make_engine(loaded, mode), asks).trace for mode in ("static", "continuous")}
    rows = [
        (mode, 20, step_of(trace, "first_token", "short"), step_of(trace, "finished", "short"))
        for mode, trace in traces.items()
    ]
    return Run(markdown(("mode", "asked before step", "first token in step", "done in step"), rows), traces)


CHUNK_BUDGETS = (64, 512)
LONG_PROMPT = 448


def chunk_asks() -> list[Ask]:
    """Two answers under way; then a very long prompt, and right behind it a very short one."""
    rng = random.Random(5)
    decoding = [Ask(f"d{i}", tokens(rng, 12), 48) for i in (1, 2)]
    return [
        *decoding,
        Ask("long", tokens(rng, LONG_PROMPT), 8, at=10),
        Ask("short", tokens(rng, 12), 8, at=10),
    ]


def chunks(loaded: LoadedModel) -> Run:
    """The same arrivals with a budget of 64 tokens a step, and of 512."""
    traces, rows = {}, []
    for budget in CHUNK_BUDGETS:
        engine = make_engine(loaded, max_num_batched_tokens=budget, enable_prefix_caching=False)
        trace = serve(engine, chunk_asks()).trace
        largest = max(sum(use.num_tokens for use in event.slots) for event in steps_of(trace))
        rows.append(
            (
                f"{budget} tokens a step",
                largest,
                step_of(trace, "first_token", "short") - 9,
                step_of(trace, "first_token", "long") - 9,
            )
        )
        traces[f"budget {budget}"] = trace
    header = ("budget", "tokens in the largest step", "short prompt: steps to its first token", "long prompt")
    return Run(markdown(header, rows), traces)


def chunks_time(loaded: LoadedModel) -> Run:
    """What the two budgets mean in seconds."""
    rows = []
    for budget in CHUNK_BUDGETS:
        engine = make_engine(loaded, max_num_batched_tokens=budget, enable_prefix_caching=False)
        serve(engine, [ask._replace(name=f"warm-up-{ask.name}") for ask in chunk_asks()])
        trace = serve(engine, chunk_asks()).trace
        base = steps_of(trace)[0].step - 1
        times = {event.step - base: event.time for event in steps_of(trace)}
        asked = times[9]
        seconds = {
            name: times[step_of(trace, "first_token", name) - base] - asked for name in ("short", "long")
        }
        gap = max(times[step] - times[step - 1] for step in range(3, 48))
        rows.append(
            (
                f"{budget} tokens a step",
                *(f"{1000 * s:.0f} ms" for s in (seconds["short"], seconds["long"], gap)),
            )
        )
    header = ("budget", "short prompt: first token after", "long prompt", "longest pause of those decoding")
    return Run(markdown(header, rows))


# -- 5: preemption ----------------------------------------------------------------------------------


def preemption(loaded: LoadedModel) -> Run:
    """Four requests that will need 20 blocks, in a pool of 14."""
    rng = random.Random(6)
    asks = [Ask(f"r{i}", tokens(rng, 20), 60) for i in range(1, 5)]
    served = serve(make_engine(loaded, num_blocks=14, max_model_len=224), asks)
    trace = served.trace
    rows = []
    for ask in asks:
        alone = serve(make_engine(loaded), [ask]).answers[ask.name]
        out = [event for event in transitions(trace, "preempted") if event.request_id == ask.name]
        back = [event for event in transitions(trace, "resumed") if event.request_id == ask.name]
        rows.append(
            (
                ask.name,
                len(out),
                sum(event.num_tokens - 1 for event in back),  # its newest token was not computed before
                len(served.answers[ask.name]),
                "yes" if served.answers[ask.name] == alone else "NO",
                step_of(trace, "finished", ask.name),
            )
        )
    header = (
        "request",
        "preemptions",
        "tokens computed twice",
        "tokens of the answer",
        "as if alone",
        "done in step",
    )
    return Run(markdown(header, rows), {"preemption": trace})


# -- 6: sharing -------------------------------------------------------------------------------------


def sharing(loaded: LoadedModel) -> Run:
    """Six prompts that begin with the same 64 tokens: the first comes at once, the others before step 4."""
    rng = random.Random(7)
    common = tokens(rng, 64)
    asks = [
        Ask(f"r{i}", common + tokens(rng, rng.randint(6, 20)), 24, at=1 if i == 1 else 4) for i in range(1, 7)
    ]
    traces, rows = {}, []
    for cache in (False, True):
        engine = make_engine(loaded, max_num_seqs=8, enable_prefix_caching=cache)
        trace = serve(engine, asks).trace
        saved = sum(event.num_tokens for event in transitions(trace, "prefix_hit"))
        total = sum(len(ask.prompt) for ask in asks)
        peak = max(event.num_used for event in steps_of(trace))
        name = "with prefix caching" if cache else "without"
        rows.append((name, total - saved, saved, peak))
        traces[name] = trace
    header = ("", "prompt tokens computed", "taken from the cache", "blocks held, at most")
    return Run(markdown(header, rows), traces)


def forks(loaded: LoadedModel) -> Run:
    """One prompt of 40 tokens, four continuations of it: two full blocks shared, the third copied."""
    rng = random.Random(8)
    prompt = tokens(rng, 40)
    forked = serve(make_engine(loaded), [Ask("r", prompt, 20, n=4)]).trace
    apart = serve(
        make_engine(loaded, enable_prefix_caching=False), [Ask(f"r{i}", prompt, 20) for i in range(4)]
    ).trace
    rows = []
    for name, trace in (("four requests of their own", apart), ("n=4, forked", forked)):
        step = peak_step(trace)
        computed = sum(
            use.num_tokens for event in steps_of(trace) for use in event.slots if use.phase == "prefill"
        )
        blocks = next(event.num_used for event in steps_of(trace) if event.step == step)
        rows.append((name, computed, blocks, max_owners(trace)))
    header = ("", "prompt tokens computed", "blocks held, at most", "owners of one block, at most")
    return Run(markdown(header, rows), {"forks": forked})


def max_owners(trace: Trace) -> int:
    return max(delta.ref_count for event in trace.events for delta in event.blocks)


# -- 7: why it is faster ----------------------------------------------------------------------------

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@functools.cache
def bytes_a_second(device: str) -> float:
    """How fast the machine reads memory: measured once, so that all who say it say the same."""
    return 1e9 * read_bandwidth(device)


def batch_time(loaded: LoadedModel) -> Run:
    """The seconds of a decode step, by how many requests it serves; contexts of about 96 tokens."""
    rng, sizes = random.Random(9), BATCH_SIZES
    seconds = []
    for size in sizes:
        engine = make_engine(
            loaded,
            num_blocks=8 * size,
            max_num_seqs=size,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )
        served = serve(engine, [Ask(f"r{i}", tokens(rng, 84), 24) for i in range(size)])
        seconds.append(statistics.median(served.seconds[-20:]))
    alone = 1 / seconds[0]
    rows = [
        (size, f"{1000 * s:.1f} ms", f"{size / s:.0f}", f"{size / s / alone:.1f}x")
        for size, s in zip(sizes, seconds, strict=True)
    ]
    size = weight_bytes(loaded.path, str(loaded.dtype).removeprefix("torch."))
    table = markdown(("requests in the step", "the step takes", "tokens a second", "times one"), rows)
    ms = 1000 * size / bytes_a_second(loaded.device.type)
    notes = f"A step reads {size / 1e6:.0f} MB of weights, which alone takes {ms:.1f} ms here."
    few, many = sizes[-2:]
    longer = seconds[-1] - seconds[-2]
    roof = (many - few) / longer if longer > 0 else None
    if roof:
        notes += (
            f" From {few} to {many} requests it gets {1000 * longer:.1f} ms longer: {1000 / roof:.2f} ms for "
            f"each request more. So at most {roof:.0f} of them, and as many tokens, fit into a second: "
            "that is the roof."
        )
    return Run(f"{table}\n\n{notes}", curves={"sizes": list(sizes), "seconds": seconds, "roof": roof})


RUNS: dict[str, Callable[[LoadedModel], Run]] = {
    "kv": kv,
    "kv-size": kv_size,
    "kv-time": kv_time,
    "batching": batching,
    "memory": memory,
    "injection": injection,
    "chunks": chunks,
    "chunks-time": chunks_time,
    "preemption": preemption,
    "sharing": sharing,
    "forks": forks,
    "batch-time": batch_time,
}


COMPARING = ("kv", "preemption")  # one answer with another


def load_for(name: str) -> LoadedModel:
    """The real model, in the dtype that the machine is fastest at, or, for a run that compares, in float32.

    In bfloat16, which rounds coarsely, who else is in the batch may change which token is the best.
    """
    return _load("float32" if name in COMPARING else "auto")


@functools.cache
def _load(dtype: Dtype) -> LoadedModel:
    return LLM("auto", num_blocks=1, dtype=dtype).loaded


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - RUNS.keys():
        sys.exit(f"There is no run {', '.join(sorted(unknown))}. There are: {', '.join(RUNS)}.")
    for name in names or RUNS:
        run = RUNS[name](load_for(name))
        print(f"{name}: {(RUNS[name].__doc__ or '').splitlines()[0]}\n\n{run.table}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
