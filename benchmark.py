"""Measure the engine: `python benchmark.py` compares its three modes on one loaded model.

The work is W96: 96 requests of random tokens with ragged lengths, all submitted at once, greedy, end of text
ignored, prefix cache off. Throughput is output tokens over the time from the first submission to the last
token, prefill included; prompt tokens never count. Every mode gets the same requests, weights, kernels, slots
and blocks, and the pool is large enough for every slot to reserve its maximum, so nothing but the scheduling
policy differs. A request that fails or comes out short makes the whole benchmark invalid.

    --hf, --peers   also give the work to other engines, each in a process of its own
    --load          instead: latency when requests arrive at random, at rising rates
    --scale         instead: what a token costs with more requests, longer contexts, a longer queue

The parts are in `bench/`: `workload` (what is asked), `runs` (this engine doing it), `peers/` (others doing
it), `measures` (what is counted), `compare`, `load` and `scale` (the three kinds), `report` and `machine`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any, get_args

from bench.agreement import measure_agreement
from bench.compare import PeerRun, compare
from bench.load import Slo, measure_load
from bench.machine import hardware, read_bandwidth, weight_bytes
from bench.measures import InvalidRun
from bench.peers.launch import PEERS, SINGLE, is_installed
from bench.progress import fraction_bar
from bench.report import Report
from bench.scale import PARTS, measure_scale
from bench.workload import W96_LARGEST_TOKEN, W96_REQUESTS, build_workload, describe_work
from engine import LLM
from engine.config import Dtype, KernelsName, Quantization
from engine.events import Mode
from engine.model import LoadedModel, load_model
from engine.model.loader import packaged_gguf

MODES: tuple[Mode, ...] = get_args(Mode)
LOAD_MODES: tuple[Mode, ...] = ("static", "continuous")  # naive mode would take hours to answer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare naive, static and continuous batching on one loaded model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="auto", help="folder, GGUF file, Hub id or auto")
    add("--dtype", default="auto", choices=get_args(Dtype))
    add("--quantization", choices=get_args(Quantization), help="8-bit weights on a CPU")
    add("--kernels", default="auto", choices=get_args(KernelsName), help="ours in C++, or PyTorch's alone")
    add(
        "--modes",
        nargs="+",
        metavar="MODE",
        help=f"some of {', '.join(MODES)}; by default all, or with --load {' and '.join(LOAD_MODES)}",
    )
    add("--requests", type=_positive, default=W96_REQUESTS, help="requests of the workload")
    add("--max-num-seqs", type=_positive, default=32, help="slots")
    add("--max-model-len", type=_positive, default=512, help="what naive and static reserve, in tokens")
    add("--num-blocks", type=_positive, help="KV blocks of 16 tokens; by default the maximum in every slot")
    add("--request-rate", type=_above_zero, help="Poisson arrivals a second; by default all requests at once")
    hf_help = "also time transformers' generate, one request at a time: all requests, or the first N"
    add("--hf", nargs="?", type=_positive, const=sys.maxsize, metavar="N", help=hf_help)
    peers_help = f"also time other engines: some of {', '.join(PEERS)}; all if none is named"
    add("--peers", nargs="*", metavar="NAME", help=peers_help)
    python_help = "the Python of an environment in which a peer is installed; may be given several times"
    add("--peer-python", action="append", default=[], metavar="NAME=PATH", help=python_help)
    add("--peer-timeout", type=_above_zero, default=900.0, help="seconds for a peer to load and run")
    add("--load", action="store_true", help="measure latency under load instead")
    add("--rates", nargs="+", type=_above_zero, default=[], metavar="R", help="for --load: arrivals a second")
    add("--slo-ttft", type=_above_zero, default=1.0, help="for --load: seconds promised to the first token")
    add("--slo-gap", type=_above_zero, default=0.2, help="for --load: mean seconds promised between tokens")
    scale_help = f"measure how cost grows instead: some of {', '.join(PARTS)}; all if none is named"
    add("--scale", nargs="*", metavar="PART", help=scale_help)
    agreement_help = "count instead how often the next token is the one that float32 chooses"
    add("--agreement", action="store_true", help=agreement_help)
    add("--json", metavar="FILE", help="write everything measured to a file, or to the standard output: -")
    add("--plot", type=Path, metavar="FILE.html", help="write a picture")
    args = parser.parse_args(argv)
    args.modes = _choose(parser, "--modes", args.modes, MODES, LOAD_MODES if args.load else MODES)
    args.peers = _choose(parser, "--peers", args.peers, tuple(PEERS))
    args.scale = _choose(parser, "--scale", args.scale, PARTS)
    args.peer_python = _read_pythons(parser, args.peer_python)
    _check_together(parser, args)
    if args.plot and args.plot.suffix != ".html":
        parser.error(
            f"argument --plot: the picture is a web page, so its name ends in .html, not {args.plot.name!r}"
        )
    for file in (args.plot, args.json and args.json != "-" and Path(args.json)):
        if file and file.is_dir():  # said now, not after minutes of measuring
            parser.error(f"{str(file)!r} is a folder: name a file in it")
        if file and not file.parent.is_dir():
            parser.error(f"there is no folder {str(file.parent)!r} to write {file.name!r} to")
    return args


def _choose(
    parser: argparse.ArgumentParser,
    option: str,
    given: list[str] | None,
    choices: tuple[str, ...],
    default: tuple[str, ...] = (),
) -> list[str]:
    """The names given, by spaces or commas; all choices if the option came bare, `default` without it."""
    if given is None:
        return list(default)
    names = list(dict.fromkeys(name for part in given for name in part.split(",")))
    if unknown := [name for name in names if name not in choices]:
        kind = option.strip("-").removesuffix("s")
        parser.error(f"argument {option}: unknown {kind} {unknown[0]!r}; choose from {', '.join(choices)}")
    return names or list(choices)


def _read_pythons(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, str]:
    pythons = {}
    for pair in given:
        name, _, path = pair.partition("=")
        if name not in PEERS:
            parser.error(f"argument --peer-python: unknown peer {name!r}; choose from {', '.join(PEERS)}")
        if not (found := shutil.which(path)):
            parser.error(f"argument --peer-python: {path!r} is no program that can be run")
        pythons[name] = str(Path(found).absolute())
    return pythons


def _check_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    kinds = [name for name in ("load", "scale", "agreement") if getattr(args, name)]
    if len(kinds) > 1:
        parser.error(f"--{kinds[0]} and --{kinds[1]} are two benchmarks: run one after the other")
    if kinds and (args.hf or args.peers):
        parser.error(f"--hf and --peers belong to the comparison, not to --{kinds[0]}")
    if args.agreement and args.plot:
        parser.error("--agreement is one figure, and no picture")
    if args.load and args.request_rate:
        parser.error("--load takes --rates instead of --request-rate")
    if args.peers and args.request_rate:
        parser.error("--peers get all requests at once, so --request-rate would give them other work")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _above_zero(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return number


def main(argv: list[str] | None = None) -> int:
    """Measure and report. Returns the exit code: 1 if anything that was asked for has no valid figure."""
    args = parse_args(argv)
    try:
        result = measure(args)
    except (InvalidRun, ValueError) as error:
        print(f"benchmark.py: no valid result: {error}", file=sys.stderr)
        return 1
    print(result.text, file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(result.as_json())
    elif args.json:
        Path(args.json).write_text(result.as_json() + "\n")
    if args.plot:
        result.figure().write_html(args.plot, include_plotlyjs=True)
    return 1 if result.problems else 0


def measure(args: argparse.Namespace) -> Report:
    """Load the model once and measure what was asked for. Raises InvalidRun or ValueError if it cannot."""
    peers, missing = _find_peers(args)
    for name in missing:  # said now too, not only after minutes of measuring
        print(f"not installed, so not timed: {name}", file=sys.stderr)
    started = time.monotonic()
    with fraction_bar("load") as bar:

        def show(stage: str, fraction: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(fraction - bar.n)

        loaded = load_model(
            args.model, dtype=args.dtype, quantization=args.quantization, kernels=args.kernels, progress=show
        )
    load_seconds = time.monotonic() - started
    if args.agreement:
        return measure_agreement(loaded, _facts(loaded, load_seconds))
    largest_token = min(W96_LARGEST_TOKEN, len(loaded.tokenizer) - 1)
    facts = _facts(loaded, load_seconds)
    if args.scale:
        return measure_scale(loaded, args.scale, args.max_num_seqs, facts, largest_token)
    llm = LLM.from_loaded(
        loaded,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        num_blocks=args.num_blocks or args.max_num_seqs * -(-args.max_model_len // 16),
        enable_prefix_caching=False,
    )
    facts |= {key: value for key, value in llm.engine.info._asdict().items() if key not in facts}
    if args.load:
        slo = Slo(args.slo_ttft, args.slo_gap)
        return measure_load(llm.engine, args.modes, args.requests, args.rates, slo, facts, largest_token)
    work = build_workload(args.requests, args.request_rate, largest_token)
    gguf = packaged_gguf() if args.model == "auto" else Path(args.model)
    return compare(
        llm,
        args.modes,
        work,
        facts | {"work": describe_work(work), "not_installed": missing},
        peers,
        gguf if gguf and gguf.suffix == ".gguf" else None,
    )


def _find_peers(args: argparse.Namespace) -> tuple[list[PeerRun], dict[str, str]]:
    """The peers to run, and the way to get each of those that are not installed."""
    runs, missing = [], {}
    if args.hf:
        runs.append(PeerRun("transformers", SINGLE, sys.executable, args.hf, args.peer_timeout))
    for name in args.peers:
        spec, python = PEERS[name], args.peer_python.get(name, sys.executable)
        if is_installed(spec, python):
            runs.append(PeerRun(name, spec, python, sys.maxsize, args.peer_timeout))
        else:
            missing[name] = spec.install
    return runs, missing


def _facts(loaded: LoadedModel, load_seconds: float) -> dict[str, Any]:
    dtype = str(loaded.dtype).removeprefix("torch.")
    return {
        "model": loaded.name,
        "dtype": dtype,
        "kernels": loaded.kernels,
        "device": loaded.device.type,
        "load_seconds": load_seconds,
        "weight_bytes": weight_bytes(loaded.path, loaded.weights),
        "read_gb_per_second": read_bandwidth(loaded.device.type),
        "hardware": hardware(),
    }


if __name__ == "__main__":
    sys.exit(main())
