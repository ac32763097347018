"""Faults of block accounting and prefix caching that engines of this kind have had."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import SamplingParams
from engine.model import load_model
from tests.support import (
    EOS_ID,
    POISON,
    Mirror,
    assert_clean,
    assert_solo,
    collect,
    greedy,
    poisoned_loaded,
    run_to_end,
    tiny_folder,
    tiny_llm,
)


@pytest.mark.parametrize("num_blocks", [13, 17])
def test_stale_count_of_cached_tokens(num_blocks):
    """What was cached when a request was queued is evicted, or computed anew, before it starts."""
    llm = tiny_llm(num_blocks=num_blocks, max_num_seqs=6)
    rng = random.Random(num_blocks)
    shared = [[prefix] * 8 for prefix in (1, 2)]  # two blocks each
    prompts = [shared[i % 2] + [rng.randrange(256) for _ in range(rng.randint(1, 9))] for i in range(32)]
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(14))
    outputs = {}
    while llm.engine.has_unfinished():
        collect(outputs, llm.engine.step())
        llm.engine.check_integrity()
    assert llm.engine.stats().num_preemptions > 0
    assert {output.num_cached_tokens for output in outputs.values()} > {0}
    for number, prompt in enumerate(prompts):
        output = outputs[str(number)]
        assert output.num_cached_tokens % 4 == 0 and output.num_cached_tokens < len(prompt)
        assert_solo(prompt, output.outputs[0].token_ids)
    assert_clean(llm)


def test_counter_drift():
    llm = tiny_llm(num_blocks=9, max_num_seqs=5)
    rng = random.Random(6)
    for number in range(200):
        llm.engine.add_request(str(number), [rng.randrange(3)] * rng.randint(1, 9), greedy(rng.randint(1, 4)))
    while llm.engine.has_unfinished():
        llm.engine.step()
        stats = llm.engine.stats()
        assert min(stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks) >= 0
        assert stats.num_used_blocks + stats.num_cached_blocks + stats.num_free_blocks == 9
    assert_clean(llm)
    assert llm.engine.stats().num_finished == {"length": 200}


@pytest.mark.parametrize("survivor", [0, 1])
def test_shared_block_dropped_while_still_needed(survivor):
    llm = tiny_llm(num_blocks=12, max_num_seqs=4)
    prompts = [[*[7] * 12, 1], [*[7] * 12, 2]]  # three blocks in common
    outputs = {}
    llm.engine.add_request("0", prompts[0], greedy(16))
    collect(outputs, llm.engine.step())
    llm.engine.add_request("1", prompts[1], greedy(16))
    collect(outputs, llm.engine.step())
    assert outputs["1"].num_cached_tokens == 12
    llm.engine.abort(str(1 - survivor))
    for number in range(8):  # a flood: whatever is idle gets evicted
        llm.engine.add_request(f"flood {number}", [20 + number] * 9, greedy(4))
    while llm.engine.has_unfinished():
        collect(outputs, llm.engine.step())
        llm.engine.check_integrity()
    assert_solo(prompts[survivor], outputs[str(survivor)].outputs[0].token_ids)
    assert_clean(llm)


def test_double_free():
    """A request is cancelled in the very tick it ends, and then again, in all the ways to end."""
    llm = tiny_llm(num_blocks=16)
    rng = random.Random(9)
    ends = (greedy(3), greedy(1), SamplingParams(max_tokens=9, logit_bias={EOS_ID: 100}), greedy(3, n=2))
    for number in range(200):
        id = str(number)
        llm.engine.add_request(id, [rng.randrange(4)] * rng.randint(1, 12), ends[number % 4])
        for _ in range(rng.randint(0, 4)):
            finished = any(delta.finished for delta in llm.engine.step())
            if finished:
                assert llm.engine.abort(id) is None
        llm.engine.abort(id)
        assert llm.engine.abort(id) is None
        llm.engine.check_integrity()  # no block twice on the free list, none in two states
    assert_clean(llm)


def test_no_salt_and_no_prompt_logprobs_to_confuse_the_cache():
    for unknown in ("cache_salt", "prompt_logprobs"):
        with pytest.raises(TypeError, match=unknown):
            SamplingParams(**{unknown: "a"})


# -- siblings: what a failure leaves behind in the cache -----------------------------------------------


def fail_next_step(llm, monkeypatch, how):
    """Let the next step give `how`: "nan" logits, or an exception."""
    forward = llm.engine._runner.forward

    def broken(batch):
        logits, finite = forward(batch)
        return (logits * torch.nan, finite) if how == "nan" else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "forward", broken)
        return llm.engine.step()


@pytest.mark.parametrize("how", ["nan", "exception"])
def test_failed_request_takes_the_cache_with_it(how, monkeypatch):
    """Blocks that a failed request had found in the cache are still hit, and still hold the prefix."""
    llm = tiny_llm()
    prefix = [*range(30, 46)]
    llm.generate([prefix], greedy(1), use_tqdm=False)
    llm.engine.add_request("fails", [*prefix, 1, 2], greedy(8))
    assert fail_next_step(llm, monkeypatch, how)[0].outputs[0].finish_reason == "error"
    llm.engine.add_request("fails later", [*prefix, 1, 2], greedy(8))
    llm.engine.step()
    llm.engine.step()
    assert fail_next_step(llm, monkeypatch, how)[0].outputs[0].finish_reason == "error"
    assert_clean(llm)
    (output,) = llm.generate([[*prefix, 1, 2]], greedy(8), use_tqdm=False)
    assert output.num_cached_tokens == 16
    assert_solo([*prefix, 1, 2], output.outputs[0].token_ids)


@pytest.mark.parametrize("chunk", [4, 32])
@pytest.mark.parametrize("end", ["run", "abort", "switch"])
def test_nan_in_the_cache_spreads_to_others(chunk, end):
    """One prompt overflows in its first chunk: nobody shares its blocks, or gets them next."""
    llm = tiny_llm(poisoned_loaded(), num_blocks=12, max_num_batched_tokens=chunk, max_num_seqs=3)
    bad = [1, POISON, *range(2, 20)]
    prompts = {"long": [5] * 11, "short": [6] * 3, "same start": [1, 9]}
    outputs = {}
    llm.engine.add_request("bad", bad, greedy(4))
    for id, prompt in prompts.items():
        llm.engine.add_request(id, prompt, greedy(12))
    collect(outputs, llm.engine.step())
    if end == "abort":
        llm.engine.abort("bad")
    elif end == "switch":
        llm.engine.set_mode("static")
    llm.engine.add_request("bad again", bad, greedy(4))
    collect(outputs, list(run_to_end(llm).values()))
    assert outputs["bad again"].outputs[0].finish_reason == "error"
    assert "not finite" in outputs["bad again"].error
    assert outputs["bad again"].num_cached_tokens == 0
    for id, prompt in prompts.items():
        assert outputs[id].outputs[0].finish_reason == "length"
        assert_solo(prompt, outputs[id].outputs[0].token_ids)
    assert all(layer.isfinite().all() for layer in llm.engine._runner._kv_cache.layers)
    assert_clean(llm)


def test_failed_step_leaves_a_copied_block_empty(monkeypatch):
    """A continuation is admitted with a copy of the prompt's last block in a step that then fails."""
    llm = tiny_llm(max_num_batched_tokens=1, max_num_seqs=3)
    mirror = Mirror(llm)
    prompt = [1, 2, 3]
    llm.engine.add_request("forks", prompt, greedy(5, n=2))
    outputs = {}
    for _ in range(3):
        collect(outputs, llm.engine.step())
    forward, failed = llm.engine._runner.forward, False
    while llm.engine.has_unfinished():
        admitted = llm.engine.stats().num_running == 2 and not failed
        if admitted:
            failed = True
            collect(outputs, fail_next_step(llm, monkeypatch, "exception"))
        else:
            collect(outputs, llm.engine.step())
        mirror.check()
    assert llm.engine._runner.forward == forward
    for output in outputs["forks"].outputs:
        if output.finish_reason == "length":
            assert_solo(prompt, output.token_ids)
    assert_clean(llm)


