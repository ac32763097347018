"""The comparison: the same work in the chosen modes of this engine, and on its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from bench.measures import Arm, is_estimate, why_unfair
from bench.peers.launch import PeerFailed, PeerSpec, Task, run_peer
from bench.progress import elapsed_bar, token_bar
from bench.report import Report, markdown, setting, spread, spread_text
from bench.runs import check_fits, run_mode
from bench.workload import WorkItem, num_output_tokens
from engine import LLM
from engine.events import Mode

HEADER = (
    "mode",
    "tok/s",
    "speed-up",
    "TTFT s, p50 / p95",
    "gap ms, p50 / p95",
    "at once, mean / most",
    "wasted slots",
    "KV peak",
    "KV mean",
    "KV filled",
    "GB/s",
    "overhead",
)
LEGEND = """\
speed-up: over naive. TTFT: from a request's arrival to its first token. gap: from one token of a request to
its next. at once: requests between their first and last token. wasted slots: idle slot-steps while a
request waited, of all slot-steps. KV peak, mean: blocks owned by requests, of the pool. KV filled: tokens
written, of what those blocks hold. GB/s: weights read. overhead: of the steps' time, what was not the
model's (scheduling, preparing, sampling, bookkeeping, events)."""
TERMS_HEADER = (
    "run",
    "dtype",
    "weights",
    "threads",
    "KV cache",
    "requests",
    "prompt tokens",
    "output tokens",
    "load s",
    "warm-up s",
    "software",
)
COLOURS = {
    "naive": "#b4552d",
    "static": "#c9a227",
    "continuous": "#2a7f9e",
    "transformers": "#888888",
    "transformers-static": "#a0a0a0",
    "transformers-continuous": "#6d6d6d",
    "vllm-cpu": "#7a5195",
    "openvino-genai": "#4c8c4a",
}


class PeerRun(NamedTuple):
    """A peer that is to run: its name, what it is, its interpreter, and how many of the requests it gets."""

    name: str
    spec: PeerSpec
    python: str
    num_requests: int
    timeout: float


def compare(
    llm: LLM,
    modes: Sequence[Mode],
    work: Sequence[WorkItem],
    facts: dict[str, Any],
    peers: Sequence[PeerRun] = (),
    gguf: Path | None = None,
) -> Report:
    """Run the work everywhere. Raises InvalidRun if this engine does not do all of it.

    A peer that does not is named among the report's problems, and has no figure. gguf: the file that the
    model was made from, for a peer that reads nothing else.
    """
    check_fits(llm.engine, work)
    info, problems = llm.engine.info, []
    arms = []
    for mode in modes:
        with token_bar(mode, num_output_tokens(work)) as bar:
            arms.append(run_mode(llm.engine, mode, work, progress=bar.update))
    task = Task(
        model_path=llm.model_path,
        gguf=gguf,
        dtype=info.dtype,
        device=info.device,
        threads=torch.get_num_threads(),
        max_num_seqs=info.max_num_seqs,
        max_model_len=info.context_limit,
    )
    for name, spec, python, num_requests, timeout in peers:
        with elapsed_bar(name) as bar:
            try:
                part = work[:num_requests]
                arms.append(
                    run_peer(name, spec, task, part, python=python, timeout=timeout, tick=bar.refresh)
                )
            except PeerFailed as error:
                problems.append(str(error))
    return make_report(arms, facts, problems)


def make_report(arms: Sequence[Arm], facts: dict[str, Any], problems: list[str]) -> Report:
    """What was measured, for people, for programs and as a picture."""
    slots, blocks, limit = facts["max_num_seqs"], facts["num_blocks"], facts["context_limit"]
    reserve = blocks // -(-limit // facts["block_size"])
    room = (
        f"all {slots} slots can reserve the {limit}-token maximum, so memory holds no mode back"
        if reserve >= slots
        else f"only {reserve} of {slots} slots can reserve the {limit}-token maximum"
    )
    lines = [
        *setting(facts),
        facts["work"],
        f"{slots} slots; {blocks} KV blocks of {facts['block_size']} tokens: {room}",
        f"not timed: loading {facts['load_seconds']:.1f} s, and what is named below",
        "",
        table(arms, facts["weight_bytes"]),
        "",
        LEGEND,
        "",
        "Equal terms? Loading and warming up are not in the figures above.",
        "",
        terms_table(arms),
        "",
        *headlines(arms),
        *(f"No figure: {problem}" for problem in problems),
        *(f"Not installed: {name}. To get it: {how}." for name, how in facts["not_installed"].items()),
    ]
    title = f"{facts['model']}, {facts['dtype']}: {facts['work']}"
    return Report(
        "\n".join(lines).rstrip(),
        facts | {"runs": [as_data(arm, _find(arms, "naive")) for arm in arms]},
        lambda: figure(arms, title),
        problems,
    )


def ratio(arm: Arm, base: Arm | None) -> float | None:
    """How many times as fast as `base`; None if that would mean nothing."""
    if base is None or why_unfair(arm, base):
        return None
    return arm.tokens_per_second / base.tokens_per_second


def speed_up(arm: Arm, base: Arm | None) -> str:
    """ "12.3x", "~12.3x" if it is an estimate, "-" if it would mean nothing."""
    times = ratio(arm, base)
    if base is None or times is None:
        return "-"
    return f"{'~' * is_estimate(arm, base)}{times:.1f}x"


