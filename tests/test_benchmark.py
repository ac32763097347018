"""The benchmark: that its figures mean what it says, and that a run that went wrong has none.

Most tests run a stub engine on a clock of its own, so nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

import benchmark
from bench.compare import headlines, speed_up, table
from bench.measures import Arm, InvalidRun, Terms, measure_usage, percentile, why_unfair
from bench.runs import run_mode
from bench.workload import WorkItem, build_workload, num_output_tokens, num_prompt_tokens
from engine import CompletionOutput, ContinuousEngine, RequestMetrics, RequestOutput
from engine.events import BlockDelta, EngineInfo, EventBus, LifecycleEvent, SlotUse, StepEvent, StepTimes
from tests.support import tiny_folder

INFO = EngineInfo("stub", "float32", "cpu", 16, 64, 4, 512, 512)


class FakeClock:
    """Time passes only when somebody says so."""

    def __init__(self):
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        # Some time passes even if it is too little to be added, as with a real clock.
        self.time = max(self.time + seconds, math.nextafter(self.time, math.inf))


class StubEngine:
    """Gives every request a token a step. Steps take `step_seconds` each, the very first `first_seconds`."""

    info = INFO
    weights = INFO.dtype

    def __init__(
        self, clock: FakeClock, step_seconds=0.1, first_seconds=0.1, reply_tokens=None, reason="length"
    ):
        self.clock = clock
        self.events = EventBus(INFO, "naive", 0.0)
        self.step_seconds = step_seconds
        self.next_seconds = first_seconds
        self.reply_tokens = reply_tokens  # what a request gets; None for what it asked for
        self.reason = reason
        self.left: dict[str, int] = {}

    def set_mode(self, mode):
        self.mode = mode

    def add_request(self, request_id, prompt, params):
        self.left[request_id] = params.max_tokens if self.reply_tokens is None else self.reply_tokens

    def has_unfinished(self):
        return bool(self.left)

    def step(self):
        self.clock.time += self.next_seconds
        self.next_seconds = self.step_seconds
        outputs = []
        for request_id in list(self.left):
            tokens = [5] if self.left[request_id] else []
            self.left[request_id] -= len(tokens)
            done = self.left[request_id] == 0
            if done:
                del self.left[request_id]
            completion = CompletionOutput(0, "", tokens, self.reason if done else None)
            outputs.append(RequestOutput(request_id, [1], 0, [completion], done, RequestMetrics(0.0)))
        return outputs


def make_work(*num_outputs: int) -> list[WorkItem]:
    return [WorkItem((100 + index, 7), count) for index, count in enumerate(num_outputs)]


def make_arm(name: str, seconds: float, work=None, **changes) -> Arm:
    work = work or make_work(4, 2)
    times = [[float(i + 1) for i in range(item.num_output)] for item in work]
    terms = {"dtype": "float32", "weights": "float32", "threads": 2} | changes
    num_prompt = terms.pop("num_prompt", num_prompt_tokens(work))
    return Arm(name, Terms(**terms), work, seconds, times, num_prompt, warm_up_seconds=0.0)


# -- the work ---------------------------------------------------------------------------------------


def test_w96_is_the_published_workload():
    work = build_workload()
    rng = random.Random(7)
    for item in work:
        num_prompt, num_output = rng.randint(16, 128), rng.randint(32, 160)
        prompt = tuple(rng.randint(100, 40000) for _ in range(num_prompt))
        assert item == (prompt, num_output, 0.0)
    assert (len(work), num_output_tokens(work)) == (96, 9313)
    assert build_workload(10) == work[:10]


def test_poisson_arrivals_are_seeded_and_change_nothing_else():
    work = build_workload(96, request_rate=4.0)
    assert work == build_workload(96, request_rate=4.0)
    assert [item[:2] for item in work] == [item[:2] for item in build_workload(96)]
    due = [item.due for item in work]
    assert due[0] == 0 and due == sorted(due)
    assert 0.15 < due[-1] / 95 < 0.35  # a quarter of a second apart on average


def test_a_smaller_vocabulary_gets_tokens_it_has_and_the_same_lengths():
    work = build_workload(5, largest_token=250)
    assert all(100 <= token <= 250 for item in work for token in item.prompt)
    lengths = [(len(item.prompt), item.num_output) for item in work]
    assert lengths == [(len(item.prompt), item.num_output) for item in build_workload(5)]


# -- the figures --------------------------------------------------------------------------------------


def test_percentiles_interpolate_between_ranks():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(range(101), 95) == 95
    assert percentile([7], 95) == 7
    assert percentile([], 50) != percentile([], 50)  # NaN


def test_warm_up_is_not_timed_and_is_shown_apart():
    """CASES 89: the first step takes 5 s (compiling, say), later ones 0.1 s."""
    clock = FakeClock()
    arm = run_mode(StubEngine(clock, first_seconds=5.0), "naive", make_work(50), clock)
    assert arm.warm_up_seconds > 5
    assert arm.tokens_per_second == pytest.approx(10)
    assert percentile(arm.gaps, 50) == percentile(arm.gaps, 95) == pytest.approx(0.1)


def test_only_output_tokens_count():
    clock = FakeClock()
    work = [WorkItem(tuple(range(100, 200)), 10)]
    assert run_mode(StubEngine(clock), "continuous", work, clock).tokens_per_second == pytest.approx(10)


def test_a_request_waits_from_when_it_was_due_not_from_when_the_busy_engine_saw_it():
    clock = FakeClock()
    work = [WorkItem((100,), 3), WorkItem((101,), 3, due=0.25), WorkItem((102,), 1, due=9.0)]
    arm = run_mode(StubEngine(clock, step_seconds=1.0), "continuous", work, clock)
    # Steps end at 1, 2, 3, 4. The second request is seen at 1. Then there is nothing to do until 9.
    assert arm.first_token_times == pytest.approx([1.0, 1.75, 1.0])
    assert arm.seconds == pytest.approx(10)


def test_usage_counts_idle_slots_only_while_somebody_waits():
    def delta(block, owner, filled):
        return BlockDelta(
            block, "used" if owner else "free", (owner,) if owner else (), 0, bool(owner), filled
        )

    def step(num_busy, num_waiting, *blocks):
        times = StepTimes(schedule=0.1, prepare=0.1, forward=1.5, sample=0.1, postprocess=0.1)
        slots = tuple(SlotUse(slot, "a", "decode", 1, 1, 1, 1) for slot in range(num_busy))
        return StepEvent(0, 0.0, 1, "static", times, slots, blocks, 0, 0, 0, 0, num_waiting, "")

    events = [
        step(4, 9, delta(0, "a", 16), delta(1, "a", 0)),
        step(1, 9, delta(1, "a", 8)),  # three of four slots wasted
        step(1, 0, delta(0, None, 0)),  # idle, but nobody waits
        LifecycleEvent(0, 0.0, 3, "preempted", "a", blocks=(delta(1, None, 0),)),
        step(1, 0),
    ]
    usage = measure_usage(events, INFO, step_seconds=8.0)
    assert usage.num_steps == 4 and usage.num_preemptions == 1
    assert usage.wasted_slot_steps == 3 / 16
    assert usage.peak_kv == 2 / 64
    assert usage.mean_kv == (2 + 2 + 1 + 0) / 4 / 64
    assert usage.written_kv == (16 + 24 + 8) / (5 * 16)
    assert usage.overhead == pytest.approx(1 - 4 * 1.5 / 8)
    assert usage.stages["emit"] == pytest.approx((8 - 4 * 1.9) / 8)  # what the events cannot tell


# -- what makes a run invalid -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stub",
    [
        {"reply_tokens": 0},  # CASES 88: empty replies that look like success
        {"reply_tokens": 0, "reason": "stop"},
        {"reply_tokens": 3},  # short
        {"reason": "error"},
        {"reason": "abort"},
    ],
)
def test_a_failed_empty_or_short_reply_makes_the_run_invalid(stub):
    clock = FakeClock()
    with pytest.raises(InvalidRun, match="naive"):
        run_mode(StubEngine(clock, **stub), "naive", make_work(20, 20), clock)


def test_a_request_that_would_be_cut_short_is_refused_before_anything_runs():
    clock = FakeClock()
    with pytest.raises(InvalidRun, match="context limit is 512"):
        run_mode(StubEngine(clock), "naive", make_work(600), clock)
    assert clock.time == 0


def test_no_speed_up_between_arms_that_did_not_do_equal_work():
    """CASES 90."""
    fast, slow = make_arm("continuous", 1.0), make_arm("naive", 3.0)
    assert why_unfair(fast, slow) is None and speed_up(fast, slow) == "3.0x"
    other_prompts = [item._replace(prompt=(9, 9)) for item in make_work(4, 2)]
    for base, reason in [
        (make_arm("naive", 3.0, dtype="bfloat16"), "bfloat16"),
        (make_arm("naive", 3.0, kv_cache=False), "different kv cache"),
        (make_arm("naive", 3.0, weights="Q4_1"), "different weights (continuous: float32, naive: Q4_1)"),
        (make_arm("naive", 3.0, threads=1), "different threads"),
        (make_arm("naive", 3.0, num_prompt=9), "naive read 9 prompt tokens, but was given 4"),
        (make_arm("naive", 3.0, work=make_work(4, 3)), "different work"),
        (make_arm("naive", 3.0, work=other_prompts), "different work"),
    ]:
        assert reason in why_unfair(fast, base)
        assert speed_up(fast, base) == "-"
    assert speed_up(fast, None) == "-"


def test_requests_at_once_are_counted_from_their_tokens():
    """One of 4 tokens from second 1 to 4, one of 2 that arrives at 3: its tokens come at 4 and 5."""
    first, second = make_work(4, 2)
    arm = make_arm("continuous", 6.0, work=[first, second._replace(due=3.0)])
    assert arm.mean_at_once == (3 + 1) / 6 and arm.most_at_once == 1  # one ends as the other begins
    assert make_arm("continuous", 4.0).most_at_once == 2


def test_no_speed_up_over_who_takes_in_more_than_allowed():
    ours, theirs = make_arm("continuous", 4.0), make_arm("a-peer", 8.0)
    theirs.slots = 2
    assert headlines([ours, theirs]) == ["Speed-up of continuous over a-peer: 2.0x."]
    theirs.slots = 1
    (line,) = headlines([ours, theirs])
    assert "a-peer served 2 requests at once, of 1 allowed" in line
    assert speed_up(theirs, ours) == speed_up(ours, theirs) == "-"


def test_a_speed_up_from_part_of_the_work_is_marked_as_an_estimate():
    whole, part = make_arm("naive", 6.0), make_arm("transformers", 8.0, work=make_work(4))
    assert speed_up(whole, part) == "~2.0x"
    assert "transformers (first 1)" in table([whole, part], 10**9)


# -- the command ------------------------------------------------------------------------------------


def test_the_whole_command(tmp_path, capsys):
    argv = [
        "--model",
        str(tiny_folder()),
        "--requests",
        "6",
        "--max-num-seqs",
        "2",
        "--dtype",
        "float32",
        "--hf",
        "2",
    ]
    argv += ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.html")]
    assert benchmark.main(argv) == 0
    printed = capsys.readouterr().out
    assert "Speed-up of continuous over naive: " in printed
    assert "estimated from 2 of 6 requests" in printed
    assert "not timed: loading" in printed
    result = json.loads((tmp_path / "out.json").read_text())
    runs = {run["mode"]: run for run in result["runs"]}
    assert list(runs) == ["naive", "static", "continuous", "transformers"]
    assert {run["dtype"] for run in runs.values()} == {"float32"}
    num_output = num_output_tokens(build_workload(6))
    assert all(runs[mode]["num_output_tokens"] == num_output for mode in benchmark.MODES)
    usage = {mode: runs[mode]["usage"] for mode in benchmark.MODES}
    assert usage["naive"]["peak_kv"] == 0.5 and usage["static"]["peak_kv"] == 1.0  # reserving is visible
    assert usage["continuous"]["written_kv"] > 2 * usage["static"]["written_kv"]
    assert usage["continuous"]["wasted_slot_steps"] < usage["static"]["wasted_slot_steps"]
    assert usage["naive"]["num_steps"] >= num_output  # a token a step, at best
    assert usage["naive"]["wasted_slot_steps"] == pytest.approx(0.5, abs=0.2)
    picture = (tmp_path / "out.html").read_text()
    assert "Plotly.newPlot" in picture and 'src="http' not in picture


def test_json_on_standard_output_is_json_alone(capsys):
    argv = ["--model", str(tiny_folder()), "--requests", "2", "--modes", "static,continuous", "--json", "-"]
    assert benchmark.main([*argv, "--request-rate", "50"]) == 0
    captured = capsys.readouterr()
    assert [run["mode"] for run in json.loads(captured.out)["runs"]] == ["static", "continuous"]
    assert "| static" in captured.err


def test_an_invalid_run_prints_no_figure_and_fails(tmp_path, capsys, monkeypatch):
    append = ContinuousEngine._append_token

    def break_down(engine, request, token):
        if request.num_output_tokens == 20 and engine.mode == "continuous":
            request.token_ids.append(token)
            return engine._fail(request, "a fault made for this test")
        return append(engine, request, token)

    monkeypatch.setattr(ContinuousEngine, "_append_token", break_down)
    argv = ["--model", str(tiny_folder()), "--requests", "3", "--json", str(tmp_path / "out.json")]
    assert benchmark.main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no valid result" in captured.err and "a fault made for this test" in captured.err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-model-len", "100"], "context limit is 100"),
        (["--num-blocks", "4"], "context limit is 64"),
        (["--model", "no/such/model.gguf"], "no/such/model.gguf"),
    ],
)
def test_what_cannot_run_is_said_by_name(capsys, argv, message):
    assert benchmark.main(["--model", str(tiny_folder()), *argv]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plot", "picture.png"], ".html"),
        (["--plot", "nowhere/picture.html"], "no folder"),
        (["--json", "nowhere/out.json"], "no folder"),
        (["--modes", "fast"], "unknown mode 'fast'"),
        (["--requests", "0"], "at least 1"),
        (["--request-rate", "-1"], "above 0"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(capsys, argv, message):
    with pytest.raises(SystemExit):
        benchmark.parse_args(argv)
    assert message in capsys.readouterr().err


def test_a_pool_too_small_to_reserve_in_every_slot_is_said(capsys):
    argv = ["--model", str(tiny_folder()), "--requests", "3", "--max-num-seqs", "4", "--num-blocks", "70"]
    assert benchmark.main([*argv, "--modes", "static"]) == 0
    assert "only 2 of 4 slots can reserve the 512-token maximum" in capsys.readouterr().out


def test_an_unanswered_request_makes_the_run_invalid():
    with pytest.raises(InvalidRun, match="1 of 2 requests"):
        replace(make_arm("naive", 1.0), token_times=[[1.0]])
