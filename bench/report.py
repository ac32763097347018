"""The report: hardware, one table, JSON, a picture."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.measures import Arm, is_estimate, percentile, why_unfair

HEADER = (
    "mode",
    "tok/s",
    "speed-up",
    "TTFT s, p50 / p95",
    "gap ms, p50 / p95",
    "wasted slots",
    "KV peak",
    "KV mean",
    "KV filled",
    "GB/s",
)
LEGEND = """\
speed-up: over naive. TTFT: from a request's arrival to its first token. gap: from one token of a request to
its next. wasted slots: idle slot-steps while a request waited, of all slot-steps. KV peak, mean: blocks owned
by requests, of the pool. KV filled: tokens written, of what those blocks hold. GB/s: weights read."""


def hardware() -> dict[str, Any]:
    """The machine and the versions, as far as they bear on speed."""
    capabilities = {
        "AMX": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512": "_is_avx512_supported",
        "avx2": "_is_avx2_supported",
    }
    facts = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": [name for name, check in capabilities.items() if getattr(torch.cpu, check, bool)()],
        "ram_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_bandwidth(device: str, num_bytes: int = 1 << 30) -> float:
    """GB/s at which plain sums read memory, the best of three: the speed limit of a decode step."""
    data = torch.ones(num_bytes // 4, device=device)
    best = math.inf
    for _ in range(3):
        start = time.monotonic()
        data.sum().item()  # .item() waits for a GPU
        best = min(best, time.monotonic() - start)
    return num_bytes / best / 1e9


def weight_bytes(model_path: Path, dtype: str) -> int:
    """Bytes that a step reads at least: every weight once, an embedding that is no head left out."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 -- a file handle, not a dict
                sizes[key] = math.prod(tensors.get_slice(key).get_shape())
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    return sum(sizes.values()) * getattr(torch, dtype).itemsize


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


def table(arms: Sequence[Arm], num_weight_bytes: int) -> str:
    """A Markdown table whose columns line up as plain text too. Speed-ups are over the naive mode."""
    naive = next((arm for arm in arms if arm.name == "naive"), None)
    num_requests = max(len(arm.work) for arm in arms)
    rows = [HEADER, *(_row(arm, naive, num_requests, num_weight_bytes) for arm in arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "| "
        + " | ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in rows
    ]
    rule = (
        "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _row(arm: Arm, naive: Arm | None, num_requests: int, num_weight_bytes: int) -> tuple[str, ...]:
    first, gaps, usage = arm.first_token_times, arm.gaps, arm.usage
    name = arm.name
    if len(arm.work) < num_requests:
        name += f" (first {len(arm.work)})"
    memory: tuple[str, ...] = ("-",) * 5
    if usage:
        shares = (usage.wasted_slot_steps, usage.peak_kv, usage.mean_kv, usage.written_kv)
        rate = usage.num_steps * num_weight_bytes / arm.seconds / 1e9
        memory = (*(f"{share:.0%}" for share in shares), f"{rate:.1f}")
    return (
        name,
        f"{arm.tokens_per_second:.1f}",
        speed_up(arm, naive),
        f"{percentile(first, 50):.2f} / {percentile(first, 95):.2f}",
        f"{percentile(gaps, 50) * 1e3:.0f} / {percentile(gaps, 95) * 1e3:.0f}",
        *memory,
    )


def as_json(arms: Sequence[Arm], facts: dict[str, Any]) -> str:
    """Everything the table says, unrounded, and the setting it was measured in."""
    naive = next((arm for arm in arms if arm.name == "naive"), None)
    runs = [
        {
            "mode": arm.name,
            "dtype": arm.dtype,
            "num_requests": len(arm.work),
            "num_output_tokens": arm.num_output,
            "seconds": arm.seconds,
            "set_up_seconds": arm.set_up_seconds,
            "tokens_per_second": arm.tokens_per_second,
            "speed_up_over_naive": ratio(arm, naive),
            "ttft_seconds": _spread(arm.first_token_times),
            "token_gap_seconds": _spread(arm.gaps),
            "usage": asdict(arm.usage) if arm.usage else None,
        }
        for arm in arms
    ]
    return json.dumps({**facts, "runs": runs}, indent=2)


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(values, percent) if values else None for percent in (50, 95, 99)}


def plot(arms: Sequence[Arm], title: str, file: Path) -> None:
    """Write a web page that needs no network: throughput, output over time, KV memory."""
    from plotly.subplots import make_subplots

    titles = ("Throughput", "Output over time", "KV pool, mean over the steps")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)
    colours = {"naive": "#b4552d", "static": "#c9a227", "continuous": "#2a7f9e", "transformers": "#888888"}
    for arm in arms:
        style = {"name": arm.name, "legendgroup": arm.name, "marker_color": colours[arm.name]}
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
    colour = [colours[name] for name in names]
    figure.add_bar(x=names, y=written, marker_color=colour, showlegend=False, row=1, col=3)
    figure.add_bar(x=names, y=empty, name="reserved, but empty", marker_color="#d9d4c7", row=1, col=3)
    figure.update_yaxes(title_text="tokens per second", row=1, col=1)
    figure.update_xaxes(title_text="seconds", row=1, col=2)
    figure.update_yaxes(title_text="output tokens", row=1, col=2)
    figure.update_yaxes(title_text="% of the pool", row=1, col=3)
    figure.update_layout(title=title, barmode="stack", template="plotly_white", height=480)
    figure.write_html(file, include_plotlyjs=True)
