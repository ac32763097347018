"""What every kind of benchmark reports: the setting, tables as text, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from bench.measures import percentile


@dataclass(slots=True)
class Report:
    """A benchmark's result. problems: what was asked for and has no figure, and why."""

    text: str
    data: dict[str, Any]
    figure: Callable[[], go.Figure]
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(self.data | {"problems": self.problems}, indent=2)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row its head, whose columns line up as plain text too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(_pad, row, widths, range(len(row)))) + " |" for row in rows]
    rule = "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


KERNELS = {"native": "kernels in C++", "torch": "PyTorch's kernels"}


def setting(facts: dict[str, Any]) -> list[str]:
    """The model, the machine and the versions, in lines."""
    machine = facts["hardware"]
    return [
        f"{facts['model']}, {facts['dtype']}, {KERNELS[facts['kernels']]}, greedy, prefix cache off",
        f"{machine.get('gpu') or machine['cpu']}, {machine['cores']} cores ({machine['threads']} threads), "
        f"{', '.join(machine['isa']) or 'no wide vectors'}, {machine['ram_gib']} GiB, "
        f"reads memory at {facts['read_gb_per_second']:.0f} GB/s",
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}",
    ]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Percentiles for JSON."""
    return {f"p{percent}": percentile(values, percent) if values else None for percent in (50, 95, 99)}


def spread_text(values: Sequence[float], percents: Sequence[int], scale: float = 1.0, digits: int = 0) -> str:
    """ "12 / 34": percentiles for a table; "-" without values."""
    if not values:
        return "-"
    return " / ".join(f"{percentile(values, percent) * scale:.{digits}f}" for percent in percents)
