"""Traces on the page: taken home, brought back, raced; and what a hostile file gets."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from engine import SamplingParams
from engine.events import StepEvent
from engine.trace import HEADER, Trace, parse_trace, trace_lines
from tests.support import tiny_llm
from tests.test_chrome_trace import check_format
from tests.test_events import busy_life
from tests.test_feed import Picture
from tests.test_page import BASE, SECRET, prompt, wait_for
from tests.test_trace import DAMAGE, VALUES, mutate
from visualizer import EngineHost, build_app
from visualizer.breath import Breath
from visualizer.frames import trace_frames
from visualizer.http import HeavyWork, HttpError, read_json, read_upload
from visualizer.trace_routes import LIMITS, pack, replay


@pytest.fixture(scope="module")
def host():
    host = EngineHost.of(tiny_llm(num_blocks=160, max_model_len=256))
    yield host
    host.close()


@pytest.fixture(scope="module")
def client(host):
    with TestClient(build_app(host)) as client:
        yield client


@pytest.fixture(scope="module")
def lines() -> list[str]:
    llm = tiny_llm(num_blocks=9)
    busy_life(llm)
    return list(trace_lines(*llm.engine.events.recording()))


def upload(client, body, **headers):
    return client.post(f"{BASE}/replay", content=body, headers=headers)


def run_some(host, session: str = "someone") -> None:
    """Serve three requests to their end, as the runner's counters say."""
    ended = sum(host.live.runner.stats().num_finished.values())
    host.live.visitors.submit(session, [prompt(host, text=SECRET, max_tokens=20)] * 3)
    wait_for(lambda: sum(host.live.runner.stats().num_finished.values()) == ended + 3)


def test_what_happened_can_be_taken_home_and_brought_back(host, client):
    run_some(host)
    begun = host.live.runner.stats().step
    run_some(host)
    whole = client.get(f"{BASE}/trace")
    assert 'filename="glass-engine-trace.jsonl"' in whole.headers["content-disposition"]
    trace = parse_trace(whole.content)
    assert SECRET not in whole.text and trace == Trace(*host.live.runner.events.recording())
    part = parse_trace(client.get(f"{BASE}/trace?since={begun + 1}").content)
    steps = [event.step for event in part.events if isinstance(event, StepEvent)]
    assert steps == list(range(begun + 1, host.live.runner.stats().step + 1))
    answer = upload(client, whole.content).json()
    assert [json.loads(frame) for frame in trace_frames(trace)] == answer["frames"]
    assert answer["summary"]["steps"] == host.live.runner.stats().step
    picture = Picture()
    for frame in answer["frames"]:
        picture.apply(frame)
    assert picture.strip["running"] == 0 and picture.keyframes == 1


def test_the_same_recording_is_packed_once_however_it_is_asked_for(host, client, monkeypatch):
    run_some(host)
    last = host.live.runner.stats().step
    packed = []
    monkeypatch.setattr("visualizer.trace_routes.pack", lambda *args: packed.append(1) or pack(*args))
    texts = {client.get(f"{BASE}/trace?since={since}").text for since in (-5, 0, 1)}
    assert len(packed) == 1 and len(texts) == 1
    for since in (last + 1, last + 2, 10**15):
        client.get(f"{BASE}/trace?since={since}")
    assert len(packed) == 2


def test_it_opens_in_perfetto(host, client):
    run_some(host)
    answer = client.get(f"{BASE}/trace?format=chrome")
    assert 'filename="glass-engine-trace.chrome.json"' in answer.headers["content-disposition"]
    check_format(answer.json(), 10**10)
    assert "Perfetto" in upload(client, answer.content).json()["error"]