def headlines(arms: Sequence[Arm]) -> list[str]:
    """Speed-ups in words, or why there are none."""
    arm, lines = _find(arms, "continuous"), []
    for base in arms:
        if arm is None or base.name in ("static", "continuous"):
            continue
        if reason := why_unfair(arm, base):
            lines.append(f"No speed-up over {base.name}: {reason}.")
        else:
            part = f" (estimated from {len(base.work)} of {len(arm.work)} requests)"
            lines.append(
                f"Speed-up of continuous over {base.name}: {speed_up(arm, base)}"
                f"{part if is_estimate(arm, base) else ''}."
            )
    lines += [
        f"{arm.name} preempted {arm.usage.num_preemptions} times for lack of blocks."
        for arm in arms
        if arm.usage and arm.usage.num_preemptions
    ]
    return lines


def table(arms: Sequence[Arm], num_weight_bytes: int) -> str:
    """One row an arm. Speed-ups are over the naive mode."""
    naive = _find(arms, "naive")
    num_requests = max(len(arm.work) for arm in arms)
    return markdown([HEADER, *(_row(arm, naive, num_requests, num_weight_bytes) for arm in arms)])


def _row(arm: Arm, naive: Arm | None, num_requests: int, num_weight_bytes: int) -> tuple[str, ...]:
    usage, name = arm.usage, arm.name
    if len(arm.work) < num_requests:
        name += f" (first {len(arm.work)})"
    inside: tuple[str, ...] = ("-",) * 6
    if usage:
        shares = (usage.wasted_slot_steps, usage.peak_kv, usage.mean_kv, usage.written_kv)
        rate = usage.num_steps * num_weight_bytes / arm.seconds / 1e9
        inside = (*(f"{share:.0%}" for share in shares), f"{rate:.1f}", f"{usage.overhead:.1%}")
    return (
        name,
        f"{arm.tokens_per_second:.1f}",
        speed_up(arm, naive),
        spread_text(arm.first_token_times, (50, 95), digits=2),
        spread_text(arm.gaps, (50, 95), scale=1e3),
        f"{arm.mean_at_once:.1f} / {arm.most_at_once}",
        *inside,
    )


def terms_table(arms: Sequence[Arm]) -> str:
    """What must be equal for a comparison to mean something, as it really was."""
    rows = [
        (
            arm.name,
            arm.terms.dtype,
            arm.terms.weights,
            str(arm.terms.threads),
            "on" if arm.terms.kv_cache else "off",
            str(len(arm.work)),
            str(arm.num_prompt),
            str(arm.num_output),
            "shared" if arm.load_seconds is None else f"{arm.load_seconds:.1f}",
            f"{arm.warm_up_seconds:.1f}",
            arm.software,
        )
        for arm in arms
    ]
    return markdown([TERMS_HEADER, *rows])


def as_data(arm: Arm, naive: Arm | None) -> dict[str, Any]:
    """Everything the tables say of an arm, unrounded."""
    return {
        "mode": arm.name,
        **asdict(arm.terms),
        "num_requests": len(arm.work),
        "num_prompt_tokens": arm.num_prompt,
        "num_output_tokens": arm.num_output,
        "seconds": arm.seconds,
        "load_seconds": arm.load_seconds,
        "warm_up_seconds": arm.warm_up_seconds,
        "software": arm.software,
        "tokens_per_second": arm.tokens_per_second,
        "speed_up_over_naive": ratio(arm, naive),
        "speed_up_is_estimate": naive is not None and is_estimate(arm, naive),
        "slots": arm.slots,
        "mean_at_once": arm.mean_at_once,
        "most_at_once": arm.most_at_once,
        "ttft_seconds": spread(arm.first_token_times),
        "token_gap_seconds": spread(arm.gaps),
        "usage": asdict(arm.usage) if arm.usage else None,
    }


def _find(arms: Sequence[Arm], name: str) -> Arm | None:
    return next((arm for arm in arms if arm.name == name), None)


def figure(arms: Sequence[Arm], title: str) -> go.Figure:
    """Throughput, output over time, KV memory."""
    titles = ("Throughput", "Output over time", "KV pool, mean over the steps")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)
    for arm in arms:
        style = {"name": arm.name, "legendgroup": arm.name, "marker_color": COLOURS[arm.name]}
        rate = arm.tokens_per_second
        figure.add_bar(x=[arm.name], y=[rate], text=[f"{rate:.0f}"], **style, row=1, col=1)
        times = sorted(
            time + item.due for item, times in zip(arm.work, arm.token_times, strict=True) for time in times
        )
        shown = range(0, len(times), max(1, len(times) // 500))
        figure.add_scatter(
            x=[times[i] for i in shown],
            y=[i + 1 for i in shown],
            mode="lines",
            **style,
            showlegend=False,
            row=1,
            col=2,
        )
    used = [(arm.name, arm.usage) for arm in arms if arm.usage]
    names = [name for name, _ in used]
    written = [100 * usage.mean_kv * usage.written_kv for _, usage in used]
    empty = [100 * usage.mean_kv * (1 - usage.written_kv) for _, usage in used]
    colours = [COLOURS[name] for name in names]
    figure.add_bar(x=names, y=written, marker_color=colours, showlegend=False, row=1, col=3)
    figure.add_bar(x=names, y=empty, name="reserved, but empty", marker_color="#d9d4c7", row=1, col=3)
    figure.update_yaxes(title_text="tokens per second", row=1, col=1)
    figure.update_xaxes(title_text="seconds", row=1, col=2)
    figure.update_yaxes(title_text="output tokens", row=1, col=2)
    figure.update_yaxes(title_text="% of the pool", row=1, col=3)
    return figure.update_layout(title=title, barmode="stack", template="plotly_white", height=480)
