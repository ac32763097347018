"""Race, traces and sandbox on the page, in a real Chromium."""

from __future__ import annotations

import json
import re

import pytest

from tests.test_page_browser import browser, tiny, visit  # noqa: F401 -- fixtures

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
    page.locator("dialog [aria-label='To the end']").click()
    assert "finished at" in page.inner_text(".glass-lane > .glass-heading .glass-figure")

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
    seen.send("step by step")
    seen.wait_for_cards(1, "waiting")
    for step in (1, 2, 3):
        page.click("text=1 step")
        page.wait_for_function(f"window.glassStore.newest.step === {step}")
    seen.wait_for_cards(1, "decode")
    assert host.live.runner.stats().step == before  # the engine that everybody shares did nothing
    page.click(".glass-sandbox >> text=Run")
    seen.wait_for_cards(1, "finished")
    page.click(".glass-sandbox >> text=Close")
    page.wait_for_selector(".glass-sandbox", state="hidden")
    page.wait_for_function("document.querySelector('.glass-pill').innerText.startsWith('LIVE')")
    assert page.evaluate("window.glassStore.info.max_num_seqs") == 8
    assert seen.errors == []
