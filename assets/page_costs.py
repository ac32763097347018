"""Measure what the page costs: `make page-costs`. Nothing else should run meanwhile.

An engine with 32 slots and 1,024 blocks works without pause. In turns, nobody watches and 20 viewers poll
as often as pages do; then a browser watches. Prints the rows of the table in docs/visualizer.md.
"""

from __future__ import annotations

import heapq
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import uvicorn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from app import open_port
from engine import LLM, SamplingParams
from visualizer import EngineHost, build_app

VIEWERS = 20
WINDOW = 6.0  # seconds of a turn
TURNS = 20
UPDATES = 3000
SERVER = "page-server"  # the thread that answers
POLL = "/gradio_api/glass/poll"


def viewers(port: int, tokens: list[str]) -> None:
    """Poll as pages with these tokens do, in a process of its own, until killed.

    Real viewers have machines of their own. So this one is last in line for a processor and does as little as
    it can: `http.client` and reading the frames cost it six times as much, and the engine four times.
    """
    os.nice(19)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    due = [(time.monotonic() + number / 100, token, "null") for number, token in enumerate(tokens)]
    while True:
        at, token, cursor = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        body = f'{{"token": "{token}", "source": "live", "cursor": {cursor}, "have": {{}}}}'
        head = f"POST {POLL} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"{head}{body}".encode())
        head, answer = receive(connection)
        if not head.startswith("HTTP/1.1 200 "):
            sys.exit(f"The server answered a poll with {head.splitlines()[0]}.")
        cursor = found(r'"cursor":("[^"]*")', answer)
        heapq.heappush(due, (time.monotonic() + float(found(r'"pace":([\d.]+)', answer)), token, cursor))


def receive(connection: socket.socket) -> tuple[str, str]:
    """The head and the body of one answer."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 20)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(found(r"(?i)content-length: (\d+)", head.decode()))
    while len(body) < length:
        body += connection.recv(1 << 20)
    return head.decode(), body.decode()


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text) or sys.exit(f"no {pattern} in {text[:200]}")
    return match[1]


def come(host: EngineHost, port: int) -> subprocess.Popen:
    """Let so many viewers come, each a visitor of its own."""
    assert host.live is not None
    tokens = [host.live.visitors.open(f"viewer {number}") for number in range(VIEWERS)]
    return subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "viewers", str(port), *tokens])


def keep_busy(host: EngineHost, busy: list[int]) -> None:
    """Let busy[0] requests run at any time, each of 200 tokens."""
    assert host.live is not None
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    number = 0
    running: list = []
    while True:
        running = [handle for handle in running if not handle.finished]
        while len(running) < busy[0]:
            running.append(host.live.runner.submit([100 + number % 20_000] * 64, params))
            number += 1
        time.sleep(0.1)


def serving_seconds() -> float:
    """Processor time of the threads that serve the page, so far."""
    ids = {
        thread.native_id
        for thread in threading.enumerate()
        if thread.name in (SERVER, "glass-feed") or thread.name.startswith("AnyIO")
    }
    return sum(times.user_time + times.system_time for times in psutil.Process().threads() if times.id in ids)


def rate(host: EngineHost, seconds: float) -> tuple[float, float]:
    """Output tokens a second, and the share of a core that serving takes, over some time."""
    assert host.live is not None
    runner = host.live.runner

    def now() -> tuple[float, float, float]:
        return runner.stats().num_output_tokens, serving_seconds(), time.monotonic()

    tokens, cpu, start = now()
    time.sleep(seconds)
    tokens_after, cpu_after, end = now()
    return (tokens_after - tokens) / (end - start), (cpu_after - cpu) / (end - start)


def say(what: str, figure: str) -> None:
    print(f"| {what} | {figure} |", flush=True)


def browse(port: int, busy: list[int]) -> None:
    """Say what a browser's page costs its main thread and its memory."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed.")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--js-flags=--expose-gc"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(".glass-pill[data-state=ready]")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def metrics() -> dict[str, float]:
            return {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}

        def heap() -> float:
            page.evaluate("gc()")
            return metrics()["JSHeapUsedSize"] / 1e6

        def let_pass(updates: int) -> None:
            end = page.evaluate("window.glassStore.newest.version") + updates
            while page.evaluate("window.glassStore.newest.version") < end:
                page.wait_for_timeout(1000)

        page.wait_for_timeout(8000)
        before, start = metrics(), time.monotonic()
        page.wait_for_timeout(20_000)
        after, elapsed = metrics(), time.monotonic() - start
        share = [(after[name] - before[name]) / elapsed for name in ("TaskDuration", "ScriptDuration")]
        say("page: main thread busy, drawing in software included", f"{share[0]:.0%} of a core")
        say("page: of that, scripts", f"{share[1]:.0%} of a core")
        busy[0] = 1  # for more updates a second
        let_pass(page.evaluate("window.glassStore.history.most") + 100)  # the past that it keeps is full now
        first = heap()
        let_pass(UPDATES)
        last = heap()
        browser.close()
    say(f"page: JavaScript heap, before and after {UPDATES:,} updates", f"{first:.1f} MB, {last:.1f} MB")


def main() -> None:
    if sys.argv[1:2] == ["viewers"]:
        viewers(int(sys.argv[2]), sys.argv[3:])
    llm = LLM("auto", num_blocks=1024, max_num_seqs=32, max_model_len=512, enable_prefix_caching=False)
    host = EngineHost.of(llm)
    sock = open_port("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(build_app(host), log_level="error"))
    threading.Thread(target=server.run, name=SERVER, kwargs={"sockets": [sock]}, daemon=True).start()
    busy = [32]
    threading.Thread(target=keep_busy, args=(host, busy), daemon=True).start()
    time.sleep(2 * WINDOW)  # warm
    alone, watched, viewing = [], [], []
    for _ in range(TURNS):
        alone.append(rate(host, WINDOW))
        crowd = come(host, port)
        time.sleep(5.0)  # until the pages have found their pace
        before = sum(psutil.Process(crowd.pid).cpu_times()[:2])
        watched.append(rate(host, WINDOW))
        viewing.append((sum(psutil.Process(crowd.pid).cpu_times()[:2]) - before) / WINDOW)
        crowd.kill()
        crowd.wait()
    # The machine may be slower in one minute than in the next: only neighbouring turns are compared.
    change = statistics.median(
        with_[0] / without[0] - 1 for without, with_ in zip(alone, watched, strict=True)
    )
    (rate_alone, serving_alone), (rate_watched, serving_watched) = (
        [statistics.median(column) for column in zip(*runs, strict=True)] for runs in (alone, watched)
    )
    many = f"{VIEWERS} viewers, each polling every {host.live.visitors.pace * 1000:.0f} ms"
    say("engine, nobody watching", f"{rate_alone:.0f} tok/s")
    say(f"engine, {many}", f"{rate_watched:.0f} tok/s ({change:+.1%})")
    say("making frames, nobody watching", f"{serving_alone:.1%} of a core")
    say(f"making frames and serving {many}", f"{serving_watched:.1%} of a core")
    say("asking, the viewers' own process", f"{statistics.median(viewing):.1%} of a core")
    browse(port, busy)
    os._exit(0)  # the server's threads need no farewell


if __name__ == "__main__":
    main()
