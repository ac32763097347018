"""How cost grows with the work: more requests at once, longer contexts, a longer queue."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from bench.progress import token_bar
from bench.report import Report, markdown, setting
from bench.runs import REAL_CLOCK, Clock, drive, run_mode
from bench.workload import W96_LARGEST_TOKEN, WorkItem, build_workload, num_output_tokens
from engine import LLM, ContinuousEngine, SamplingParams
from engine.events import StepEvent
from engine.model import LoadedModel

PARTS = ("requests", "contexts", "queue")
NUM_REQUESTS = (1, 4, 16, 64, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
NUM_WAITING = (10, 100, 1_000, 10_000)
MOST_TOKENS = 1 << 15  # in all contexts together: more takes minutes to prefill, and gigabytes
DECODE_STEPS = 12
PREFILL_TOKENS = 2048  # a step
QUEUE_STEPS = 24
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Throughput:
    """A burst of requests, all of them in slots at once."""

    num_requests: int
    num_output: int
    tokens_per_second: float
    overhead: float  # share of the steps' time that was not the model's


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The median decode step of `batch` requests that all have `context` tokens."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class QueueCost:
    """The median step while `num_waiting` requests queue behind full slots, in seconds.

    schedule: planning it. outside: all but the model, publishing its events included.
    """

    num_waiting: int
    schedule: float
    outside: float
    submit: float  # to queue one request


def measure_requests(loaded: LoadedModel, largest_token: int, clock: Clock = REAL_CLOCK) -> list[Throughput]:
    """tok/s with 1 to 256 requests of the workload, all at once, in as many slots, with memory for all."""
    results = []
    for count in NUM_REQUESTS:
        work = build_workload(count, None, largest_token)
        num_blocks = sum(-(-(len(item.prompt) + item.num_output) // BLOCK) for item in work)
        engine = _engine(loaded, count, num_blocks)
        with token_bar(f"{count} requests", num_output_tokens(work)) as bar:
            arm = run_mode(engine, "continuous", work, clock, bar.update)
        overhead = arm.usage.overhead if arm.usage else 0.0
        results.append(Throughput(count, arm.num_output, arm.tokens_per_second, overhead))
    return results


def measure_contexts(
    loaded: LoadedModel, batches: Sequence[int], largest_token: int, clock: Clock = REAL_CLOCK
) -> list[DecodeStep]:
    """Decode steps at growing contexts, up to the model's limit and `MOST_TOKENS` in all."""
    results = []
    for batch in sorted(set(batches)):
        for context in CONTEXTS:
            if context > loaded.max_model_len or batch * context > MOST_TOKENS:
                break
            seconds = _decode_step(loaded, batch, context, largest_token, clock)
            results.append(DecodeStep(batch, context, seconds))
    return results


