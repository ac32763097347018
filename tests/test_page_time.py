"""Time travel in a real Chromium: what is shown of a past moment is what the engine's events say of it."""

from __future__ import annotations

import pytest

from engine.events import Replica, StepEvent
from tests.test_page_browser import browser, tiny, visit  # noqa: F401 -- fixtures

pytestmark = pytest.mark.browser

SHOWN = """() => {
  const { picture, player } = window.glassStore;
  return {
    live: player.live, step: picture.step,
    blocks: picture.blocks.map((block) => [block.state, block.owners.length, block.filled]),
    slots: [...picture.slots.values()].map((one) => [one.slot, one.computed]).sort((a, b) => a[0] - b[0]),
  };
}"""


def truth(events, step: int) -> dict:
    """Blocks and slots after a step, from the engine's own events."""
    replica = Replica(events.keyframe)
    for event in events.events:
        replica.apply(event)
        if isinstance(event, StepEvent) and event.step == step:
            break
    views = [view for view in replica.requests.values() if view.slot is not None]
    return {
        "blocks": [[block.state, len(block.owners), block.filled] for block in replica.blocks],
        "slots": sorted([view.slot, view.num_computed] for view in views),
    }


@pytest.fixture
def busy(tiny, visit):  # noqa: F811
    """A page that saw 32 examples from the first to the last, and the events of that time."""
    host, port = tiny
    seen = visit(port)
    start = host.live.runner.events.read()
    seen.page.click("#glass-all")
    seen.wait_for_cards(32, "finished")
    reading = host.live.runner.events.read(start.cursor)
    seen.page.wait_for_function(
        f"window.glassStore.newest.step === {reading.events[-1].step} && !window.glassStore.busy"
    )
    return seen, start._replace(events=reading.events)


def test_a_moment_travelled_to_is_what_the_engine_held(busy):
    seen, events = busy
    steps = [event.step for event in events.events if isinstance(event, StepEvent)]
    shown = []
    for step in (steps[3], steps[-5], steps[len(steps) // 2], steps[10], steps[11]):
        seen.page.evaluate(
            "(step) => { const { player, history } = window.glassStore;"
            "player.pause();"
            "player.go(history.first + history.frames.findIndex(({ strip }) => strip.step >= step)); }",
            step,
        )
        moment = seen.page.evaluate(SHOWN)
        assert moment["step"] >= step and not moment["live"]
        expected = truth(events, moment["step"])
        assert moment["slots"] == expected["slots"]
        assert moment["blocks"] == expected["blocks"]
        shown.append(moment["step"])
    assert len(set(shown)) > 2
    assert "ago" in seen.page.inner_text(".glass-when")
    assert seen.errors == []


def test_pause_steps_bookmarks_and_the_way_back(busy):
    seen, _ = busy
    page = seen.page
    page.click(".glass-transport >> text=Pause")  # which has the focus now, and leaves the arrows to the page
    page.wait_for_selector(".glass-pill[data-state=past]")
    newest, steps = page.evaluate("window.glassStore.history.last"), [page.evaluate(SHOWN)["step"]]
    for key, by in (("ArrowLeft", 1), ("ArrowLeft", 2), ("ArrowRight", 1)):
        page.keyboard.press(key)
        assert newest - page.evaluate("window.glassStore.player.position") == by
        steps.append(page.evaluate(SHOWN)["step"])
    assert steps[0] > steps[1] > steps[2] and steps[3] == steps[1]
    page.click(".glass-transport [aria-label^=Previous]")
    kinds = page.evaluate(
        "() => { const s = window.glassStore;"
        "return s.history.frame(s.player.position).marks.map((mark) => mark[2]); }"
    )
    assert set(kinds) & {"injected", "preempted", "prefix_hit"}
    at = page.evaluate(SHOWN)["step"]
    page.select_option(".glass-transport select", "4")
    page.click(".glass-transport >> text=Play")
    page.wait_for_function(f"window.glassStore.picture.step > {at + 3}")
    page.keyboard.press("l")
    page.wait_for_selector(".glass-pill[data-state=ready]")
    assert page.evaluate(SHOWN)["live"]
    page.fill(".glass-transport input[type=range]", page.get_attribute(".glass-transport input", "min"))
    page.wait_for_selector(".glass-pill[data-state=past]")
    page.focus(".glass-transport input[type=range]")
    page.keyboard.press("Space")
    assert page.evaluate("window.glassStore.player.playing")
    page.keyboard.press("L")
    assert page.evaluate(SHOWN)["live"]
    assert seen.errors == []


def test_looking_back_stops_nobody(tiny, visit):  # noqa: F811
    host, port = tiny
    seen = visit(port)
    seen.page.click("#glass-eight")
    seen.wait_for_cards(8)
    seen.page.click(".glass-transport >> text=Pause")
    paused = seen.page.evaluate(SHOWN)
    seen.wait_for_cards(8, "finished")
    assert host.live.runner.stats().num_running == 0
    assert seen.page.evaluate(SHOWN) == paused


def test_a_request_is_brought_out_by_a_click_and_by_keys(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    seen.send("bring me out")
    seen.wait_for_cards(1, "finished")
    seen.page.evaluate("window.glassStore.player.pause(), window.glassStore.player.step(-3)")
    before = seen.picture("blocks")
    seen.page.focus("#glass-timeline canvas >> nth=0")
    seen.page.keyboard.press("ArrowLeft")
    seen.page.keyboard.press("Enter")
    seen.page.evaluate("document.activeElement.blur()")
    key = seen.page.evaluate("window.glassStore.pinned")
    assert key is not None
    seen.page.wait_for_function(f"document.querySelector('#glass-blocks canvas').toDataURL() !== {before!r}")
    table = seen.page.evaluate(f"window.glassStore.picture.table({key})")
    assert table and len(set(table)) == len(table)
    seen.page.click("#glass-clear")  # its card is gone, and the focus is on a button
    seen.page.keyboard.press("Escape")
    assert seen.page.evaluate("window.glassStore.pinned") is None


def test_the_timeline_zooms_and_pans_by_keys(busy):
    seen, _ = busy
    seen.page.evaluate("document.activeElement.blur()")
    pictures = {seen.picture("timeline")}
    for key in "wwasd":
        before = seen.picture("timeline")
        seen.page.keyboard.press(key)
        seen.page.wait_for_function(
            f"document.querySelector('#glass-timeline canvas').toDataURL() !== {before!r}"
        )
        pictures.add(seen.picture("timeline"))
    assert len(pictures) >= 4
