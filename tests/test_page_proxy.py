"""The page behind a reverse proxy that shows it under a path of its own, as hosts and schools do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from app import open_port
from tests.support import tiny_llm
from tests.test_page_browser import SLOW, browser  # noqa: F401 - a fixture
from visualizer import EngineHost, build_app

pytestmark = pytest.mark.browser

PREFIX = "/some/where"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade"}


def reverse_proxy(port: int) -> Starlette:
    """Forwards what lies under PREFIX, without it, to a port of this machine; all else is not there."""
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)

    async def forward(request: Request) -> Response:
        headers = [(k, v) for k, v in request.headers.items() if k not in HOP_BY_HOP]
        headers += [("x-forwarded-host", request.headers["host"]), ("x-forwarded-proto", "http")]
        headers += [("x-forwarded-for", "203.0.113.7")]
        path = request.url.path.removeprefix(PREFIX) or "/"
        address = httpx.URL(path=path, query=request.url.query.encode())
        outgoing = client.build_request(
            request.method, address, headers=headers, content=await request.body()
        )
        answer = await client.send(outgoing, stream=True)
        kept = {k: v for k, v in answer.headers.items() if k not in HOP_BY_HOP}
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose)
        )

    return Starlette(routes=[Route(PREFIX + "{rest:path}", forward, methods=["GET", "POST", "HEAD"])])


@contextlib.contextmanager
def serving(app) -> Iterator[int]:
    sock = open_port("127.0.0.1", 0)
    # "critical": streams that are cut when it stops are no error.
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


@pytest.fixture(scope="module")
def site():
    """(host, the address of the page behind the proxy)."""
    host = EngineHost.of(tiny_llm(block_size=16, num_blocks=128, max_model_len=512, max_num_seqs=8))
    with serving(build_app(host, root_path=PREFIX)) as port, serving(reverse_proxy(port)) as outside:
        yield host, f"http://127.0.0.1:{outside}{PREFIX}/"
    host.close()


def complaint(message) -> str:
    return f"{message.text} ({message.location.get('url')})"


def wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_twenty_loads_behind_a_proxy_and_the_page_is_usable(browser, site):  # noqa: F811
    host, address = site
    errors: list[str] = []
    asked: list[str] = []
    contexts = []
    for _ in range(20):
        # A visitor each: one browser opens six connections to a site at most, and each page holds one.
        contexts.append(browser.new_context(viewport={"width": 400, "height": 600}))
        page = contexts[-1].new_page()
        page.set_default_timeout(SLOW)
        page.on("console", lambda message: message.type == "error" and errors.append(complaint(message)))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector(".glass-pill[data-state=ready]")
        if len(contexts) > 3:  # a few stay
            contexts.pop(0).close()
    # The last page can be used like any other.
    page.fill("#glass-prompt textarea", "hello")
    page.press("#glass-prompt textarea", "Enter")
    page.wait_for_selector(".glass-card[data-state=decode], .glass-card[data-state=finished]")
    page.click("#glass-mode label:has-text('static')")
    wait_for(lambda: host.live.runner.stats().mode == "static")
    page.click("#glass-stop-all")
    page.wait_for_selector(".glass-card[data-state=finished]")
    status = httpx.get(f"{address}gradio_api/queue/status").json()
    assert status["queue_size"] == 0
    outside = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert outside == [], "the page asks for things that are not behind the proxy"
    # Before the page can name its icon, a browser asks for one at the root, which is not ours.
    assert [error for error in errors if not error.endswith("/favicon.ico)")] == []
    for context in contexts:
        context.close()
    wait_for(lambda: not host.live.visitors._by_session)  # the closed pages are gone from the books
