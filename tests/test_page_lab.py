"""Race, traces and sandbox on the page, in a real Chromium."""

from __future__ import annotations

import json
import re

import pytest

from engine.trace import parse_trace
from tests.test_page_browser import browser, tiny, visit  # noqa: F401 -- fixtures
from visualizer.summary import summarise

pytestmark = pytest.mark.browser


def test_a_race_is_run_played_and_scrubbed(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    page = seen.page
    page.click("text=Race")
    dialog = page.locator("dialog")
    dialog.locator("label", has_text="Requests").locator("select").select_option("8")
    page.click("text=Start the race")
    page.wait_for_selector(".glass-playback")
    assert page.evaluate("document.activeElement.className") == "glass-playback"  # keys play it at once
    assert re.search(r"(naive|continuous) is [\d.]+ times faster", page.inner_text(".glass-verdict"))
    assert page.locator(".glass-lane").count() == 2
    lanes = page.locator(".glass-lane .glass-figure >> nth=0")
    dialog.locator("[aria-label='To the end']").click()
    ends = page.locator(".glass-lane > .glass-heading .glass-figure").all_inner_texts()
    assert all("finished at" in text for text in ends)
    assert len({re.match(r"[\d\s]+tokens", text)[0] for text in ends}) == 1  # equal work in both
    dialog.locator("[aria-label='To the start']").click()
    assert "0 tokens" in lanes.first.inner_text()
    for _ in range(4):
        dialog.locator("[aria-label^='One step on']").click()
    assert "finished" not in lanes.first.inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert seen.errors == []


def test_a_trace_goes_out_and_comes_back(tiny, visit, tmp_path):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    page = seen.page
    seen.send("to be recorded")
    seen.wait_for_cards(1, "finished")
    page.click("text=Trace")
    with page.expect_download() as download:
        page.click("text=Save the last steps")
    recorded = tmp_path / "trace.jsonl"
    download.value.save_as(recorded)
    assert "to be recorded" not in recorded.read_text()
    with page.expect_download() as download:
        page.click("text=Save for Perfetto")
    chrome = tmp_path / "chrome.json"
    download.value.save_as(chrome)
    assert json.loads(chrome.read_text())["traceEvents"]

    page.set_input_files("dialog input[type=file]", recorded)
    page.wait_for_selector(".glass-playback")
    trace = parse_trace(recorded.read_bytes())
    summary = summarise(trace)
    said = page.inner_text("dialog .glass-sentence >> nth=0").replace("\u2009", "")
    assert f"{summary['steps']} steps, {summary['output_tokens']} output tokens in" in said
    page.locator("dialog [aria-label='To the end']").click()
    counted = page.inner_text(".glass-lane > .glass-heading .glass-figure").replace("\u2009", "")
    assert counted.startswith(f"{summary['output_tokens']} tokens ") and "finished at" in counted
    assert f" {summary['wasted']} slot-steps wasted" in counted
    when = page.locator("dialog .glass-when")
    page.locator("dialog [aria-label='To the start']").click()
    page.locator("dialog .glass-lane canvas").first.focus()
    start = when.inner_text()
    page.keyboard.press("Space")  # also on a picture, where arrow keys walk over its cells
    page.wait_for_function(f"document.querySelector('dialog .glass-when').innerText !== {start!r}")

    lines = recorded.read_text().splitlines()
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join([*lines[:3], lines[3][: len(lines[3]) // 2], *lines[4:]]))
    page.set_input_files("dialog input[type=file]", damaged)
    page.wait_for_function(
        "document.querySelector('dialog').innerText.includes('This trace cannot be shown')"
    )
    assert "4" in page.inner_text("dialog .glass-sentence >> nth=0")
    assert page.locator(".glass-playback").count() == 0
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("<img src=x onerror=alert(1)>")
    page.set_input_files("dialog input[type=file]", foreign)
    page.wait_for_function(
        "document.querySelector('dialog .glass-sentence').innerText.includes('cannot be shown')"
    )
    assert page.locator("dialog img").count() == 0
    assert all("400" in error for error in seen.errors)  # the browser logs refused uploads by itself


def test_a_sandbox_is_paused_stepped_and_left(tiny, visit):  # noqa: F811
    host, port = tiny
    seen = visit(port)
    page = seen.page
    page.click("text=Sandbox")
    page.wait_for_selector(".glass-sandbox:not([hidden])")
    page.wait_for_function("document.querySelector('.glass-pill').innerText.startsWith('SANDBOX')")
    before = host.live.runner.stats().step
    assert page.locator("#glass-throughput .glass-plot").is_hidden()  # it may hold the other engine's curve
    page.locator("#glass-mode input").first.evaluate("(node) => node.focus()")
    assert page.evaluate("document.activeElement.tagName") != "INPUT"  # that mode is everybody's
    seen.send("step by step")
    seen.wait_for_cards(1, "waiting")
    for step in (1, 2, 3):
        page.click("text=1 step")
        page.wait_for_function(f"window.glassStore.newest.step === {step}")
    seen.wait_for_cards(1, "decode")
    assert host.live.runner.stats().step == before  # the engine that everybody shares did nothing
    page.click(".glass-sandbox >> text=Run")
    seen.wait_for_cards(1, "finished")
    page.hover(".glass-card")
    assert page.evaluate("window.glassStore.pointed") == 1
    page.click("text=Trace")
    with page.expect_download() as download:
        page.click("text=Save the last steps")
    assert download.value.suggested_filename == "glass-engine-sandbox.jsonl"
    page.keyboard.press("Escape")
    page.click(".glass-sandbox >> text=Close")
    page.wait_for_selector(".glass-sandbox", state="hidden")
    page.wait_for_function("document.querySelector('.glass-pill').innerText.startsWith('LIVE')")
    assert page.evaluate("window.glassStore.info.max_num_seqs") == 8
    assert not page.evaluate("document.getElementById('glass-mode').inert")
    assert "sandbox" in page.inner_text(".glass-details")
    page.click(".glass-asked")  # number 1 of the shared engine is somebody else's request
    assert page.evaluate("[window.glassStore.pointed, window.glassStore.pinned]") == [None, None]
    assert seen.errors == []


def test_a_dialog_has_its_tooltips_and_escape_leaves_a_cell_first(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    page = seen.page
    page.evaluate(
        """() => {
          window.listening = 0;
          for (const [name, by] of [['addEventListener', 1], ['removeEventListener', -1]]) {
            const original = document[name];
            document[name] = (...rest) => {
              window.listening += by;
              original.apply(document, rest);
            };
          }
        }"""
    )
    page.click("text=Lessons")
    page.wait_for_selector(".glass-lesson .glass-big")
    page.keyboard.press("Space")
    canvas = page.locator("dialog [data-panel=blocks] canvas").first
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 10, "y": 10})
    tooltip = page.locator("dialog .glass-tooltip")  # outside, it would lie under the dialog
    tooltip.filter(has_text="Block 0").wait_for()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert tooltip.is_visible() and page.inner_text("dialog .glass-unseen[role=status]").startswith("Block 1")
    page.keyboard.press("Escape")
    assert not tooltip.is_visible() and page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("window.listening") == 0  # a closed recording hears no keys
    page.locator("#glass-blocks canvas").first.hover(position={"x": 10, "y": 10})
    page.locator("body > .glass-tooltip").wait_for()
    assert seen.errors == []


RUNNING = {"id": "x", "modes": ["naive", "static"], "state": "running", "arm": 0, "done": 1, "total": 9}


def test_an_unseen_page_does_not_ask_how_a_race_goes(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    page = seen.page
    asked: list[str] = []

    def answer(route):
        asked.append(route.request.url)
        route.fulfill(json={"race": RUNNING | {"seconds": len(asked)}})

    page.route(re.compile(r"/glass/race"), answer)
    page.click("text=Race")
    page.click("text=Start the race")
    page.wait_for_function("document.querySelector('dialog').innerText.includes('naive is running: 1 of 9')")
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.wait_for_timeout(600)
    before = len(asked)
    page.wait_for_timeout(1500)
    assert len(asked) == before
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(1000)
    assert len(asked) > before
    page.unroute_all(behavior="wait")
