"""Decode by CUDA graphs, everything but the recording: buckets, padding, buffers, copies.

A CPU has no graphs, so a "replay" computes directly on the graphs' buffers (`run_directly`).
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import LLM, SamplingParams, cuda_graphs, model_runner, transfer
from engine.cuda_graphs import (
    DecodeBatch,
    DecodeGraphs,
    GraphRecorder,
    batch_buckets,
    choose_capture,
    run_directly,
    table_widths,
)
from engine.model.attention_backends import choose_attention
from engine.model.loader import load_weights
from tests.support import (
    POISON,
    assert_clean,
    assert_solo,
    collect,
    greedy,
    poisoned_loaded,
    run_to_end,
    tiny_llm,
    tiny_loaded,
)
from tests.test_properties import EngineLife


@pytest.fixture(autouse=True)
def graphs_on_the_cpu(monkeypatch):
    """With the attention that a GPU would have: a CPU's own reads lengths that a graph would bake in."""
    monkeypatch.setattr(
        model_runner, "choose_capture", lambda device, enforce_eager: None if enforce_eager else run_directly
    )
    monkeypatch.setattr(
        model_runner,
        "choose_attention",
        lambda name, *given: choose_attention("sdpa" if name == "auto" else name, *given),
    )


@pytest.fixture
def runs(monkeypatch):
    """Every decode batch that graphs ran: its bucket, its columns, its rows, its tokens."""
    seen: list[DecodeBatch] = []
    run = DecodeGraphs.run

    def spy(self, batch):
        seen.append(batch)
        return run(self, batch)

    monkeypatch.setattr(DecodeGraphs, "run", spy)
    return seen


