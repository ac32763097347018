"""What every peer's process does: read a job, load, warm up, run, write what came of it.

Only the standard library is used here: the environment is the peer's, and may lack everything else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

now = time.perf_counter


@dataclass
class Item:
    """One request: token ids, how many to generate, when it arrives (seconds after the first)."""

    prompt: list[int]
    num_output: int
    due: float = 0.0


@dataclass
class Answer:
    """What came of a request: the prompt's length as the peer saw it, and when each token was there."""

    num_prompt: int
    times: list[float] = field(default_factory=list)


@dataclass
class Job:
    """What a peer is asked to do.

    model_path: a folder for `from_pretrained`. gguf: the GGUF file it was made from, if any.
    max_num_seqs: most requests at once. max_model_len: tokens of the longest request allowed.
    """

    model_path: str
    gguf: str | None
    dtype: str
    device: str
    threads: int
    max_num_seqs: int
    max_model_len: int
    items: list[Item]
    warm_up: list[Item]

    @classmethod
    def read(cls, file: Path) -> Job:
        fields = json.loads(file.read_text())
        for name in ("items", "warm_up"):
            fields[name] = [Item(**item) for item in fields[name]]
        return cls(**fields)


class Peer(Protocol):
    """An engine, loaded. The attributes say how it really runs, not how it was asked to."""

    dtype: str
    weights: str  # how they are stored: a dtype, or a kind of quantisation
    threads: int
    software: str  # names and versions

    def run(self, items: Sequence[Item]) -> list[Answer]:
        """Answer all items greedily, end tokens ignored, no prefix shared; answers in the same order."""
        ...


def main(load: Callable[[Job], Peer]) -> None:
    """`python -m bench.peers.NAME JOB.json RESULT.json PARENT_PID`. An error is a result too."""
    job_file, result_file = map(Path, sys.argv[1:3])
    threading.Thread(target=_die_with, args=(int(sys.argv[3]),), daemon=True).start()
    try:
        result = measure(Job.read(job_file), load)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    draft = result_file.with_suffix(".draft")
    draft.write_text(json.dumps(result))
    draft.rename(result_file)  # whoever sees the file sees all of it


def _die_with(parent: int) -> None:
    """End this process and all that it started once the benchmark is gone, however that went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def measure(job: Job, load: Callable[[Job], Peer]) -> dict:
    """Load, warm up and run, timed apart. Token times count from each request's arrival."""
    started = now()
    peer = load(job)
    loaded = now()
    peer.run(job.warm_up)
    start = now()
    answers = peer.run(job.items)
    seconds = now() - start
    return {
        "dtype": peer.dtype,
        "weights": peer.weights,
        "threads": peer.threads,
        "software": peer.software,
        "load_seconds": loaded - started,
        "warm_up_seconds": start - loaded,
        "seconds": seconds,
        "num_prompt": [answer.num_prompt for answer in answers],
        "token_times": [
            [at - start - item.due for at in answer.times]
            for item, answer in zip(job.items, answers, strict=True)
        ],
    }