def _decode_step(loaded: LoadedModel, batch: int, context: int, largest_token: int, clock: Clock) -> float:
    # Prefill takes several steps, in which those who are through decode already: everybody gets that many
    # tokens more, so that there are DECODE_STEPS steps in which all decode, the last of them at `context`.
    prefill_steps = -(-batch * context // PREFILL_TOKENS)
    num_output = min(prefill_steps + 2 + DECODE_STEPS, context // 2)
    tokens = build_workload(batch, None, largest_token)[0].prompt
    prompt = (tokens * (context // len(tokens) + 1))[: context - num_output]
    work = [WorkItem((*prompt[:-1], 100 + i), num_output) for i in range(batch)]
    engine = _engine(loaded, batch, batch * -(-context // BLOCK), max_num_batched_tokens=PREFILL_TOKENS)
    with token_bar(f"{batch} x {context} tokens", num_output * batch) as bar:
        run = drive(engine, "context", work, clock, bar.update)
    return statistics.median(
        event.times.total
        for event in run.events
        if isinstance(event, StepEvent)
        and len(event.slots) == batch
        and all(use.phase == "decode" for use in event.slots)
    )


def measure_queue(
    loaded: LoadedModel, num_slots: int, largest_token: int, clock: Clock = REAL_CLOCK
) -> list[QueueCost]:
    """A step's cost outside the model, with full slots and a queue of 10 to 10,000 behind them."""
    prompt = build_workload(1, None, largest_token)[0].prompt[:BLOCK]
    results = []
    for num_waiting in NUM_WAITING:
        num_blocks = num_slots * -(-(BLOCK + 2 * QUEUE_STEPS) // BLOCK)
        # All prompts in one step: otherwise, of many slots, the first are done before the last are filled.
        engine = _engine(loaded, num_slots, num_blocks, max_num_batched_tokens=max(512, num_slots * BLOCK))
        params = SamplingParams(temperature=0.0, max_tokens=2 * QUEUE_STEPS, ignore_eos=True)
        before = clock.now()
        for i in range(num_slots + num_waiting):
            engine.add_request(f"queue-{i}", prompt, params)
        submit = (clock.now() - before) / (num_slots + num_waiting)
        is_full = False
        while not is_full:
            _, event = _step(engine, clock)
            is_full = len(event.slots) == num_slots and all(use.phase == "decode" for use in event.slots)
        steps = [_step(engine, clock) for _ in range(QUEUE_STEPS)]
        results.append(
            QueueCost(
                num_waiting,
                statistics.median(event.times.schedule for _, event in steps),
                statistics.median(seconds - event.times.forward for seconds, event in steps),
                submit,
            )
        )
    return results


def _step(engine: ContinuousEngine, clock: Clock) -> tuple[float, StepEvent]:
    """One step: how long it took from outside, and what it says of itself."""
    cursor, before = engine.events.next_seq, clock.now()
    engine.step()
    seconds = clock.now() - before
    event = engine.events.read(cursor).events[-1]
    assert isinstance(event, StepEvent), "a step publishes its own event last"
    return seconds, event


def _engine(loaded: LoadedModel, num_slots: int, num_blocks: int, **options: int) -> ContinuousEngine:
    return LLM.from_loaded(
        loaded,
        max_num_seqs=num_slots,
        num_blocks=num_blocks,
        block_size=BLOCK,
        enable_prefix_caching=False,
        **options,
    ).engine


def measure_scale(
    loaded: LoadedModel,
    parts: Sequence[str],
    num_slots: int,
    facts: dict[str, Any],
    largest_token: int = W96_LARGEST_TOKEN,
    clock: Clock = REAL_CLOCK,
) -> Report:
    """Measure some of `PARTS`. num_slots: slots of the queue's engine, and a batch for the contexts."""
    requests = measure_requests(loaded, largest_token, clock) if "requests" in parts else []
    steps = measure_contexts(loaded, (1, num_slots), largest_token, clock) if "contexts" in parts else []
    queues = measure_queue(loaded, num_slots, largest_token, clock) if "queue" in parts else []
    lines = setting(facts)
    if requests:
        lines += [
            "",
            "Requests at once, all of them in slots (the workload's lengths):",
            "",
            _requests_table(requests),
        ]
    if steps:
        lines += ["", "Decode step by context, every request equally long:", "", _contexts_table(steps)]
    if queues:
        lines += [
            "",
            f"A step's cost beside the model, {num_slots} slots busy and a queue behind them (medians):",
            "",
            _queue_table(queues),
        ]
    data = facts | {
        "requests": [asdict(result) for result in requests],
        "contexts": [asdict(result) for result in steps],
        "queue": [asdict(result) for result in queues],
    }
    return Report("\n".join(lines), data, lambda: figure(requests, steps, queues))


def _requests_table(results: Sequence[Throughput]) -> str:
    rows = [
        (
            str(result.num_requests),
            f"{result.tokens_per_second:.1f}",
            f"{1e3 / result.tokens_per_second:.2f}",
            f"{result.overhead:.1%}",
        )
        for result in results
    ]
    return markdown([("requests", "tok/s", "ms a token", "overhead"), *rows])


def _contexts_table(results: Sequence[DecodeStep]) -> str:
    """A row a context, a column a batch."""
    cells = {(result.batch, result.context): f"{result.seconds * 1e3:.1f}" for result in results}
    batches = sorted({batch for batch, _ in cells})
    rows = [
        (str(context), *(cells.get((batch, context), "-") for batch in batches))
        for context in sorted({context for _, context in cells})
    ]
    return markdown([("context", *(f"ms, batch of {batch}" for batch in batches)), *rows])


def _queue_table(results: Sequence[QueueCost]) -> str:
    rows = [
        (
            f"{result.num_waiting:,}",
            f"{result.schedule * 1e6:.0f}",
            f"{result.outside * 1e3:.2f}",
            f"{result.submit * 1e6:.0f}",
        )
        for result in results
    ]
    head = ("waiting", "schedule us", "all but the model ms", "to submit one us")
    return markdown([head, *rows])


def figure(
    requests: Sequence[Throughput], steps: Sequence[DecodeStep], queues: Sequence[QueueCost]
) -> go.Figure:
    """Throughput over requests, decode step over context, step overhead over the queue; logarithmic axes."""
    titles = ("Throughput", "Decode step", "A step beside the model")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)

    def curve(column: int, name: str, x: Sequence[int], y: Sequence[float]) -> None:
        figure.add_scatter(x=x, y=y, name=name, mode="lines+markers", row=1, col=column)

    curve(1, "tok/s", [r.num_requests for r in requests], [r.tokens_per_second for r in requests])
    for batch in sorted({step.batch for step in steps}):
        mine = [step for step in steps if step.batch == batch]
        curve(2, f"batch of {batch}", [s.context for s in mine], [s.seconds * 1e3 for s in mine])
    waiting = [queue.num_waiting for queue in queues]
    curve(3, "schedule", waiting, [queue.schedule * 1e3 for queue in queues])
    curve(3, "all but the model", waiting, [queue.outside * 1e3 for queue in queues])
    axes = (
        ("requests at once", "tokens per second"),
        ("context, tokens", "milliseconds"),
        ("requests waiting", "milliseconds"),
    )
    for column, (x_title, y_title) in enumerate(axes, start=1):
        figure.update_xaxes(title_text=x_title, type="log", row=1, col=column)
        figure.update_yaxes(title_text=y_title, rangemode="tozero", row=1, col=column)
    return figure.update_layout(title="Cost as the work grows", template="plotly_white", height=480)
