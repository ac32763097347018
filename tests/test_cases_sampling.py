"""Faults of sampling: extremes that crash or are ignored, parameters of one row that harm another."""

from __future__ import annotations

import math

import pytest

from engine import SamplingParams
from tests.support import (
    NUM_TOKENS,
    VOCAB_SIZE,
    assert_clean,
    assert_solo,
    greedy,
    reference_logits,
    run_to_end,
    tiny_llm,
    token_of,
)


def beside_a_greedy_one(params: SamplingParams, prompt=(1, 2, 3)):
    """The output for `params`, run together with a plain request that must not notice."""
    llm = tiny_llm()
    llm.engine.add_request("plain", [5, 6], greedy(6))
    llm.engine.add_request("odd", list(prompt), params)
    outputs = run_to_end(llm)
    assert_solo([5, 6], outputs["plain"].outputs[0].token_ids)
    assert len(outputs["plain"].outputs[0].token_ids) == 6
    assert_solo([7], llm.generate([[7]], greedy(2), use_tqdm=False)[0].outputs[0].token_ids)
    assert_clean(llm)
    return outputs["odd"].outputs[0]


def test_top_k_extremes_crash_or_mean_greedy():
    def tokens(top_k):
        params = SamplingParams(max_tokens=9, temperature=1.5, seed=4, top_k=top_k, ignore_eos=True)
        return beside_a_greedy_one(params).token_ids

    unfiltered = tokens(-1)
    for top_k in (0, NUM_TOKENS, NUM_TOKENS + 1, VOCAB_SIZE, 10**7):
        assert tokens(top_k) == unfiltered
    assert_solo([1, 2, 3], tokens(1))


@pytest.mark.parametrize(
    "odd",
    [
        {"top_p": 1e-50},
        {"top_p": 1e-50, "top_k": 3},
        {"min_p": 1e-50},
        {"temperature": 1e39},
        {"temperature": 1e39, "min_tokens": 4, "stop_token_ids": [3]},
        {"temperature": 1e-5},
        {"repetition_penalty": 1e39},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e-3, "top_p": 0.5},
        {"min_tokens": 3, "stop_token_ids": range(NUM_TOKENS)},
        {"min_tokens": 3, "stop_token_ids": range(NUM_TOKENS), "top_k": 4},
        {"logit_bias": dict.fromkeys(range(NUM_TOKENS), -100.0)},
        {"logit_bias": dict.fromkeys(range(NUM_TOKENS), 100)},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 0.01},
    ],
)
def test_extreme_parameters_harm_everyone(odd):
    """What float32 cannot hold, or what leaves no token to choose, is at most this request's own error."""
    output = beside_a_greedy_one(SamplingParams(max_tokens=6, seed=1, ignore_eos=True, **odd))
    assert output.finish_reason in ("length", "stop", "error")
    assert all(0 <= token < NUM_TOKENS for token in output.token_ids)
    if "top_p" in odd and "repetition_penalty" not in odd:
        assert_solo([1, 2, 3], output.token_ids)


def test_prompt_token_that_is_padding_meets_a_penalty():
    params = SamplingParams(max_tokens=4, seed=1, repetition_penalty=1.3, ignore_eos=True)
    output = beside_a_greedy_one(params, prompt=[NUM_TOKENS, VOCAB_SIZE - 1, 1])
    assert output.finish_reason == "length"


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_numbers_beyond_floats(value):
    for field in ("temperature", "top_p", "repetition_penalty", "presence_penalty"):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


def test_parameter_accepted_but_ignored():
    """Each one, given an extreme value, is seen in the output."""

    def run(prompt=(1, 2, 3), **params):
        options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | params
        return tiny_llm().generate([list(prompt)], SamplingParams(**options), False)[0].outputs[0]

    plain, hot = run(), run(temperature=3.0, seed=0)
    first = plain.token_ids[0]
    assert len(run(max_tokens=2).token_ids) == 2
    assert hot.token_ids != plain.token_ids != run(temperature=3.0, seed=1).token_ids
    for cold in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert run(temperature=3.0, seed=0, **cold).token_ids == plain.token_ids
    once = run(repetition_penalty=1e6, max_tokens=12).token_ids
    assert len(set(once)) > len(set(plain.token_ids[:12])) or len(set(once)) == 12
    assert len(set(run(presence_penalty=2.0).token_ids)) > len(set(run(presence_penalty=-2.0).token_ids))
    assert len(set(run(frequency_penalty=2.0).token_ids)) > len(set(run(frequency_penalty=-2.0).token_ids))
    assert set(run(logit_bias={7: 100}).token_ids) == {7}
    assert first not in run(logit_bias={first: -100}).token_ids
    assert run(stop_token_ids=[first]).token_ids == [first]
    assert len(run(stop_token_ids=[first], min_tokens=5).token_ids) >= 5
    letters = {"logit_bias": {token_of("a"): 100}}
    assert run(**letters, stop="aaa").text == ""
    assert run(**letters, stop="aaa", include_stop_str_in_output=True).text == "aaa"
    end = {"logit_bias": {257: 100}, "max_tokens": 3}
    assert run(**end, ignore_eos=False).finish_reason == "stop" != run(**end).finish_reason
    assert (run(**end).text, run(**end, skip_special_tokens=False).text) == ("", "<|eos|>" * 3)
    assert plain.logprobs is None and len(run(logprobs=1).logprobs[0]) == 1
    assert [o.index for o in tiny_llm().generate([[1]], greedy(1, n=3), False)[0].outputs] == [0, 1, 2]


