"""What can only be seen on a GPU: real graphs, compiled kernels, real copies. Skipped where there is none."""

from __future__ import annotations

import functools

import pytest
import torch

from engine import SamplingParams
from engine.events import StepEvent
from engine.model import LoadedModel, load_model
from tests.support import assert_clean, assert_solo, collect, greedy, run_to_end, tiny_folder, tiny_llm
from tests.test_cuda_graphs import some_prompts, tokens_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="PyTorch sees no CUDA device here; the same logic runs on the CPU in test_cuda_graphs.py",
)
BACKENDS = ["sdpa", "triton"]


@functools.cache
def on_gpu(dtype: str = "float32") -> LoadedModel:
    return load_model(str(tiny_folder()), dtype=dtype, device="cuda")


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("mode", ["naive", "static", "continuous"])
def test_greedy_equals_transformers(mode, attention, enforce_eager):
    llm = tiny_llm(
        on_gpu(),
        mode=mode,
        max_num_seqs=10,
        num_blocks=256,
        attention_backend=attention,
        enforce_eager=enforce_eager,
    )
    prompts = some_prompts(24)
    params = [greedy(3 + i) for i in range(len(prompts))]
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert_solo(prompt, output.outputs[0].token_ids)
    assert_clean(llm)


@pytest.mark.parametrize("attention", BACKENDS)
def test_any_life_is_the_same_with_and_without_graphs(attention):
    """Injection, preemption, forks, penalties and seeds."""
    prompts = some_prompts(12, longest=20, seed=1)
    sampled = {
        "ignore_eos": True,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "logprobs": 2,
        "logit_bias": {9: 2.0},
    }
    params = [
        greedy(12, n=2) if i % 3 == 0 else SamplingParams(max_tokens=15, seed=i, **sampled)
        for i in range(len(prompts))
    ]
    results = []
    for enforce_eager in (True, False):
        llm = tiny_llm(on_gpu(), num_blocks=14, attention_backend=attention, enforce_eager=enforce_eager)
        outputs: dict = {}
        for number, prompt in enumerate(prompts):
            llm.engine.add_request(str(number), prompt, params[number])
            collect(outputs, llm.engine.step())
        collect(outputs, list(run_to_end(llm).values()))
        assert llm.engine.stats().num_preemptions > 0
        assert_clean(llm)
        results.append({id: tokens_of([output]) for id, output in outputs.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("attention", BACKENDS)
def test_half_precision_runs_and_repeats(attention):
    loaded = on_gpu("float16")
    prompts = some_prompts(8)
    first, second = (
        tiny_llm(loaded, max_num_seqs=8, attention_backend=attention).generate(prompts, greedy(12), False)
        for _ in range(2)
    )
    assert tokens_of(first) == tokens_of(second)
    assert all(output.outputs[0].finish_reason == "length" for output in first)


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_decode_step_makes_the_host_wait_only_once(attention):
    """PyTorch raises at all that waits unasked: `.item()`, `.tolist()`, copies of unpinned memory."""
    llm = tiny_llm(on_gpu(), attention_backend=attention)
    for number, params in enumerate((greedy(12), SamplingParams(max_tokens=12, seed=1, top_p=0.9))):
        llm.engine.add_request(str(number), [number + 1] * 4, params)
    for _ in range(4):
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            assert all(output.error is None for output in llm.engine.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run_to_end(llm)


def test_padding_rows_touch_only_the_reserved_block():
    llm = tiny_llm(on_gpu(), max_num_seqs=8)
    cache = llm.engine._runner._kv_cache
    for layer in cache.layers:
        layer.fill_(3.0)
    llm.engine.add_request("a", [1, 2, 3], greedy(6))
    llm.engine.add_request("b", [4, 5, 6], greedy(6))
    llm.engine.add_request("c", [7, 8, 9], greedy(6))  # three rows in a bucket of four
    owned: set[int] = set()
    while llm.engine.has_unfinished():
        llm.engine.step()
        owned |= {block for request in llm.engine._scheduler.running for block in request.block_table}
    others = sorted(set(range(cache.num_blocks)) - owned)
    for layer in cache.layers:
        assert layer[others].eq(3.0).all() and not layer[cache.dummy_block].eq(3.0).all()


def test_the_stages_of_a_step_are_timed_on_the_device():
    llm = tiny_llm(on_gpu())
    reading = llm.engine.events.read()
    llm.generate(some_prompts(4), greedy(10), use_tqdm=False)
    steps = [e for e in llm.engine.events.read(reading.cursor).events if isinstance(e, StepEvent)]
    assert steps and all(step.times.forward > 0 and step.times.sample > 0 for step in steps)


def test_auto_dtype_suits_the_gpu():
    loaded = load_model(str(tiny_folder()), device="cuda")
    fast = torch.cuda.get_device_capability() >= (8, 0)
    assert loaded.dtype == (torch.bfloat16 if fast else torch.float16)
