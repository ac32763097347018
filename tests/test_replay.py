"""The page of a recorded run: one file, opened from a disk, without a server or a network."""

from __future__ import annotations

import re

import pytest

from assets.replay_space import build
from docs.runs import batching, preemption
from engine.trace import write_trace
from tests.support import tiny_loaded
from tests.test_page_browser import browser  # noqa: F401 -- a fixture
from visualizer.replay import main


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Real runs of the tiny model, as files."""
    folder = tmp_path_factory.mktemp("traces")
    for run in (batching, preemption):
        for name, trace in run(tiny_loaded()).traces.items():
            write_trace(trace, folder / f"{name}.jsonl")
    return folder


@pytest.fixture
def opened(browser, tmp_path):  # noqa: F811
    """Opens a file; whatever it asks the network for, or complains of, is in `said`."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: message.type == "error" and said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: re.match("file:|data:|blob:", r.url) or said.append(r.url))

    def open_file(file):
        page.goto(file.as_uri())
        page.wait_for_selector(".glass-playback")
        return page, said

    yield open_file
    context.close()


def drawn(page) -> str:
    """The first canvas, once what was asked for is on it: panels draw on the next animation frame."""
    return page.evaluate(
        """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(
            () => done(document.querySelector(".glass-lane canvas").toDataURL()))))"""
    )


@pytest.mark.browser
def test_two_runs_side_by_side_are_scrubbed(recorded, opened, tmp_path):
    file = tmp_path / "page.html"
    traces = [str(recorded / f"{mode}.jsonl") for mode in ("static", "continuous")]
    assert main([*traces, "-o", str(file), "--title", "<img src=x onerror=alert(1)>"]) == 0
    assert file.stat().st_size < 1_000_000
    page, said = opened(file)
    assert page.inner_text("h1") == "<img src=x onerror=alert(1)>" and page.locator("img").count() == 0
    assert page.locator(".glass-lane").count() == 2
    heads = page.locator(".glass-lane > .glass-heading .glass-figure")
    page.click("[aria-label='To the end']")
    assert all("217 tokens" in text and "finished" in text for text in heads.all_inner_texts())
    last = drawn(page)
    page.click("[aria-label='To the start']")
    first = drawn(page)
    scrubber = page.locator(".glass-transport input[type=range]")
    scrubber.fill(scrubber.get_attribute("max"))
    assert first != last and drawn(page) == last
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert said == []


@pytest.mark.browser
def test_one_run_has_all_panels_and_keys(recorded, opened, tmp_path):
    file = tmp_path / "page.html"
    assert main([str(recorded / "preemption.jsonl"), "-o", str(file)]) == 0
    page, said = opened(file)
    titles = page.locator(".glass-playback h2").all_inner_texts()
    assert titles == ["Slots over time", "KV block pool", "Anatomy of a step"]
    page.click("[aria-label='To the start']")
    page.focus(".glass-playback")
    when = page.inner_text(".glass-when")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".glass-when") != when
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".glass-when") == when
    page.keyboard.press("Space")
    page.wait_for_function(f"document.querySelector('.glass-when').innerText !== {when!r}")
    assert said == []


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "trace"), ("nonsense\n", "line 1"), ('{"glass_trace": 99}\n', "line 1"), (None, "No such file")],
)
def test_what_is_no_trace_is_said(content, message, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    if content is not None:
        file.write_text(content)
    assert main([str(file), "-o", str(tmp_path / "out.html")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.browser
def test_a_static_site_of_recordings(opened, tmp_path):
    pages = build(tmp_path / "site")
    assert "sdk: static" in (tmp_path / "site/README.md").read_text()
    index = (tmp_path / "site/index.html").read_text()
    for page in pages:
        assert f'href="{page.name}"' in index and page.stat().st_size < 1_000_000
    page, said = opened(pages[0])
    assert page.locator(".glass-lane").count() == 1 and said == []
