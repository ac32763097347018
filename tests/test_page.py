"""The page's routes and visitors: each sees its own text only, limits are said, the gone are cleaned up."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time

import gradio as gr
import pytest
from fastapi.testclient import TestClient

import app as entry
from engine import SamplingParams
from tests.support import tiny_llm
from visualizer import EngineHost, build_app
from visualizer.examples import EXAMPLES
from visualizer.http import MAX_BODY
from visualizer.limits import PUBLIC, Limits, RateLimiter, Refused
from visualizer.mode_switch import ModeSwitch
from visualizer.routes import STATIC, StaticFiles
from visualizer.visitors import FORGET, GRACE, Prompt, Visitors
from visualizer.web import QUEUE_PERIOD

SECRET = "my-secret-question"
BASE = "/gradio_api/glass"


@pytest.fixture(scope="module")
def host():
    host = EngineHost.of(tiny_llm(num_blocks=160, max_model_len=256))
    yield host
    host.close()


@pytest.fixture(scope="module")
def client(host):
    with TestClient(build_app(host)) as client:
        yield client


def prompt(host: EngineHost, text: str = SECRET, max_tokens: int = 8) -> Prompt:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Prompt(text, host.live.chat_ids(text), params)


def poll(client, token=None, cursor=None, have=None) -> dict:
    response = client.post(f"{BASE}/poll", json={"token": token, "cursor": cursor, "have": have or {}})
    assert response.status_code == 200
    return response.json()


def wait_for(condition, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def test_an_answer_arrives_piece_by_piece(host, client):
    token = host.live.visitors.open("pieces")
    host.live.visitors.submit("pieces", [prompt(host, max_tokens=60)])
    text, held, states = "", {}, []
    while True:
        for card in poll(client, token, have=held)["own"]["cards"]:
            text = text[: card["from"]] + card["more"]
            held = {str(card["number"]): [card["end"], card["stamp"]]}
            states.append(card["told"]["state"])
        if states[-1:] == ["finished"]:
            break
        time.sleep(0.01)
    (card,) = host.live.visitors._by_token[token].cards.values()
    assert text == card.handle.result(1).outputs[0].text
    assert card.handle.num_output_tokens == 60
    assert poll(client, token, have=held)["own"] == {"numbers": [1], "cards": [], "sandbox": None}


def test_nobody_sees_anothers_text(host, client):
    mine, other = host.live.visitors.open("mine"), host.live.visitors.open("other")
    assert mine != other and len(mine) >= 32
    host.live.visitors.submit("mine", [prompt(host)])
    answers = []
    for _ in range(40):
        answers.append(client.get(f"{BASE}/feed").text)
        answers.append(client.post(f"{BASE}/poll", json={"token": other}).text)
        answers.append(client.post(f"{BASE}/poll", json={"token": mine[:-1]}).text)
        time.sleep(0.02)
    assert poll(client, mine)["own"]["cards"][0]["prompt"] == SECRET
    for answer in answers:
        assert SECRET not in answer and mine not in answer
    assert poll(client, "no-such-token")["own"] is None
    assert "own" not in poll(client)
    events = repr(host.live.feed._bus.read(0))
    assert SECRET not in events and mine not in events and "mine" not in events


def test_only_the_owner_stops_a_request(host, client):
    token, thief = host.live.visitors.open("owner"), host.live.visitors.open("thief")
    host.live.visitors.submit("owner", [prompt(host, max_tokens=200)])
    for stolen in (thief, "x", None, 5):
        assert client.post(f"{BASE}/stop", json={"token": stolen, "card": 1}).json() == {"stopped": False}
    assert client.post(f"{BASE}/stop", json={"token": token, "card": 1}).json() == {"stopped": True}
    card = wait_for(
        lambda: [c for c in poll(client, token)["own"]["cards"] if c["told"]["state"] == "finished"]
    )[0]
    assert card["told"]["finish"] == "abort"
    host.live.visitors.clear_finished("owner")
    assert poll(client, token)["own"] == {"numbers": [], "cards": [], "sandbox": None}


def test_limits_are_said_and_queue_nothing(host):
    before = host.live.runner.stats().num_waiting + host.live.runner.stats().num_running
    with pytest.raises(Refused, match=f"{Limits().active_per_visitor} is the most for one visitor"):
        host.live.visitors.submit("greedy", [prompt(host)] * (Limits().active_per_visitor + 1))
    with pytest.raises(Refused, match=r"refused this request: .*256"):
        host.live.visitors.submit("greedy", [prompt(host), prompt(host, "long " * 400)])
    stats = host.live.runner.stats()
    assert stats.num_waiting + stats.num_running == before
    assert poll_numbers(host, "greedy") == []


def test_one_place_may_ask_so_much_a_minute():
    now = [0.0]
    limiter = RateLimiter(Limits(per_minute=30, burst=40), clock=lambda: now[0])
    limiter.take("here", 32)
    with pytest.raises(Refused, match="try again in 48 seconds"):
        limiter.take("here", 32)
    limiter.take("here", 8)  # a refusal takes nothing
    limiter.take("elsewhere", 32)
    now[0] = 47
    with pytest.raises(Refused, match="in 17 seconds"):
        limiter.take("here", 32)
    now[0] = 65
    limiter.take("here", 32)
    with pytest.raises(Refused, match=r"more than 30 requests a minute from one place"):
        limiter.take("here", 41)  # more than a bucket ever holds
    for number in range(3000):
        now[0] += 2
        limiter.take(f"client {number}", 1)
    assert len(limiter._buckets) <= 1001


def test_at_home_nobody_counts_and_in_public_all_examples_fit():
    limiter = RateLimiter(Limits())
    for _ in range(100):
        limiter.take("here", 64)
    assert PUBLIC.per_minute and len(EXAMPLES) < PUBLIC.active_per_visitor < PUBLIC.active
    assert len(EXAMPLES) < PUBLIC.burst


def test_limits_of_a_host_hold_for_its_visitors():
    host = EngineHost.of(tiny_llm(block_size=16, num_blocks=64, max_model_len=256), Limits(active=3))
    try:
        host.live.visitors.submit("one", [prompt(host, max_tokens=200)] * 2, "here")
        with pytest.raises(Refused, match="busy with 2 requests of all visitors; 3 is the most"):
            host.live.visitors.submit("two", [prompt(host)] * 2, "there")
    finally:
        host.close()


def test_a_page_says_what_it_runs_on(host, client):
    status = client.get(f"{BASE}/feed").json()["status"]
    assert re.fullmatch(r"\d+ CPU cores?", status["hardware"])


def poll_numbers(host, session: str) -> list[int]:
    return host.live.visitors.view(host.live.visitors.open(session), {})["numbers"]


def test_the_gone_are_cleaned_up(host):
    """A closed tab, and one that fell silent, end their requests; who polls, or said it is away, stays."""
    now = [100.0]
    visitors = Visitors(host.live.runner, host.live.feed, host.live.sandboxes, clock=lambda: now[0])
    stays, silent, hidden = map(visitors.open, ("stays", "silent", "hidden"))
    host.live.runner.pause()
    for session in ("stays", "silent", "hidden", "closed"):
        visitors.submit(session, [prompt(host, max_tokens=230)])
    visitors.open("asked nothing")
    handles = {s: v.cards[1].handle for s, v in visitors._by_session.items() if v.cards}
    visitors.close("closed")
    visitors.go_away(hidden)
    now[0] += GRACE - 1
    visitors.view(stays, {})
    visitors.reap()
    assert visitors.view(silent, {}) is not None
    visitors.view(stays, {})
    now[0] += GRACE + 1
    visitors.view(stays, {})
    visitors.reap()
    for ended in ("closed", "silent"):
        assert handles[ended].result(10).outputs[0].finish_reason == "abort"
    host.live.runner.resume()
    for kept in ("stays", "hidden"):
        assert handles[kept].result(20).outputs[0].finish_reason == "length"
    assert "asked nothing" not in visitors._by_session
    now[0] += FORGET - GRACE  # who was silent finds what there was, even now
    for token in (stays, silent, hidden):
        assert visitors.view(token, {})["numbers"] == [1]
    now[0] += FORGET + 1
    visitors.reap()
    assert not visitors._by_session and not visitors._by_token


def test_mode_switches_come_one_a_period_and_the_last_wish_counts():
    switched: list[str] = []
    modes = ModeSwitch(switched.append, period=0.2)
    for mode in ("static", "naive", "static", "continuous", "naive"):
        modes.ask(mode)
    assert switched == ["static"]
    end = time.monotonic() + 20
    while len(switched) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert switched == ["static", "naive"]
    with pytest.raises(ValueError, match="unknown mode"):
        modes.ask("warp")
    modes.ask("continuous")
    modes.close()
    time.sleep(0.3)
    assert switched == ["static", "naive"]


@pytest.mark.parametrize("port", ["0", "99999", "-1", "abc", "", "7860.5", "١٢"])
def test_what_is_no_port_is_said(port, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        entry.parse_args(["--port", port])
    assert "is no port" in capsys.readouterr().err
    monkeypatch.setenv("PORT", port)
    if port:
        with pytest.raises(SystemExit):
            entry.parse_args([])
        assert "is no port" in capsys.readouterr().err
    else:
        assert entry.parse_args([]).port == 7860


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nonsense", b'{"have":{"1":"x"},"token":[]}', b"x" * (MAX_BODY + 1)]
)
def test_a_strange_poll_is_harmless(client, body):
    answer = client.post(f"{BASE}/poll", content=body)
    assert answer.status_code == 200 and answer.json()["status"]["state"] == "ready"


def test_strange_counts_are_harmless(host, client):
    token = host.live.visitors.open("strange")
    host.live.visitors.submit("strange", [prompt(host)])
    for have in (
        {"1": [10**9, 0]},
        {"1": [-7, 0]},
        {"1": ["a", 0]},
        {"1": [True, 0]},
        {"1": 1},
        {"x": 1},
        {"1": [1]},
    ):
        assert poll(client, token, have=have)["own"]["cards"][0]["from"] == 0


def test_scripts_are_kept_for_good_and_nothing_else_is_served(client):
    static = StaticFiles()
    assert {path.name for path in STATIC.iterdir()} == set(static.files)
    answer = client.get(f"{BASE}/static/{static.version}/main.js")
    assert "immutable" in answer.headers["cache-control"] and "javascript" in answer.headers["content-type"]
    assert client.get(f"{BASE}/static/{static.version}/..%2Fpanel.py").status_code == 404
    assert client.get(f"{BASE}/static/x/panel.py").status_code == 404
    plotly = client.get(f"{BASE}/plotly/7/plotly.min.js")
    assert plotly.headers["content-encoding"] == "gzip" and b"Plotly" in plotly.content
    assert len(gzip.compress(plotly.content)) < 2_000_000
    assert client.get("/openapi.json").status_code == 404 or "glass" not in client.get("/openapi.json").text


def test_the_page_is_there_before_the_engine():
    host = EngineHost()
    with TestClient(build_app(host)) as client:
        assert client.get("/").status_code == 200
        assert poll(client, "t")["status"]["state"] == "loading"

        def fail(progress):
            progress("reading weights", 0.25)
            assert client.get(f"{BASE}/feed").json()["status"] == {
                "state": "loading",
                "stage": "reading weights",
                "fraction": 0.25,
            }
            raise ValueError("model folder /x is missing; give one with --model")

        host.load(fail)
        status = wait_for(lambda: (s := poll(client)["status"])["state"] == "failed" and s)
        assert status["error"] == "model folder /x is missing; give one with --model"


def test_examples_are_mixed(host):
    budgets = [example.max_tokens for example in EXAMPLES]
    assert len(EXAMPLES) == 32 and len({example.text for example in EXAMPLES}) == 32
    assert min(budgets[:8]) <= 20 and max(budgets[:8]) >= 200
    assert len(json.dumps([example.text for example in EXAMPLES])) < 10_000


def test_a_busy_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"{port}.*another port"):
            entry.open_port("127.0.0.1", port)


def test_gradio_still_has_the_wait_that_is_set():
    """An attribute of Gradio's own, which a new version might drop without a word."""
    with gr.Blocks() as page:
        assert 0 < page._queue.sleep_when_free < QUEUE_PERIOD


def test_options():
    args = entry.parse_args(["--model", "m", "--mode", "static", "--max-num-seqs", "4", "--port", "1234"])
    assert (args.model, args.mode, args.max_num_seqs, args.port) == ("m", "static", 4, 1234)
    assert (args.num_blocks, args.max_model_len) == (128, 512)


def test_a_proxy_may_show_the_page_elsewhere():
    with TestClient(build_app(EngineHost(), root_path="/shown/here")) as client:
        assert "/shown/here" in client.get("/").text
        assert poll(client)["status"]["state"] == "loading"
