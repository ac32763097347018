"""Sandboxes: really paused, really stepped, seen by their visitor alone, and given back."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
from fastapi.testclient import TestClient

from engine.events import EngineInfo
from engine.trace import Trace, parse_trace
from tests.support import assert_solo, greedy, tiny_llm
from tests.test_feed import Picture, picture_of
from tests.test_page import BASE, poll, prompt, wait_for
from visualizer import EngineHost, build_app
from visualizer import sandbox as sandbox_module
from visualizer.sandbox import IDLE, MOST, Sandboxes, SandboxRefused
from visualizer.siblings import Siblings


@pytest.fixture
def host():
    host = EngineHost.of(tiny_llm(num_blocks=160, max_model_len=256))
    yield host
    host.close()


@pytest.fixture
def client(host):
    with TestClient(build_app(host)) as client:
        yield client


def tell(client, token, action, value=None, status=200) -> dict:
    body = {"token": token, "do": action, "value": value}
    answer = client.post(f"{BASE}/sandbox", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def look(client, token, cursor=None) -> dict:
    return client.post(f"{BASE}/poll", json={"token": token, "cursor": cursor, "source": "sandbox"}).json()


def num_engines() -> int:
    return sum(thread.name == "engine" for thread in threading.enumerate())


def test_a_visitor_steps_its_own_engine(host, client):
    token = host.live.visitors.open("one")
    assert poll(client, token)["own"]["sandbox"] is None
    status = tell(client, token, "open")["sandbox"]
    assert (status["paused"], status["step"], status["mode"]) == (True, 0, "continuous")
    host.live.visitors.submit("one", [prompt(host, max_tokens=5), prompt(host, "another", max_tokens=5)])
    picture = Picture()
    answer = look(client, token)
    assert answer["source"] == "sandbox"
    for frame in answer["frames"]:
        picture.apply(frame)
    for step in range(1, 4):
        assert tell(client, token, "step")["sandbox"]["step"] == step
        answer = look(client, token, answer["cursor"])
        for frame in answer["frames"]:
            picture.apply(frame)
        assert picture.steps[-1][0] == step
    box = host.live.sandboxes.get(token)
    framer = box.feed._framer
    assert (picture.blocks, picture.slots) == picture_of(framer.replica, framer.tracks.key)
    assert host.live.runner.stats().step == 0  # the live engine had nothing to do with it
    cards = poll(client, token)["own"]["cards"]
    assert [card["told"]["where"] for card in cards] == ["sandbox", "sandbox"]
    assert tell(client, token, "step", 30)["sandbox"]["running"] == 0
    wait_for(lambda: all(c.handle.finished for c in host.live.visitors._by_token[token].cards.values()))
    refused = tell(client, token, "step", status=409)
    assert "nothing to step" in refused["error"] and refused["sandbox"]["paused"]


def test_it_computes_what_the_live_engine_computes(host):
    box = host.live.sandboxes.open("t")
    handle = box.runner.submit([1, 2, 3], greedy(20))
    assert not handle.finished and box.runner.stats().step == 0
    box.command("resume")
    assert_solo([1, 2, 3], handle.result(20).outputs[0].token_ids)
    box.command("mode", "static")
    box.command("pause")
    handle = box.runner.submit([1, 2, 3], greedy(4))
    box.command("step", 4)
    assert box.status(0.0)["mode"] == "static"
    assert_solo([1, 2, 3], handle.result(20).outputs[0].token_ids)


def test_prompts_go_there_while_it_is_open_and_then_to_the_live_engine(host, client):
    token = host.live.visitors.open("both")
    tell(client, token, "open")
    assert tell(client, token, "open")["sandbox"]["step"] == 0  # once more is no second one
    host.live.visitors.submit("both", [prompt(host, max_tokens=100)])
    assert tell(client, token, "close")["sandbox"] is None
    card = host.live.visitors._by_token[token].cards[1]
    assert card.handle.result(20).outputs[0].finish_reason == "abort"
    host.live.visitors.submit("both", [prompt(host, max_tokens=4)])
    output = host.live.visitors._by_token[token].cards[2].handle.result(20).outputs[0]
    assert output.finish_reason == "length"
    assert host.live.runner.stats().num_output_tokens >= 4
    told = {c["number"]: c["told"]["where"] for c in poll(client, token)["own"]["cards"]}
    assert told == {1: "sandbox", 2: "live"}
    assert "no sandbox" in tell(client, token, "step", status=409)["error"]


def test_a_closed_one_is_freed_though_its_answers_are_kept(host, client):
    token = host.live.visitors.open("keeps")
    tell(client, token, "open")
    engine = weakref.ref(host.live.sandboxes.get(token).runner._engine)
    host.live.visitors.submit("keeps", [prompt(host, max_tokens=3), prompt(host, max_tokens=100)])
    tell(client, token, "step", 8)
    tell(client, token, "close")
    gc.collect()
    assert engine() is None
    finish = [card.handle.finish_reason for card in host.live.visitors._by_token[token].cards.values()]
    assert finish == ["length", "abort"]
    assert host.live.visitors.stop(token, 1)  # which changes nothing


def test_one_command_at_a_time(host):
    box = host.live.sandboxes.open("t")
    original, inside, go_on = box.runner.step_once, threading.Event(), threading.Event()

    def slow(timeout):
        inside.set()
        assert go_on.wait(20)
        return original(timeout)

    box.runner.step_once = slow
    box.runner.submit([1, 2], greedy(5))
    stepping = threading.Thread(target=box.command, args=("step", 2))
    stepping.start()
    assert inside.wait(20)
    for action, value in (("step", 1), ("resume", None), ("mode", "static")):
        with pytest.raises(SandboxRefused, match="still busy"):
            box.command(action, value)
    go_on.set()
    stepping.join(20)
    box.command("step", 1)
    assert box.runner.stats().step == 3


def test_a_command_holds_its_thread_only_so_long(host, monkeypatch):
    box = host.live.sandboxes.open("t")
    now = [0.0]
    monkeypatch.setattr(sandbox_module.time, "monotonic", lambda: now[0])
    left = []

    def slow(timeout):
        left.append(timeout)
        if timeout < 3:
            raise FutureTimeout
        now[0] += 3

    box.runner.step_once = slow
    with pytest.raises(SandboxRefused, match="2 of 32 were taken in 8 seconds"):
        box.command("step", 32)
    assert left == [8, 5, 2]


def test_its_recording_is_its_visitors(host, client):
    token, other = host.live.visitors.open("records"), host.live.visitors.open("another")
    tell(client, token, "open")
    host.live.visitors.submit("records", [prompt(host, max_tokens=5)])
    tell(client, token, "step", 3)
    answer = client.post(f"{BASE}/sandbox/trace", json={"token": token, "format": "jsonl"})
    assert 'filename="glass-engine-sandbox.jsonl"' in answer.headers["content-disposition"]
    trace = parse_trace(answer.content)
    assert trace == Trace(*host.live.sandboxes.get(token).runner.events.recording()) and trace.events
    for body, status in (
        ({"token": other, "format": "jsonl"}, 409),
        ({"token": "", "format": "jsonl"}, 403),
        ({"token": token, "format": ["pdf"]}, 400),
    ):
        assert client.post(f"{BASE}/sandbox/trace", json=body).status_code == status


def test_nobody_else_sees_or_moves_it(host, client):
    token, other = host.live.visitors.open("mine"), host.live.visitors.open("other")
    tell(client, token, "open")
    host.live.visitors.submit("mine", [prompt(host, max_tokens=5)])
    tell(client, token, "step")
    epoch = host.live.sandboxes.get(token).feed.epoch
    for stranger in (other, token[:-1], "", None, 7, [token], {"token": token}):
        answer = client.post(f"{BASE}/poll", json={"token": stranger, "source": "sandbox"})
        assert answer.json()["source"] == "live" and epoch not in answer.text and token not in answer.text
        body = {"token": stranger, "do": "step"}
        refused = client.post(f"{BASE}/sandbox", json=body)
        assert refused.status_code in (403, 409) and epoch not in refused.text
    assert epoch not in client.get(f"{BASE}/feed").text
    assert host.live.sandboxes.get(token).runner.stats().step == 1
    assert "own" in look(client, token)


def test_there_are_only_a_few_and_the_idle_are_closed(host):
    now = [100.0]
    boxes = Sandboxes(Siblings(tiny_llm()), clock=lambda: now[0])
    before = num_engines()
    for number in range(MOST):
        boxes.open(f"t{number}")
    assert num_engines() == before + MOST
    with pytest.raises(SandboxRefused, match=f"All {MOST} sandboxes are taken"):
        boxes.open("late")
    now[0] += IDLE - 1
    boxes.get("t0", use=True)
    boxes.get("t1")  # looking is no use
    now[0] += 2
    boxes.reap()
    assert boxes.get("t0") and not any(boxes.get(f"t{n}") for n in range(1, MOST))
    assert boxes.open("late").status(now[0])["closes_in"] == IDLE
    boxes.close_all()
    wait_for(lambda: num_engines() == before)


def test_a_visitor_who_leaves_frees_it(host, client):
    before = num_engines()
    token = host.live.visitors.open("leaves")
    tell(client, token, "open")
    host.live.visitors.submit("leaves", [prompt(host, max_tokens=200)])
    tell(client, token, "resume")
    host.live.visitors.close("leaves")
    wait_for(lambda: num_engines() == before)
    assert host.live.sandboxes.get(token) is None
    assert "load it again" in tell(client, token, "open", status=403)["error"]


def test_one_who_leaves_while_it_is_made_gets_none():
    boxes = Sandboxes(Siblings(tiny_llm()))
    made = threading.Event()
    original = boxes._siblings.make

    def slow(*args):
        engine = original(*args)
        with pytest.raises(SandboxRefused, match="being made"):
            boxes.open("t")
        boxes.close("t")
        made.set()
        return engine

    boxes._siblings.make = slow
    before = num_engines()
    with pytest.raises(SandboxRefused, match="closed"):
        boxes.open("t")
    assert made.is_set() and boxes.get("t") is None
    wait_for(lambda: num_engines() == before)


def test_one_that_cannot_be_made_leaves_room(monkeypatch):
    boxes = Sandboxes(Siblings(tiny_llm()))
    monkeypatch.setattr(sandbox_module, "Sandbox", lambda *args: 1 / 0)
    for _ in range(MOST + 1):
        with pytest.raises(ZeroDivisionError):
            boxes.open("t")
    assert boxes._sandboxes == {}


@pytest.mark.parametrize(
    ("action", "value", "message"),
    [
        ("step", 0, "1 to 32"),
        ("step", 33, "1 to 32"),
        ("step", True, "1 to 32"),
        ("step", "many", "1 to 32"),
        ("mode", "warp", "Unknown mode"),
        ("mode", None, "Unknown mode"),
        ("mode", [], "Unknown mode"),
        ("explode", None, "cannot"),
        ("step", None, "nothing to step"),
    ],
)
def test_wrong_commands_are_refused(host, client, action, value, message):
    token = host.live.visitors.open("wrong")
    tell(client, token, "open")
    assert message in tell(client, token, action, value, status=409)["error"]


def test_one_that_was_closed_meanwhile_says_so(host):
    box = host.live.sandboxes.open("t")
    box.close()
    for action, value in (("step", None), ("resume", None), ("pause", None), ("mode", "static")):
        with pytest.raises(SandboxRefused, match="does not work any more"):
            box.command(action, value)


def test_strange_bodies_are_refused(host, client):
    token = host.live.visitors.open("strange")
    for body, status in ((b"", 403), (b"[]", 403), (json.dumps({"token": token}).encode(), 400)):
        answer = client.post(f"{BASE}/sandbox", content=body)
        assert answer.status_code == status and answer.json()["error"]


def test_a_sibling_is_small_and_has_the_live_engines_settings():
    llm = tiny_llm(num_blocks=500, max_num_seqs=64)
    info = Siblings(llm).make("naive", pool_tokens=90, max_num_seqs=8, max_model_len=50).info
    assert info == EngineInfo(llm.engine.info.model, "float32", "cpu", 4, 23, 8, 32, 50)
    small = Siblings(tiny_llm(num_blocks=10, max_num_seqs=2)).make("naive", 4096, 8, 512).info
    assert (small.num_blocks, small.max_num_seqs, small.context_limit) == (10, 2, 40)


def test_all_is_closed_with_the_host():
    before = num_engines()
    host = EngineHost.of(tiny_llm(num_blocks=64))
    host.live.sandboxes.open("t")
    assert num_engines() == before + 2
    host.close()
    end = time.monotonic() + 20
    while num_engines() > before:
        assert time.monotonic() < end
        time.sleep(0.01)
