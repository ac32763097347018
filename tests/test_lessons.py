"""The lessons: their recordings are what the engine does, their code is there, and a keyboard is enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from assets.lesson_traces import record
from engine.events import LifecycleEvent, StepEvent
from engine.trace import Trace
from tests.support import tiny_loaded
from tests.test_guide import names_in
from tests.test_page_browser import browser, tiny, visit  # noqa: F401 -- fixtures
from visualizer.lessons import lesson_trace, lessons, trace_names

ROOT = Path(__file__).parent.parent


def counts(trace: Trace) -> list[tuple]:
    """All that a recording counts, and nothing that depends on the model or the machine."""
    return [
        (event.step, [use[:4] for use in event.slots], event.num_used, event.num_cached, event.num_waiting)
        if isinstance(event, StepEvent)
        else (event.step, event.kind, event.request_id, event.num_tokens)
        for event in trace.events
        if not isinstance(event, LifecycleEvent) or event.kind != "mode"
    ]


def test_recordings_are_what_the_engine_does():
    """Recorded anew with another model, they count the same: only lengths matter."""
    anew = record(tiny_loaded())
    assert trace_names() == sorted(anew)
    for name in trace_names():
        assert counts(lesson_trace(name)) == counts(anew[name]), f"record {name} anew: make lessons"


def test_recordings_are_of_the_real_model_and_small():
    files = sorted((ROOT / "visualizer/lessons/traces").iterdir())
    assert [file.name for file in files] == [f"{name}.jsonl.gz" for name in trace_names()]
    assert sum(file.stat().st_size for file in files) < 500_000
    assert all("SmolLM2" in lesson_trace(name).keyframe.info.model for name in trace_names())


def test_what_the_lessons_say_of_their_runs_is_so():
    steps = {
        name: sum(isinstance(event, StepEvent) for event in lesson_trace(name).events)
        for name in trace_names()
    }
    assert (steps["batching-naive"], steps["batching-static"], steps["batching-continuous"]) == (217, 102, 62)
    assert (steps["memory-reserving"], steps["memory-paging"]) == (307, 35)
    peak = max(e.num_used for e in lesson_trace("memory-paging").events if isinstance(e, StepEvent))
    assert peak == 204


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson["title"])
def test_each_lesson_is_whole(lesson):
    assert lesson["question"].endswith("?") and lesson["solution"]
    for scene in lesson["scenes"]:
        assert 0 <= scene["answer"] < len(scene["choices"]) >= 2
        assert scene["highlight"] in ("timeline", "blocks") and 1 <= len(scene["traces"]) <= 2
    for file, name, _ in lesson["code"]:
        assert name in names_in(ROOT / file), f"{file} has no {name}"
    assert (ROOT / lesson["chapter"]).is_file()


@pytest.mark.browser
def test_every_lesson_is_walked_by_keys_alone(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    page = seen.page
    page.focus("text=Lessons")
    page.keyboard.press("Enter")
    page.wait_for_selector(".glass-lesson .glass-big")
    for number, lesson in enumerate(lessons(), 1):
        page.wait_for_function(
            f"document.querySelector('.glass-lesson').innerText.includes('Lesson {number} of')"
        )
        assert lesson["intro"] in page.inner_text(".glass-lesson")
        for place, scene in enumerate(lesson["scenes"]):
            page.keyboard.press("Space")
            page.wait_for_function("document.querySelectorAll('.glass-choices button').length > 1")
            assert scene["ask"] in page.inner_text(".glass-lesson")
            page.wait_for_function(
                f"document.querySelectorAll('.glass-lane').length === {len(scene['traces'])}"
            )
            right = place % 2 == 0
            choice = scene["answer"] if right else (scene["answer"] + 1) % len(scene["choices"])
            page.keyboard.press(str(choice + 1))
            page.wait_for_selector(".glass-lesson .glass-verdict")
            assert (page.get_attribute(".glass-lesson .glass-verdict", "data-right") == "true") is right
            assert scene["reveal"] in page.inner_text(".glass-lesson")
            page.wait_for_selector(f"[data-panel={scene['highlight']}].glass-marked")
        page.keyboard.press("Space")
        page.wait_for_selector(".glass-lesson summary")
        assert lesson["code"][0][1] in page.inner_text(".glass-lesson")
        page.focus(".glass-lesson summary")
        page.keyboard.press("Enter")
        assert lesson["solution"] in page.inner_text(".glass-lesson")
        page.focus(".glass-lesson")
        page.keyboard.press("Space")
    page.keyboard.press("Backspace")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert seen.errors == []


@pytest.mark.browser
@pytest.mark.parametrize(("address", "shown"), [("3", 3), ("1", 1), ("99", 1), ("x", 1)])
def test_a_link_opens_a_lesson(tiny, visit, address, shown):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    seen.page.goto(f"http://127.0.0.1:{port}/?lesson={address}")
    seen.page.wait_for_selector(".glass-lesson .glass-big")
    assert f"Lesson {shown} of" in seen.page.inner_text(".glass-lesson")
    assert seen.errors == []


@pytest.mark.browser
def test_back_shows_the_scene_before_and_gives_no_answer_away(tiny, visit):  # noqa: F811
    number, lesson = next((n, one) for n, one in enumerate(lessons(), 1) if len(one["scenes"]) > 1)
    _, port = tiny
    seen = visit(port)
    page = seen.page
    page.goto(f"http://127.0.0.1:{port}/?lesson={number}")
    page.wait_for_selector(".glass-lesson .glass-big")

    def wait_for_page(key: str, words: str, scene: dict) -> None:
        page.keyboard.press(key)
        page.wait_for_function(
            "(words) => document.querySelector('.glass-lesson').innerText.includes(words)", arg=words
        )
        page.wait_for_function(f"document.querySelectorAll('.glass-lane').length === {len(scene['traces'])}")

    def shown() -> list[str]:
        return page.locator(".glass-lane h3").all_inner_texts()

    def playing() -> bool:
        return page.locator("dialog .glass-transport button >> nth=2").text_content() == "Pause"

    first, second = lesson["scenes"][:2]
    wait_for_page("Space", first["ask"], first)
    asked = shown()
    wait_for_page("Space", first["reveal"], first)
    wait_for_page("Space", second["ask"], second)
    following = shown()
    assert following != asked and not playing()
    wait_for_page("Backspace", first["reveal"], first)
    page.wait_for_function(f"document.querySelector('.glass-lane h3').innerText === {asked[0]!r}")
    assert shown() == asked and playing()
    wait_for_page("Backspace", first["ask"], first)
    assert not playing() and "0 tokens" in page.inner_text(".glass-lane .glass-figure >> nth=0")
    assert page.locator("dialog .glass-curve").is_hidden()  # it would tell
    assert f"lesson={number}" in page.url
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert "lesson" not in page.url
    assert seen.errors == []


@pytest.mark.browser
def test_a_recording_that_did_not_come_is_asked_for_again(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port)
    page = seen.page
    page.route("**/lessons/trace/*", lambda route: route.abort(), times=1)
    page.click("text=Lessons")
    page.wait_for_selector(".glass-lesson .glass-big")
    page.keyboard.press("Space")
    page.wait_for_selector(".glass-stage > p")
    page.keyboard.press("Backspace")
    page.keyboard.press("Space")
    page.wait_for_selector(".glass-stage .glass-playback")
    assert page.locator(".glass-stage > p").count() == 0


@pytest.mark.browser
def test_who_wants_no_motion_sees_the_end(tiny, visit):  # noqa: F811
    _, port = tiny
    seen = visit(port, reduced_motion="reduce")
    page = seen.page
    page.click("text=Lessons")
    page.wait_for_selector(".glass-lesson .glass-big")
    page.keyboard.press("Space")
    page.wait_for_selector(".glass-playback")
    page.keyboard.press("1")
    page.wait_for_selector(".glass-lesson .glass-verdict")
    assert "finished at" in page.inner_text(".glass-lane .glass-figure >> nth=0")
    assert page.locator("dialog .glass-transport button >> nth=2").text_content() == "Play"