@pytest.fixture(scope="module", params=["float16", "float32"])
def overflowing_loaded(request, tmp_path_factory):
    """A model whose keys are infinite for the token 65, in the first layer alone.

    The token 66 looks away from such a key, so that it gets no weight and everything later stays finite.
    """
    folder = tmp_path_factory.mktemp("overflowing")
    for file in tiny_folder().iterdir():
        if "token" in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    sizes = {"vocab_size": 272, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        embedding = model.model.embed_tokens.weight
        embedding[:, 0], embedding[:, 1], embedding[65] = 0.3, 0.0, 0.0
        embedding[65, 0], embedding[66, 0], embedding[65, 1] = -0.3, -0.3, 1.5
        attention = model.model.layers[0].self_attn
        for channel in (7, 15):  # the pair that turns slowest with the position
            attention.k_proj.weight[channel] = attention.q_proj.weight[channel] = 0.0
            attention.q_proj.weight[channel, 0] = 1.0
        attention.k_proj.weight[7, 1] = 6e4 if request.param == "float16" else 3e38
    model.save_pretrained(folder)
    return load_model(str(folder), dtype=request.param, device="cpu")


@pytest.mark.parametrize("cached", [True, False])
def test_overflow_that_its_own_request_does_not_see(overflowing_loaded, cached):
    """An infinite key without weight: not in its request's logits, but NaN to the block's next owner."""
    sizes = {"num_blocks": 2, "max_num_seqs": 1, "enable_prefix_caching": cached}
    prompt = [1, 2, 3, 4, 5]
    (alone,) = tiny_llm(overflowing_loaded, **sizes).generate([prompt], greedy(3), use_tqdm=False)
    llm = tiny_llm(overflowing_loaded, **sizes)
    (bad,) = llm.generate([[66, 65]], greedy(1), use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "not finite" in bad.error
    (after,) = llm.generate([prompt], greedy(3), use_tqdm=False)
    assert after.outputs[0].finish_reason == "length"
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    assert all(layer.isfinite().all() for layer in llm.engine._runner._kv_cache.layers)
