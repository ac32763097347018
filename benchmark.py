"""Compare the three modes on one loaded model: `python benchmark.py`.

The work is W96: 96 requests of random tokens with ragged lengths, all submitted at once, greedy, end of text
ignored, prefix cache off. Throughput is output tokens over the time from the first submission to the last
token, prefill included; prompt tokens never count. Every mode gets the same requests, weights, kernels, slots
and blocks, and the pool is large enough for every slot to reserve its maximum, so nothing but the scheduling
policy differs. A request that fails or comes out short makes the whole benchmark invalid.

The parts are in `bench/`: `workload` (what is asked), `runs` (doing it), `measures` (what is counted) and
`report` (what is printed).
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from tqdm.auto import tqdm

from bench import report
from bench.measures import Arm, InvalidRun, is_estimate, why_unfair
from bench.runs import check_fits, describe_work, run_mode, run_transformers
from bench.workload import W96_LARGEST_TOKEN, W96_REQUESTS, build_workload, num_output_tokens
from engine import LLM
from engine.config import Dtype
from engine.events import Mode

MODES: tuple[Mode, ...] = get_args(Mode)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare naive, static and continuous batching on one loaded model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="auto", help="folder, GGUF file, Hub id or auto")
    add("--dtype", default="auto", choices=get_args(Dtype))
    add("--modes", nargs="+", default=list(MODES), metavar="MODE", help=f"some of {', '.join(MODES)}")
    add("--requests", type=_positive, default=W96_REQUESTS, help="requests of the workload")
    add("--max-num-seqs", type=_positive, default=32, help="slots")
    add("--max-model-len", type=_positive, default=512, help="what naive and static reserve, in tokens")
    add("--num-blocks", type=_positive, help="KV blocks of 16 tokens; by default the maximum in every slot")
    add("--request-rate", type=_rate, help="Poisson arrivals a second; by default all requests at once")
    hf_help = "also time transformers' generate, one request at a time: all requests, or the first N"
    add("--hf", nargs="?", type=_positive, const=sys.maxsize, metavar="N", help=hf_help)
    add("--json", metavar="FILE", help="write everything measured to a file, or to the standard output: -")
    add("--plot", type=Path, metavar="FILE.html", help="write a picture")
    args = parser.parse_args(argv)
    args.modes = list(dict.fromkeys(mode for part in args.modes for mode in part.split(",")))
    if unknown := [mode for mode in args.modes if mode not in MODES]:
        parser.error(f"argument --modes: unknown mode {unknown[0]!r}; choose from {', '.join(MODES)}")
    if args.plot and args.plot.suffix != ".html":
        parser.error(
            f"argument --plot: the picture is a web page, so its name ends in .html, not {args.plot.name!r}"
        )
    for file in (args.plot, args.json and args.json != "-" and Path(args.json)):
        if file and not file.parent.is_dir():  # said now, not after minutes of measuring
            parser.error(f"there is no folder {str(file.parent)!r} to write {file.name!r} to")
    return args


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _rate(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return number


def main(argv: list[str] | None = None) -> int:
    """Measure and report. Returns the exit code."""
    args = parse_args(argv)
    try:
        arms, facts = measure(args)
    except (InvalidRun, ValueError) as error:
        print(f"benchmark.py: no valid result: {error}", file=sys.stderr)
        return 1
    out = sys.stderr if args.json == "-" else sys.stdout
    print(summary(arms, facts), file=out)
    if args.json == "-":
        print(report.as_json(arms, facts))
    elif args.json:
        Path(args.json).write_text(report.as_json(arms, facts) + "\n")
    if args.plot:
        report.plot(arms, f"{facts['model']}, {facts['dtype']}: {facts['work']}", args.plot)
    return 0


def measure(args: argparse.Namespace) -> tuple[list[Arm], dict]:
    """Load the model once and run every contender. Raises InvalidRun or ValueError if one cannot."""
    num_blocks = args.num_blocks or args.max_num_seqs * -(-args.max_model_len // 16)
    started = time.monotonic()
    with tqdm(total=1.0, desc="load", bar_format="{desc}: {bar} {elapsed}", leave=False, disable=None) as bar:

        def show(stage: str, fraction: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(fraction - bar.n)

        llm = LLM(
            args.model,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            progress=show,
        )
    load_seconds = time.monotonic() - started
    info = llm.engine.info
    work = build_workload(args.requests, args.request_rate, min(W96_LARGEST_TOKEN, len(llm.tokenizer) - 1))
    check_fits(llm.engine, work)

    arms = []
    for mode in args.modes:
        with _bar(mode, num_output_tokens(work)) as bar:
            arms.append(run_mode(llm.engine, mode, work, progress=bar.update))
    if args.hf:
        part = work[: args.hf]
        with _bar("transformers", num_output_tokens(part)) as bar:
            arms.append(run_transformers(llm.model_path, info.dtype, info.device, part, progress=bar.update))
    facts = {
        "model": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "work": describe_work(work),
        "max_num_seqs": info.max_num_seqs,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "context_limit": info.context_limit,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "load_seconds": load_seconds,
        "weight_bytes": report.weight_bytes(llm.model_path, info.dtype),
        "read_gb_per_second": report.read_bandwidth(info.device),
        "hardware": report.hardware() | {"transformers": version("transformers")},
    }
    return arms, facts


def _bar(name: str, total: int) -> tqdm:
    """A progress bar in output tokens; none where the output is no terminal."""
    return tqdm(total=total, desc=name, unit=" tok", leave=False, disable=None, dynamic_ncols=True)


def summary(arms: list[Arm], facts: dict) -> str:
    """All that is printed: the setting, the table, what it comes to."""
    machine = facts["hardware"]
    slots, blocks, limit = facts["max_num_seqs"], facts["num_blocks"], facts["context_limit"]
    reserve = blocks // -(-limit // facts["block_size"])
    room = (
        f"all {slots} slots can reserve the {limit}-token maximum, so memory holds no mode back"
        if reserve >= slots
        else f"only {reserve} of {slots} slots can reserve the {limit}-token maximum"
    )
    lines = [
        f"{facts['model']}, {facts['dtype']}, greedy, prefix cache off",
        facts["work"],
        f"{slots} slots; {blocks} KV blocks of {facts['block_size']} tokens: {room}",
        f"{machine.get('gpu') or machine['cpu']}, {machine['cores']} cores ({machine['threads']} threads), "
        f"{', '.join(machine['isa']) or 'no wide vectors'}, {machine['ram_gib']} GiB, "
        f"reads memory at {facts['read_gb_per_second']:.0f} GB/s",
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}",
        f"not timed: loading {facts['load_seconds']:.1f} s, warming up "
        + ", ".join(f"{arm.name} {arm.set_up_seconds:.1f} s" for arm in arms),
        "",
        report.table(arms, facts["weight_bytes"]),
        "",
        report.LEGEND,
        "",
        *_headlines(arms),
    ]
    return "\n".join(lines).rstrip()


def _headlines(arms: list[Arm]) -> list[str]:
    """Speed-ups in words, or why there are none."""
    by_name = {arm.name: arm for arm in arms}
    lines = []
    for name, base_name in (("continuous", "naive"), ("continuous", "transformers")):
        arm, base = by_name.get(name), by_name.get(base_name)
        if arm is None or base is None:
            continue
        if reason := why_unfair(arm, base):
            lines.append(f"No speed-up over {base_name}: {reason}.")
        else:
            part = (
                f" (estimated from {len(base.work)} of {len(arm.work)} requests)"
                if is_estimate(arm, base)
                else ""
            )
            lines.append(f"Speed-up of {name} over {base_name}: {report.speed_up(arm, base)}{part}.")
    lines += [
        f"{arm.name} preempted {arm.usage.num_preemptions} times for lack of blocks."
        for arm in arms
        if arm.usage and arm.usage.num_preemptions
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