def test_answers_are_gzipped_only_for_whom_takes_that(client):
    plain = client.get(f"{BASE}/trace", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text.startswith(HEADER)
    zipped = client.get(f"{BASE}/trace", headers={"accept-encoding": "gzip, br"})
    assert zipped.headers["content-encoding"] == "gzip" and zipped.text == plain.text


@pytest.mark.parametrize(
    ("path", "status"),
    [("trace?format=pdf", 400), ("trace?since=x", 422), ("race/x/result", 404), ("race/x/trace", 404)],
)
def test_wrong_addresses_are_answered(client, path, status):
    assert client.get(f"{BASE}/{path}").status_code == status


def test_a_race_over_http(client):
    wrong = client.post(f"{BASE}/race", json={"modes": ["naive"], "size": 8})
    assert wrong.status_code == 400 and "two modes" in wrong.json()["error"]
    wrong = client.post(f"{BASE}/race", json={"modes": ["naive", "naive"], "size": 8})
    assert wrong.status_code == 409 and "two different" in wrong.json()["error"]
    assert client.get(f"{BASE}/race").json() == {
        "race": None,
        "sizes": [8, 16, 32],
        "modes": ["naive", "static", "continuous"],
    }
    race = client.post(f"{BASE}/race", json={"modes": ["static", "continuous"], "size": 8}).json()["race"]
    address = f"{BASE}/race?id={race['id']}"
    done = wait_for(lambda: (r := client.get(address).json()["race"])["state"] != "running" and r)
    assert done["state"] == "done"
    result = client.get(f"{BASE}/race/{race['id']}/result").json()
    assert result["id"] == race["id"] and len(result["arms"]) == 2 and result["speedup"]
    saved = client.get(f"{BASE}/race/{race['id']}/trace?arm=1")
    assert 'filename="glass-engine-race-continuous.jsonl"' in saved.headers["content-disposition"]
    assert parse_trace(saved.content).events
    check_format(client.get(f"{BASE}/race/{race['id']}/trace?arm=0&format=chrome").json(), 10**10)


def test_without_an_engine_all_say_so():
    with TestClient(build_app(EngineHost())) as client:
        answers = [
            client.get(f"{BASE}/trace"),
            client.get(f"{BASE}/race"),
            client.get(f"{BASE}/race/x/result"),
        ]
        answers += [
            client.post(f"{BASE}/{name}", json={"modes": ["naive", "static"]}) for name in ("race", "sandbox")
        ]
        for answer in answers:
            assert answer.status_code == 503 and "not ready" in answer.json()["error"]


def test_a_trace_is_shown_without_an_engine(lines):
    with TestClient(build_app(EngineHost())) as client:
        assert len(upload(client, "".join(lines).encode()).json()["frames"]) > 20


# -- hostile uploads --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_and_hostile_files_are_named(client, lines, case):
    damage, _ = DAMAGE[case]
    answer = upload(client, "".join(damage(lines)).encode("utf-8", "surrogateescape"))
    assert answer.status_code == 400
    body = answer.json()
    assert body["line"] >= 1 and body["error"].startswith("This trace cannot be shown: line ")
    assert len(body["error"]) < 500


def test_a_file_that_is_too_large_is_refused_before_it_is_read(client):
    answer = upload(client, b"x", **{"content-length": str(100 << 20)})
    assert answer.status_code == 413 and "16 MiB is the most" in answer.json()["error"]


def asgi_request(receive, headers=()) -> Request:
    return Request({"type": "http", "method": "POST", "headers": list(headers)}, receive)


def test_no_more_of_a_file_is_taken_than_allowed():
    sent = []

    async def endless():
        sent.append(1)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async def gone():
        return {"type": "http.disconnect"}

    with pytest.raises(HttpError, match="too large") as caught:
        asyncio.run(read_upload(asgi_request(endless), 10_000))
    assert caught.value.status == 413 and len(sent) == 11
    assert asyncio.run(read_json(asgi_request(endless))) == {}
    with pytest.raises(HttpError, match="did not arrive"):
        asyncio.run(read_upload(asgi_request(gone), 10_000))


def test_a_file_that_never_arrives_is_given_up(monkeypatch):
    monkeypatch.setattr("visualizer.http.UPLOAD_TIMEOUT", 0.01)

    async def silent():
        await asyncio.Event().wait()

    with pytest.raises(HttpError, match="did not arrive in time") as caught:
        asyncio.run(read_upload(asgi_request(silent), 10_000))
    assert caught.value.status == 408


def keyframe_line(num_blocks: int, max_num_seqs: int = 4) -> str:
    keyframe = Trace(*tiny_llm(num_blocks=num_blocks, max_num_seqs=max_num_seqs).engine.events.recording())[0]
    return list(trace_lines(keyframe, []))[1]


def test_a_file_that_unfolds_is_refused(lines):
    """Small files that would take much memory or time: each is refused before it does."""
    with pytest.raises(HttpError, match="blocks; 16,384 is the most"):
        replay((HEADER + keyframe_line(16_385)).encode())
    with pytest.raises(HttpError, match="slots; 512 is the most"):
        replay((HEADER + keyframe_line(600, 513)).encode())
    with pytest.raises(HttpError, match="longer than 2,097,152 bytes"):
        replay((HEADER + "[" + "[]," * (1 << 20)).encode())
    submitted = (
        '{{"type":"lifecycle","seq":{0},"time":1{0:09},"step":0,"kind":"submitted","request_id":"{0}",'
    )
    submitted += '"slot":null,"num_tokens":1,"reason":"","blocks":[]}}\n'
    many = "".join(submitted.format(seq) for seq in range(LIMITS.most_live + 1))
    with pytest.raises(HttpError, match="more than 4,096 requests live at a time") as caught:
        replay((HEADER + keyframe_line(4) + many).encode())
    assert caught.value.details == {"line": LIMITS.most_live + 3}


def test_frames_are_bounded(lines, monkeypatch):
    monkeypatch.setattr("visualizer.trace_routes.MOST_CHARS", 5000)
    with pytest.raises(HttpError, match="too long to be shown here"):
        replay("".join(lines).encode())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.lists(st.integers(0, 50), max_size=4), VALUES)