def some_prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens_of(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_graphs_are_for_cuda_and_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    assert choose_capture(torch.device("cpu"), enforce_eager=False) is None
    assert choose_capture(torch.device("cuda"), enforce_eager=True) is None
    assert isinstance(choose_capture(torch.device("cuda"), enforce_eager=False), GraphRecorder)
    assert tiny_llm(enforce_eager=True).engine._runner._graphs is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so that recording succeeds")
def test_a_failed_capture_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    with pytest.raises(RuntimeError, match="enforce_eager=True"):
        GraphRecorder()(lambda: None)


def test_buckets_and_widths():
    assert batch_buckets(1) == [1]
    assert batch_buckets(6) == [1, 2, 4, 6]
    assert batch_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert batch_buckets(36) == [1, 2, 4, 8, 16, 24, 32, 36]
    assert table_widths(5) == [5]
    assert table_widths(16) == [16]
    assert table_widths(100) == [16, 32, 64, 100]


def test_a_batch_gets_the_smallest_bucket_that_holds_it():
    graphs = tiny_llm(max_num_seqs=20, num_blocks=100).engine._runner._graphs
    assert graphs.find(1, 1) == (1, 16)
    assert graphs.find(3, 16) == (4, 16)
    assert graphs.find(9, 17) == (16, 32)
    assert graphs.find(17, 33) == (20, 64)
    assert graphs.find(20, 100) == (20, 100)
    assert graphs.find(21, 1) is None
    assert graphs.find(1, 101) is None


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_every_batch_size_gives_the_tokens_of_the_eager_path(runs, attention):
    most = 10 if attention == "sdpa" else 5  # Triton's interpreter is slow
    if attention == "triton":
        pytest.importorskip("triton", reason="the triton package is not installed")
    options = {
        "max_num_seqs": most,
        "num_blocks": 256,
        "max_num_batched_tokens": 512,
        "attention_backend": attention,
    }
    prompts = some_prompts(most, longest=40 if attention == "sdpa" else 9)
    # Each ends a step after the one before, so that the batch has had every size.
    params = [
        greedy(3 + i) if i % 2 else SamplingParams(max_tokens=3 + i, seed=i, ignore_eos=True)
        for i in range(most)
    ]
    expected = tiny_llm(**options | {"enforce_eager": True, "attention_backend": "sdpa"}).generate(
        prompts, params, use_tqdm=False
    )
    assert not runs
    outputs = tiny_llm(**options).generate(prompts, params, use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(expected)
    assert {len(batch.query_lens) for batch in runs} == set(range(1, most + 1))
    assert {len(batch.inputs) for batch in runs} == set(batch_buckets(most))


def test_any_life_gives_the_tokens_of_the_eager_path(runs):
    """Injection, preemption, shared prefixes, forks, penalties and a change of mode, all at once."""
    rng = random.Random(3)
    prompts = some_prompts(12, longest=20, seed=1)
    prompts[5] = prompts[2] + [7]
    params = [
        greedy(12, n=2)
        if i % 3 == 0
        else SamplingParams(
            max_tokens=15, seed=i, ignore_eos=True, top_p=0.9, repetition_penalty=1.2, logprobs=2
        )
        for i in range(len(prompts))
    ]
    arrivals = sorted(rng.randrange(30) for _ in prompts)
    results = []
    for enforce_eager in (True, False):
        llm = tiny_llm(num_blocks=24, enforce_eager=enforce_eager)
        outputs: dict = {}
        for step in range(200):
            for number, arrival in enumerate(arrivals):
                if arrival == step:
                    llm.engine.add_request(str(number), prompts[number], params[number])
            if step in (20, 26):
                llm.engine.set_mode("static" if step == 20 else "continuous")
            collect(outputs, llm.engine.step())
        assert llm.engine.stats().num_preemptions > 0 and not llm.engine.has_unfinished()
        assert_clean(llm)
        results.append({id: tokens_of([output]) for id, output in outputs.items()})
    assert results[0] == results[1]
    assert len(runs) > 20


class LifeByGraphs(EngineLife):
    """The random lives of `test_properties`, with their checks after every step, on graphs."""


class TestLifeByGraphs(LifeByGraphs.TestCase):
    settings = settings(
        max_examples=20, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_padding_rows_touch_only_the_reserved_block(runs):
    caches = []
    for enforce_eager in (True, False):
        llm = tiny_llm(max_num_seqs=8, enforce_eager=enforce_eager)
        cache = llm.engine._runner._kv_cache
        for layer in cache.layers:
            layer[:] = torch.arange(layer.numel()).view_as(layer) % 7
        for number, prompt in enumerate(some_prompts(5)):
            llm.engine.add_request(str(number), prompt, greedy(9))
        run_to_end(llm)
        stats = llm.engine.stats()
        assert stats.num_used_blocks + stats.num_cached_blocks + stats.num_free_blocks == stats.num_blocks
        assert len(cache.layers[0]) == stats.num_blocks + 1
        caches.append(cache)
    assert any(len(batch.query_lens) < len(batch.inputs) for batch in runs)
    for eager, padded in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(eager[:-1], padded[:-1], rtol=1e-4, atol=1e-4)
        assert not torch.equal(eager[-1], padded[-1])


def test_what_padding_rows_write_reaches_nobody():
    """Were the padding's numbers to overflow, the reserved block would be full of NaN for ever."""
    llm = tiny_llm(max_num_seqs=8)
    for layer in llm.engine._runner._kv_cache.layers:
        layer[-1] = torch.nan
    prompts = some_prompts(5)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(9), use_tqdm=False), strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert_solo(prompt, output.outputs[0].token_ids)


def test_a_row_that_is_not_finite_fails_alone(runs):
    llm = tiny_llm(poisoned_loaded())
    for number in range(3):
        llm.engine.add_request(str(number), [number + 1] * 5, greedy(10))
    for _ in range(3):
        llm.engine.step()
    victim = llm.engine._groups["1"][0]
    victim.token_ids[-1] = POISON  # the token that the host believes in is not the one on the device ...
    llm.engine._runner._sampled_rows.pop(victim)  # ... unless the device is told so
    before = len(runs)
    outputs = run_to_end(llm)
    assert len(runs) > before
    assert {id: output.outputs[0].finish_reason for id, output in outputs.items()} == {
        "0": "length",
        "1": "error",
        "2": "length",
    }
    assert_clean(llm)


def test_buffers_keep_their_place():
    llm = tiny_llm(max_num_seqs=8)
    graphs = llm.engine._runner._graphs
    buffers = {
        "inputs": graphs.inputs,
        "sampled": graphs.sampled,
        "logits": graphs.logits,
        "finite": graphs.finite,
        **{f"layer {i}": layer for i, layer in enumerate(llm.engine._runner._kv_cache.layers)},
    }
    places = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    llm.generate(some_prompts(30), greedy(5), use_tqdm=False)
    now = {name: getattr(graphs, name) for name in ("inputs", "sampled", "logits", "finite")}
    now |= {f"layer {i}": layer for i, layer in enumerate(llm.engine._runner._kv_cache.layers)}
    assert {name: buffer.data_ptr() for name, buffer in now.items()} == places


def test_tokens_of_the_last_step_never_come_from_the_host(runs):
    llm = tiny_llm(max_num_seqs=4)
    for number, prompt in enumerate(some_prompts(4, longest=5)):
        llm.engine.add_request(str(number), prompt, greedy(6 + 3 * number))
    run_to_end(llm)
    for batch in runs:
        num_rows = len(batch.query_lens)
        assert batch.inputs[:num_rows, 0].lt(0).all() and batch.inputs[num_rows:, 0].eq(0).all()
    # When the first request ended, the others moved up, and found their tokens in their old rows.
    assert batch.inputs[0, 0] == -1 and any(batch.inputs[0, 0] == -2 for batch in runs)


def test_lengths_are_in_the_buffers_and_not_in_the_graph():
    """The same recorded function, given longer contexts, computes those."""
    llm = tiny_llm(max_num_seqs=2)
    graphs = llm.engine._runner._graphs
    replays = dict(graphs._replays)
    prompts = [[1, 2, 3], [4] * 30]
    outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
    assert graphs._replays == replays
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_solo(prompt, output.outputs[0].token_ids)


def test_batches_beyond_the_largest_bucket_or_memory_run_eagerly(runs, monkeypatch):
    prompts = some_prompts(5)
    expected = tokens_of(tiny_llm(max_num_seqs=5, enforce_eager=True).generate(prompts, greedy(9), False))
    monkeypatch.setattr(cuda_graphs, "MOST_ROWS", 2)
    assert tokens_of(tiny_llm(max_num_seqs=5).generate(prompts, greedy(9), False)) == expected
    assert all(len(batch.query_lens) <= 2 for batch in runs)
    monkeypatch.undo()


def test_tables_too_wide_to_gather_run_eagerly(monkeypatch):
    monkeypatch.setattr(model_runner, "choose_capture", lambda device, enforce_eager: run_directly)
    monkeypatch.setattr(cuda_graphs, "SMALLEST_WIDTH", 2)
    layer = tiny_llm().engine._runner._kv_cache.layers[0]
    monkeypatch.setattr(cuda_graphs, "GATHER_BYTES", dict.fromkeys(("cpu", "cuda"), 8 * layer[0].nbytes))
    llm = tiny_llm(max_num_seqs=4)
    graphs = llm.engine._runner._graphs
    assert graphs.find(4, 2) == (4, 2) and graphs.find(4, 3) is None
    assert graphs.find(1, 8) == (1, 8) and graphs.find(1, 9) is None
    prompts = some_prompts(4)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(9), False), strict=True):
        assert_solo(prompt, output.outputs[0].token_ids)


