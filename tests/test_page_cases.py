"""Faults that live charts and shared pages had elsewhere, provoked on ours in a real Chromium.

The numbers are those of the list in tests/README.md.
"""

from __future__ import annotations

import re
import time

import pytest

from engine import SamplingParams
from tests.test_page_browser import browser, tiny, visit  # noqa: F401 -- fixtures

pytestmark = pytest.mark.browser

PICTURES = "#glass-timeline canvas, #glass-blocks canvas, #glass-anatomy canvas, #glass-throughput .main-svg"
SIZES = """(pictures) => [...document.querySelectorAll(pictures)].filter((node) => node.checkVisibility())
  .map((node) => {
    node.mark ??= Math.random();
    return [node.mark, node.getBoundingClientRect().height];
  })"""


def keep_busy(host):
    """Work for far more than the half second with which the throughput chart begins; abort it in the end."""
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    return host.live.runner.submit_all([([40 + number] * 9, params) for number in range(64)])


def test_flicker_and_size_jumps(tiny, visit):  # noqa: F811
    """79: thirty updates on, the same nodes in the same height, and the zoom that was chosen."""
    host, port = tiny
    seen = visit(port, height=1600)
    page = seen.page
    handles = keep_busy(host)
    page.wait_for_selector("#glass-throughput .main-svg", state="attached")
    page.wait_for_function("window.glassStore.columns.length > 30")
    page.focus("#glass-timeline canvas")
    page.keyboard.press("w")
    zoom = "document.querySelector('#glass-timeline .glass-zoom').dataset.zoom"
    assert page.evaluate(zoom) == "1"
    before = page.evaluate(SIZES, PICTURES)
    version = page.evaluate("window.glassStore.newest.version")
    page.wait_for_function(f"window.glassStore.newest.version >= {version + 30}")
    assert page.evaluate(SIZES, PICTURES) == before and len(before) >= 4
    assert page.evaluate(zoom) == "1"
    for handle in handles:
        handle.abort()
    assert seen.errors == []


def test_polls_do_not_pile_up_behind_a_slow_server(tiny, visit):  # noqa: F811
    """80: three times as slow as the page polls; one poll is in flight, and the newest state arrives."""
    _, port = tiny
    seen = visit(port)
    flying, most = [0], [0]

    def slowly(route):
        flying[0] += 1
        most[0] = max(most[0], flying[0])
        seen.page.wait_for_timeout(600)
        route.continue_()
        flying[0] -= 1

    seen.page.route(re.compile("/poll$"), slowly)
    seen.send("hello")
    seen.wait_for_cards(1, "finished")
    assert most[0] == 1
    assert seen.errors == []
    seen.page.unroute_all(behavior="wait")  # a poll that is held back still would fail the next test


def test_long_answers_hold_up_nothing_else(tiny, visit):  # noqa: F811
    """82: six pages with answers under way; one is stopped, and the others are still at it."""
    host, port = tiny
    pages = [visit(port) for _ in range(6)]
    host.live.runner.pause()
    for number, seen in enumerate(pages):
        seen.page.fill("#glass-max-tokens input[type=number]", "400")
        seen.send(f"prompt {number}")
        seen.wait_for_cards(1)
    first, *others = pages
    first.page.click(".glass-stop")  # though not a step is made
    first.wait_for_cards(1, "finished")
    assert "stopped" in first.page.inner_text(".glass-card header")
    assert all(seen.cards("finished") == 0 for seen in others)
    host.live.runner.resume()
    for seen in others:
        seen.wait_for_cards(1, "finished")
    assert all(seen.errors == [] for seen in pages)


def test_visitors_come_and_go_and_nothing_is_left(tiny, visit, browser):  # noqa: F811
    """83: two conversations at once do not cross, and closed pages leave no session behind."""
    host, port = tiny
    visitors = host.live.visitors
    one, two = visit(port), visit(port)
    for turn in range(2):
        one.send(f"one {turn}")
        two.send(f"two {turn}")
    one.wait_for_cards(2, "finished")
    two.wait_for_cards(2, "finished")
    assert all("one" in text for text in one.page.locator(".glass-asked").all_inner_texts())
    assert all("two" in text for text in two.page.locator(".glass-asked").all_inner_texts())
    before = len(visitors._by_token)
    for number in range(3):
        seen = visit(port)
        seen.send(f"passing by {number}")
        seen.wait_for_cards(1)
        seen.close()
    end = time.monotonic() + 20
    while len(visitors._by_token) > before:
        assert time.monotonic() < end, "closed pages are still remembered"
        time.sleep(0.1)


def test_two_browsers_and_thirty_requests_from_python(tiny, visit):  # noqa: F811
    """Everybody is served by one engine, sees all of its work, and reads only their own answers."""
    host, port = tiny
    one, two = visit(port), visit(port)
    runner = host.live.runner
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for number in range(4):
        one.send(f"one {number}")
        two.send(f"two {number}")
    handles = [runner.submit([40 + number] * (5 + number), params) for number in range(30)]
    for seen in (one, two):  # both while it lasts
        seen.page.wait_for_function("window.glassStore.strip.running === 8")
    for seen in (one, two):
        seen.wait_for_cards(4, "finished")
    assert all(handle.result(60).outputs[0].finish_reason == "length" for handle in handles)
    step = runner.stats().step
    pictures = []
    for name, seen in (("one", one), ("two", two)):
        seen.page.wait_for_function(f"window.glassStore.newest.step === {step} && !window.glassStore.busy")
        assert sorted(seen.page.locator(".glass-asked").all_inner_texts()) == [
            f"{name} {n}" for n in range(4)
        ]
        assert all(text.strip() for text in seen.page.locator(".glass-answer").all_inner_texts())
        pictures.append(
            seen.page.evaluate("window.glassStore.picture.blocks.map((b) => [b.state, b.filled])")
        )
        assert seen.errors == []
    assert pictures[0] == pictures[1]


def test_a_chart_fills_its_place_after_the_window_changed(tiny, visit):  # noqa: F811
    """85: made on a wide screen, then hidden, then on a phone."""
    host, port = tiny
    seen = visit(port)
    page = seen.page
    handles = keep_busy(host)
    page.wait_for_selector("#glass-throughput .main-svg", state="attached")
    for handle in handles:
        handle.abort()
    for width in (360, 1000, 360):
        page.set_viewport_size({"width": width, "height": 800})
        page.locator("#glass-throughput").scroll_into_view_if_needed()
        page.wait_for_function(
            "(() => { const frame = document.querySelector('#glass-throughput .glass-plot-frame');"
            "const plot = frame.querySelector('.main-svg');"
            "return Math.abs(frame.clientWidth - plot.getBoundingClientRect().width) < 2; })()"
        )
        for panel in ("timeline", "blocks", "anatomy"):
            page.locator(f"#glass-{panel}").scroll_into_view_if_needed()
            page.wait_for_function(
                f"(() => {{ const frame = document.querySelector('#glass-{panel} .glass-canvas');"
                "const canvas = frame.querySelector('canvas');"
                "return canvas.getBoundingClientRect().width <= frame.clientWidth + 1; })()"
            )
        assert seen.no_sideways_scroll()
    assert seen.errors == []
