"""Latency under load: requests arrive at random, at rising rates, until the engine cannot keep up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from bench.compare import COLOURS
from bench.measures import Arm, percentile
from bench.progress import token_bar
from bench.report import Report, markdown, setting, spread, spread_text
from bench.runs import REAL_CLOCK, Clock, check_fits, run_mode
from bench.workload import W96_LARGEST_TOKEN, build_workload, num_output_tokens
from engine import ContinuousEngine
from engine.events import Mode

CAPACITY_SHARES = (0.5, 0.75, 1.0, 1.5)  # the default rates, in shares of the measured capacity
HEADER = (
    "mode",
    "arrivals/s",
    "TTFT s, p50 / p95 / p99",
    "gap ms, p50 / p95 / p99",
    "tok/s",
    "met both limits",
    "goodput/s",
)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user is promised: seconds to the first token, and mean seconds between tokens of a request."""

    ttft: float
    gap: float

    def is_met(self, times: Sequence[float]) -> bool:
        """times: when a request's tokens were there, in seconds since it arrived."""
        mean_gap = (times[-1] - times[0]) / max(len(times) - 1, 1)
        return times[0] <= self.ttft and mean_gap <= self.gap


@dataclass(frozen=True, slots=True)
class Point:
    """A mode at a rate of arrivals. goodput: requests a second that got what was promised."""

    mode: Mode
    rate: float
    arm: Arm
    num_met: int

    @property
    def goodput(self) -> float:
        return self.num_met / self.arm.seconds


def measure_load(
    engine: ContinuousEngine,
    modes: Sequence[Mode],
    num_requests: int,
    rates: Sequence[float],
    slo: Slo,
    facts: dict[str, Any],
    largest_token: int = W96_LARGEST_TOKEN,
    clock: Clock = REAL_CLOCK,
) -> Report:
    """Run every mode at every rate (requests a second), or at shares of what continuous mode can do.

    Raises InvalidRun if any request is not answered in full.
    """
    check_fits(engine, build_workload(num_requests))
    note = "rates as given"
    if not rates:
        capacity = measure_capacity(engine, num_requests, largest_token, clock)
        rates = [round(share * capacity, 2) for share in CAPACITY_SHARES]
        note = f"all at once, continuous mode answers {capacity:.2f} requests/s; rates are shares of that"
    points = []
    for mode in modes:
        for rate in rates:
            work = build_workload(num_requests, rate, largest_token)
            with token_bar(f"{mode}, {rate:g}/s", num_output_tokens(work)) as bar:
                arm = run_mode(engine, mode, work, clock, bar.update)
            points.append(Point(mode, rate, arm, sum(map(slo.is_met, arm.token_times))))
    lines = [
        *setting(facts),
        f"{num_requests} requests a row, Poisson arrivals, {engine.info.max_num_seqs} slots; {note}",
        f"promised: first token within {slo.ttft:g} s, then a token every {slo.gap * 1e3:g} ms on average",
        "",
        markdown([HEADER, *map(_row, points)]),
        "",
        "TTFT counts from a request's arrival. goodput: requests a second that got both.",
    ]
    data = facts | {"slo": asdict(slo), "points": [_as_data(point) for point in points]}
    return Report("\n".join(lines), data, lambda: figure(points, slo))


def measure_capacity(
    engine: ContinuousEngine, num_requests: int, largest_token: int, clock: Clock = REAL_CLOCK
) -> float:
    """Requests a second that continuous mode answers when they never run out."""
    work = build_workload(min(num_requests, 2 * engine.info.max_num_seqs), None, largest_token)
    with token_bar("capacity", num_output_tokens(work)) as bar:
        return len(work) / run_mode(engine, "continuous", work, clock, bar.update).seconds


def _row(point: Point) -> tuple[str, ...]:
    arm = point.arm
    return (
        point.mode,
        f"{point.rate:g}",
        spread_text(arm.first_token_times, (50, 95, 99), digits=2),
        spread_text(arm.gaps, (50, 95, 99), scale=1e3),
        f"{arm.tokens_per_second:.0f}",
        f"{point.num_met / len(arm.work):.0%}",
        f"{point.goodput:.2f}",
    )


def _as_data(point: Point) -> dict[str, Any]:
    arm = point.arm
    return {
        "mode": point.mode,
        "rate": point.rate,
        "num_requests": len(arm.work),
        "seconds": arm.seconds,
        "tokens_per_second": arm.tokens_per_second,
        "ttft_seconds": spread(arm.first_token_times),
        "token_gap_seconds": spread(arm.gaps),
        "num_met": point.num_met,
        "goodput": point.goodput,
    }


def figure(points: Sequence[Point], slo: Slo) -> go.Figure:
    """TTFT, gap and goodput over the rate of arrivals; the promises as dashed lines."""
    titles = ("Time to first token, p95", "Gap between tokens, p95", "Goodput")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)
    for mode in dict.fromkeys(point.mode for point in points):
        mine = [point for point in points if point.mode == mode]
        curves = (
            [percentile(point.arm.first_token_times, 95) for point in mine],
            [percentile(point.arm.gaps, 95) * 1e3 for point in mine],
            [point.goodput for point in mine],
        )
        for column, values in enumerate(curves, start=1):
            figure.add_scatter(
                x=[point.rate for point in mine],
                y=values,
                name=mode,
                legendgroup=mode,
                showlegend=column == 1,
                line_color=COLOURS[mode],
                row=1,
                col=column,
            )
    for column, limit in ((1, slo.ttft), (2, slo.gap * 1e3)):
        figure.add_hline(limit, line_dash="dash", line_color="#999999", row=1, col=column)
    for column, unit in enumerate(("seconds", "milliseconds", "requests a second"), start=1):
        figure.update_xaxes(title_text="arrivals a second", row=1, col=column)
        figure.update_yaxes(title_text=unit, rangemode="tozero", row=1, col=column)
    return figure.update_layout(title="Latency under load", template="plotly_white", height=480)