class Crossings(TorchDispatchMode):
    """Counts what goes from the host to the device: copies, and tensors of the host used on the device."""

    def __init__(self):
        super().__init__()
        self.copies = self.mixtures = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = {t.device.type for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        self.copies += given == {"cpu"} and made == {"meta"}
        self.mixtures += given == {"cpu", "meta"}
        return result


@pytest.mark.parametrize("prompt_lens", [(8, 8, 8), (90, 8, 3)], ids=["one group", "several"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_has_one_copy_up_and_one_down(graphs, prompt_lens, monkeypatch):
    """On PyTorch's "meta" device, whose tensors have no numbers: reading one back is an error, as is mixing
    them with the host's. So whatever passes here makes no GPU wait, and holds nothing on the wrong side.
    """
    loaded = tiny_loaded()
    meta = torch.device("meta")
    model = load_weights(loaded.path, loaded.config, torch.float32, meta)
    downs = []

    def to_host(numbers):
        downs.append(numbers)
        return torch.ones(numbers.shape, dtype=numbers.dtype)  # token 1 for everybody, and all is finite

    monkeypatch.setattr(transfer, "to_host", to_host)
    llm = tiny_llm(dataclasses.replace(loaded, model=model, device=meta), enforce_eager=not graphs)
    assert isinstance(llm, LLM)
    every = {
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
        "min_tokens": 3,
        "logprobs": 2,
    }
    for number, params in enumerate(
        (greedy(6), SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, **every))
    ):
        llm.engine.add_request(str(number), [5] * prompt_lens[number], params)
    steps = 0
    while llm.engine.has_unfinished():
        downs.clear()
        with Crossings() as crossings:
            outputs = llm.engine.step()
        assert not any(output.error for output in outputs)
        steps += 1
        assert (crossings.copies, crossings.mixtures, len(downs)) == (1, 0, 1)
    assert steps > 5