# -- logit_bias ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_forces_and_forbids(temperature):
    llm = tiny_llm()
    options = {"max_tokens": 12, "temperature": temperature, "seed": 3, "ignore_eos": True}
    (forced,) = llm.generate([[1, 2]], SamplingParams(logit_bias={9: 100}, **options), False)
    assert forced.outputs[0].token_ids == [9] * 12
    (free,) = llm.generate([[1, 2]], SamplingParams(**options), False)
    seen = set(free.outputs[0].token_ids)
    (without,) = llm.generate(
        [[1, 2]], SamplingParams(logit_bias=dict.fromkeys(seen, -100.0), **options), False
    )
    assert not seen & set(without.outputs[0].token_ids)


def test_bias_is_added_before_penalties_and_filters():
    logits = reference_logits((1, 2, 3))
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    for bias, expected in ((gap + 0.01, second), (gap - 0.01, best)):
        params = SamplingParams(max_tokens=1, top_k=1, logit_bias={second: bias}, ignore_eos=True)
        (output,) = tiny_llm().generate([[1, 2, 3]], params, False)
        assert output.outputs[0].token_ids == [expected]


@pytest.mark.parametrize("token", [NUM_TOKENS, VOCAB_SIZE - 1, VOCAB_SIZE, 10**9])
def test_tokens_that_can_never_come_are_refused(token):
    """An id that is none, or padding of the vocabulary: accepted, it would do nothing."""
    for name, value in (("logit_bias", {token: 5.0}), ("stop_token_ids", [token])):
        with pytest.raises(ValueError, match=f"{name}.*{token}"):
            tiny_llm().generate([[1]], SamplingParams(**{name: value}), False)


# -- logprobs ------------------------------------------------------------------------------------------

CHANGES = [
    {"temperature": 0.0},
    {"temperature": 0.3, "seed": 1},
    {"temperature": 1.0, "seed": 1, "top_p": 0.5},
    {"temperature": 2.0, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"temperature": 1.0, "seed": 1, "logit_bias": {5: 9.0, 6: -100.0}},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [0, 1, 2]},
]


def check_logprobs(prompt, output, k):
    """Against transformers: the model's own probabilities, whatever sampling did to them."""
    assert len(output.logprobs) == len(output.token_ids)
    for position, (token, entries) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected = reference_logits((*prompt, *output.token_ids[:position])).log_softmax(-1)
        ranking = expected.argsort(descending=True).tolist()
        assert token in entries and len(entries) in (k, k + 1)
        for id, entry in entries.items():
            assert math.isfinite(entry.logprob) and entry.logprob <= 0
            assert entry.logprob == pytest.approx(float(expected[id]), abs=1e-4)
            ranked = float(expected[ranking[entry.rank - 1]])  # near-ties may swap their ranks
            assert ranked == pytest.approx(float(expected[id]), abs=1e-4)
        assert {entry.rank for entry in entries.values()} >= set(range(1, k + 1))


@pytest.mark.parametrize("k", [0, 1, 3, 20])
def test_logprobs_are_distorted_by_sampling_parameters(k):
    llm = tiny_llm(max_num_seqs=8)
    prompts = [[n, 2, 3] for n in range(len(CHANGES))]
    params = [SamplingParams(max_tokens=6, logprobs=k, ignore_eos=True, **change) for change in CHANGES]
    for prompt, output in zip(prompts, llm.generate(prompts, params, False), strict=True):
        check_logprobs(prompt, output.outputs[0], k)
        for entries in output.outputs[0].logprobs:
            for id, entry in entries.items():
                assert entry.decoded_token == llm.tokenizer.decode([id])


@pytest.mark.parametrize("mode", ["naive", "static", "continuous"])
def test_stream_repeats_logprobs(mode):
    """One entry a token in the deltas, and joined the same as in the whole; modes and preemption agree."""
    prompts = [[n] * 7 for n in range(5)]
    params = SamplingParams(max_tokens=20, logprobs=3, temperature=0.7, seed=8, ignore_eos=True)
    expected = [output.outputs[0] for output in tiny_llm().generate(prompts, params, False)]
    llm = tiny_llm(mode=mode, num_blocks=14 if mode == "continuous" else 64)
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, params)
    joined = {str(number): [] for number in range(5)}
    while llm.engine.has_unfinished():
        for delta in llm.engine.step():
            (output,) = delta.outputs
            assert len(output.logprobs) == len(output.token_ids)
            joined[delta.request_id] += output.logprobs
    assert (llm.engine.stats().num_preemptions > 0) == (mode == "continuous")
    for number, whole in enumerate(expected):
        assert [list(entries) for entries in joined[str(number)]] == [list(e) for e in whole.logprobs]
        for one, other in zip(joined[str(number)], whole.logprobs, strict=True):
            for id, entry in one.items():
                assert entry.logprob == pytest.approx(other[id].logprob, abs=1e-4)


def test_only_rows_that_ask_get_logprobs():
    llm = tiny_llm()
    asked = [None, 2, None, 0]
    params = [greedy(4, logprobs=k) for k in asked]
    outputs = llm.generate([[1], [2], [3], [4]], params, False)
    for k, output in zip(asked, outputs, strict=True):
        if k is None:
            assert output.outputs[0].logprobs is None
        else:
            check_logprobs(output.prompt_token_ids, output.outputs[0], k)


def test_seeds_that_look_alike():
    """Of opposite sign, or of a request and of the engine: each has a stream of its own."""

    def run(seed, **options):
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True, **options)
        (output,) = tiny_llm(seed=5).generate([[1, 2, 3]], params, use_tqdm=False)
        return [tuple(one.token_ids) for one in output.outputs]

    streams = [*run(5, n=3), *run(-5), *run(None, n=3), *run(0)]
    assert len(set(streams)) == len(streams)
    assert run(5, n=3)[0] == run(5)[0]
