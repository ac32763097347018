"""`benchmark.py --load` and `--scale`: that they count what they say, and measure what they claim to."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

import benchmark
from bench import scale
from bench.load import Slo, measure_capacity, measure_load
from bench.measures import InvalidRun
from bench.workload import build_workload
from engine.events import StepTimes
from tests.support import tiny_folder, tiny_loaded
from tests.test_benchmark import FakeClock, StubEngine

FACTS = {
    "model": "stub",
    "dtype": "float32",
    "kernels": "torch",
    "read_gb_per_second": 1.0,
    "hardware": {
        "cpu": "none",
        "cores": 1,
        "threads": 1,
        "isa": [],
        "ram_gib": 1,
        "python": "3",
        "torch": "2",
        "transformers": "5",
    },
}


# -- latency under load -------------------------------------------------------------------------------


def test_a_promise_is_kept_only_if_both_halves_are():
    slo = Slo(ttft=1.0, gap=0.2)
    assert slo.is_met([1.0, 1.2, 1.4])
    assert slo.is_met([0.5])  # one token has no gap
    assert not slo.is_met([1.01, 1.1])
    assert not slo.is_met([0.1, 0.35])
    assert slo.is_met([0.1, 0.2, 0.49])  # 0.29 once, but 0.195 on average


def run_load(clock: FakeClock, rates, slo=None, num_requests=40, **options):
    engine = StubEngine(clock, **options)
    report = measure_load(
        engine, ["continuous"], num_requests, rates, slo or Slo(1.0, 0.2), FACTS, clock=clock
    )
    return report, report.data["points"]


def test_every_request_of_an_engine_with_time_to_spare_meets_the_promise():
    _, (slow, fast) = run_load(FakeClock(), [0.5, 2.0])
    assert slow["num_met"] == fast["num_met"] == 40
    # Steps of 0.1 s: a request that comes during one waits for its end, and gets its token with the next.
    assert 0.1 <= slow["ttft_seconds"]["p50"] <= 0.2 and fast["ttft_seconds"]["p99"] <= 0.2
    assert slow["token_gap_seconds"]["p99"] == pytest.approx(0.1)
    assert slow["goodput"] == pytest.approx(40 / slow["seconds"])
    work = build_workload(40, 0.5)
    assert slow["seconds"] == pytest.approx(work[-1].due + work[-1].num_output * 0.1, abs=0.3)


def test_late_requests_are_no_goodput():
    _, (point,) = run_load(FakeClock(), [2.0], slo=Slo(1.0, 0.05))
    assert (point["num_met"], point["goodput"]) == (0, 0.0)
    _, (point,) = run_load(FakeClock(), [2.0], slo=Slo(0.15, 0.2))
    assert 0 < point["num_met"] < 40


def test_rates_are_shares_of_the_measured_capacity_unless_given():
    clock = FakeClock()
    capacity = measure_capacity(StubEngine(clock), 40, 40_000, clock)
    longest = max(item.num_output for item in build_workload(8))  # twice the stub's four slots, all at once
    assert capacity == pytest.approx(8 / (longest * 0.1))
    report, points = run_load(FakeClock(), [])
    shares = [round(capacity * share, 2) for share in (0.5, 0.75, 1.0, 1.5)]
    assert [point["rate"] for point in points] == shares
    assert f"{capacity:.2f} requests/s" in report.text
    assert "first token within 1 s" in report.text and "every 200 ms" in report.text


def test_a_request_without_an_answer_makes_the_whole_sweep_invalid():
    """CASES 88."""
    with pytest.raises(InvalidRun):
        run_load(FakeClock(), [1.0], reply_tokens=0)


def test_load_on_a_real_engine(tmp_path, capsys):
    argv = ["--model", str(tiny_folder()), "--load", "--requests", "5", "--rates", "50", "100"]
    argv += ["--max-num-seqs", "2", "--slo-ttft", "60", "--slo-gap", "30"]
    file, picture = tmp_path / "out.json", tmp_path / "out.html"
    assert benchmark.main([*argv, "--json", str(file), "--plot", str(picture)]) == 0
    points = json.loads(file.read_text())["points"]
    assert [(point["mode"], point["rate"]) for point in points] == [
        (mode, rate) for mode in ("static", "continuous") for rate in (50.0, 100.0)
    ]
    assert all(point["num_met"] == 5 for point in points)
    assert "first token within 60 s" in capsys.readouterr().out
    assert "Goodput" in picture.read_text()


# -- scale --------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """The same measurements, of sizes that a test can wait for."""
    monkeypatch.setattr(scale, "NUM_REQUESTS", (1, 3))
    monkeypatch.setattr(scale, "CONTEXTS", (64, 128, 512, 1024))
    monkeypatch.setattr(scale, "NUM_WAITING", (2, 50))
    monkeypatch.setattr(scale, "MOST_TOKENS", 1024)
    monkeypatch.setattr(scale, "PREFILL_TOKENS", 128)


def test_scale_on_a_real_engine(small, tmp_path, capsys):
    argv = ["--model", str(tiny_folder()), "--scale", "--max-num-seqs", "4", "--dtype", "float32"]
    file, picture = tmp_path / "out.json", tmp_path / "out.html"
    assert benchmark.main([*argv, "--json", str(file), "--plot", str(picture)]) == 0
    result = json.loads(file.read_text())
    assert [entry["num_requests"] for entry in result["requests"]] == [1, 3]
    assert [entry["num_output"] for entry in result["requests"]] == [
        sum(item.num_output for item in build_workload(count)) for count in (1, 3)
    ]
    # One alone up to the model's 512 tokens; four up to 1,024 in all.
    sizes = [(entry["batch"], entry["context"]) for entry in result["contexts"]]
    assert sizes == [(1, 64), (1, 128), (1, 512), (4, 64), (4, 128)]
    assert [entry["num_waiting"] for entry in result["queue"]] == [2, 50]
    for entry in result["queue"]:
        assert 0 < entry["schedule"] < entry["outside"]
    printed = capsys.readouterr().out
    assert all(title in printed for title in ("ms, batch of 4", "schedule us", "ms a token"))
    assert "Decode step" in picture.read_text()


def test_only_the_parts_asked_for_are_measured(small, capsys):
    assert benchmark.main(["--model", str(tiny_folder()), "--scale", "queue", "--max-num-seqs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "schedule us" in printed and "ms a token" not in printed and "batch of" not in printed


def test_the_queue_is_measured_behind_any_number_of_slots(monkeypatch):
    monkeypatch.setattr(scale, "NUM_WAITING", (2,))
    (cost,) = scale.measure_queue(tiny_loaded(), 600, 250)
    assert cost.num_waiting == 2 and 0 < cost.schedule < cost.outside


@pytest.mark.parametrize("batch", [1, 4])
def test_the_decode_steps_that_count_are_those_in_which_all_decode_at_that_context(small, monkeypatch, batch):
    seen = []

    def drive(engine, name, work, clock, progress):
        run = real_drive(engine, name, work, clock, progress)
        for event in run.events:
            if isinstance(event, scale.StepEvent):
                decoding = [use.num_total for use in event.slots if use.phase == "decode"]
                seen.append(decoding if len(decoding) == len(event.slots) == batch else None)
        # Time stands still but in steps that must not count.
        run.events = [
            replace(event, times=StepTimes(0, 0, float(steps is None), 0, 0))
            for event, steps in zip(
                (event for event in run.events if isinstance(event, scale.StepEvent)), seen, strict=True
            )
        ]
        return run

    real_drive = scale.drive
    monkeypatch.setattr(scale, "drive", drive)
    assert scale._decode_step(tiny_loaded(), batch, 128, 250, scale.REAL_CLOCK) == 0.0
    counted = [total for totals in seen if totals for total in totals]
    assert len(counted) >= batch * (scale.DECODE_STEPS - 2)
    assert statistics.mean(counted) == pytest.approx(128, rel=0.15) and max(counted) <= 128


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--scale", "everything"], "unknown scale 'everything'"),
        (["--scale", "--load"], "one after the other"),
        (["--load", "--request-rate", "2"], "--rates instead"),
        (["--load", "--rates", "0"], "above 0"),
        (["--load", "--slo-gap", "-1"], "above 0"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(capsys, argv, message):
    with pytest.raises(SystemExit):
        benchmark.parse_args(argv)
    assert message in capsys.readouterr().err
