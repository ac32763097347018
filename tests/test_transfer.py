"""The way to the device and back: what arrives is what was sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from engine import SamplingParams, transfer
from engine.transfer import download, pack, unpack, upload
from tests.support import greedy, tiny_llm

ELSEWHERE = SimpleNamespace(type="elsewhere")  # a device that is not the CPU, for all that `transfer` knows


@dataclass(slots=True)
class Record:
    name: str
    numbers: Tensor
    more: Tensor | None = None


def send_by_copying(monkeypatch) -> list[str]:
    """Let the device be more of the host's memory; returns the log of copies."""
    copies: list[str] = []
    for way in ("to_device", "to_host"):
        monkeypatch.setattr(
            transfer, way, lambda tensor, *rest, way=way: copies.append(way) or tensor.clone()
        )
    return copies


def test_packing_keeps_every_bit():
    sent = [
        torch.tensor([[1, -2, 2**62], [0, 7, -(2**63)]]),
        torch.tensor([[0.1, math.inf], [-0.0, 5e-324]], dtype=torch.float64).T,
        torch.empty(2, 0, dtype=torch.int64),
        torch.tensor(3),
    ]
    got = unpack(pack(sent, pinned=False), sent)
    for one, other in zip(got, sent, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_all_records_travel_in_one_copy(monkeypatch):
    copies = send_by_copying(monkeypatch)
    numbers, more = torch.arange(6).view(2, 3), torch.tensor([0.5], dtype=torch.float64)
    first, second = Record("a", numbers), Record("b", numbers + 1, more)
    upload(ELSEWHERE, first, second)
    assert copies == ["to_device"]
    assert (first.name, second.name, first.more) == ("a", "b", None)
    assert torch.equal(first.numbers, numbers) and first.numbers is not numbers
    assert torch.equal(second.numbers, numbers + 1) and torch.equal(second.more, more)


def test_results_come_back_in_one_copy(monkeypatch):
    copies = send_by_copying(monkeypatch)
    sent = [
        torch.tensor([True, False]),
        torch.tensor([[5, -1]]),
        torch.tensor([0.1, -math.inf, math.nan]),
        torch.empty(0),
    ]
    got = download(ELSEWHERE, *sent)
    assert copies == ["to_host"]
    for one, other in zip(got, sent, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_copied_on_a_cpu():
    record = Record("a", torch.arange(3))
    numbers = record.numbers
    upload(torch.device("cpu"), record)
    assert record.numbers is numbers
    assert download(torch.device("cpu"), numbers)[0] is numbers


def test_an_engine_behind_the_copies_gives_the_same_tokens_and_logprobs(monkeypatch):
    """Every kind of parameter, so that every tensor of a batch and of a plan makes the journey."""
    every = {"temperature": 0.8, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
    every |= {"logit_bias": {3: 1.0, 9: -5.0}, "min_tokens": 3, "logprobs": 3}
    params = [
        greedy(7),
        SamplingParams(max_tokens=7, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=7, seed=2, top_p=0.9, **every),
        SamplingParams(max_tokens=7, seed=3, top_k=5, logprobs=1),
    ]
    prompts = [[5] * 8, [6, 7], [8] * 20, [9]]
    expected = tiny_llm().generate(prompts, params, use_tqdm=False)
    copies = send_by_copying(monkeypatch)
    llm = tiny_llm()
    llm.engine._device = ELSEWHERE
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs == other.outputs and other.outputs[0].finish_reason != "error"
    assert copies == ["to_device", "to_host"] * llm.engine.stats().step