def test_fuzzed_files_are_shown_or_refused(lines, place, path, new):
    place %= len(lines)
    damaged = json.dumps(mutate(json.loads(lines[place]), path, new)) + "\n"
    try:
        packed = replay("".join([*lines[:place], damaged, *lines[place + 1 :]]).encode("utf-8", "replace"))
    except HttpError as error:
        assert error.status == 400
    else:
        answer = json.loads(gzip.decompress(packed), parse_constant=lambda name: pytest.fail(name))
        picture = Picture()
        for frame in answer["frames"]:
            picture.apply(frame)


def test_heavy_work_is_done_one_at_a_time_and_few_wait():
    inside, most = [], []

    def work(breathe):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return threading.current_thread()

    async def visitors():
        heavy = HeavyWork(most_waiting=3)
        results = await asyncio.gather(*(heavy.run(work) for _ in range(6)), return_exceptions=True)
        busy = [result for result in results if isinstance(result, HttpError)]
        assert len(busy) == 3 and all(error.status == 503 for error in busy)
        with pytest.raises(ZeroDivisionError):
            await heavy.run(lambda breathe: 1 / 0)
        assert await heavy.run(work) is not threading.main_thread()  # and one that fails leaves room

    asyncio.run(visitors())
    assert set(most) == {1}


def test_long_work_sleeps_in_proportion(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("visualizer.breath.time.monotonic", lambda: now[0])
    monkeypatch.setattr("visualizer.breath.time.sleep", sleep)
    breathe = Breath(share=0.25, portion=0.002)
    for _ in range(30):
        now[0] += 0.0007
        breathe()
    assert slept == [pytest.approx(0.0063)] * 10


def test_heavy_work_breathes_with_every_small_piece(lines):
    """An upload and a download pause for the engine's sake about as often as the trace has lines."""
    calls = []
    packed = replay("".join(lines).encode(), lambda: calls.append(1))
    assert len(calls) >= len(lines) + len(json.loads(gzip.decompress(packed))["frames"]) - 1
    trace = parse_trace("".join(lines).encode())
    for form in ("jsonl", "chrome"):
        calls.clear()
        pack(trace, form, lambda: calls.append(1))
        assert len(calls) >= len(lines) - 2


def test_many_uploads_at_once_are_refused(client, lines, monkeypatch):
    monkeypatch.setattr("visualizer.trace_routes.MOST_UPLOADS", 0)
    answer = upload(client, "".join(lines).encode())
    assert answer.status_code == 503 and "try again" in answer.json()["error"]


def test_a_trace_holds_no_text(host, client):
    run_some(host, "teller")
    token = host.live.visitors.open("teller")
    for name in ("trace", "trace?format=chrome", "race"):
        text = client.get(f"{BASE}/{name}").text
        assert SECRET not in text and token not in text and "teller" not in text


def test_params_are_not_in_it(host):
    """What the sampling parameters say (stop strings, biases) is the visitor's too."""
    runner = host.live.runner
    runner.submit([1, 2], SamplingParams(max_tokens=2, stop=[SECRET])).result(20)
    assert SECRET not in "".join(trace_lines(*runner.events.recording()))
