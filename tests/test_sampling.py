"""Sampling: what each parameter does, for one row and beside others."""

from __future__ import annotations

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from engine.sampler import FIRST_CANDIDATES, Sampler
from engine.sampling_plan import _places
from tests.support import EOS_ID, tiny_llm

V = 1200  # more than FIRST_CANDIDATES, so that both ways of ranking are taken


def request(prompt=(), output=(), stop_tokens=None, **params):
    """As much of a request as a sampler reads."""
    params = SamplingParams(max_tokens=100, **params)
    return SimpleNamespace(
        params=params,
        rng=random.Random(params.seed),
        token_ids=[*prompt, *output],
        output_token_ids=list(output),
        num_output_tokens=len(output),
        stop_tokens=stop_tokens or {},
    )


def samples(logits, requests, vocab_size):
    sampler = Sampler(vocab_size)
    plan = sampler.plan(requests)
    return sampler.read(sampler(logits.clone(), plan), plan)


def sample(logits, *requests, vocab_size=V):
    return [one and one.token_id for one in samples(torch.stack(list(logits)), requests, vocab_size)]


def some_logits(seed=0, scale=3.0, size=V):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits, count=400, **params):
    """Counter of `count` tokens drawn with one request's generator."""
    one = request(**params)
    return Counter(samples(logits.unsqueeze(0), [one], len(logits))[0].token_id for _ in range(count))


def test_zero_temperature_top_k_1_and_tiny_top_p_are_greedy():
    logits = some_logits()
    best = int(logits.argmax())
    for params in (
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"temperature": 1e-9},
        {"min_p": 1.0},
    ):
        assert sample([logits], request(seed=3, **params)) == [best], params


@pytest.mark.parametrize("top_k", [-1, 0, V, V + 1, 10**7])
def test_top_k_extremes_mean_unfiltered(top_k):
    logits = some_logits()
    plain = [sample([logits], request(seed=s))[0] for s in range(20)]
    assert [sample([logits], request(seed=s, top_k=top_k))[0] for s in range(20)] == plain


@pytest.mark.parametrize("top_k", [2, 5, FIRST_CANDIDATES + 100])
def test_top_k_keeps_the_k_likeliest(top_k):
    logits = some_logits(scale=0.1)
    allowed = set(logits.topk(top_k).indices.tolist())
    drawn = draws(logits, top_k=top_k, seed=1)
    assert set(drawn) <= allowed
    assert len(drawn) > 1


@pytest.mark.parametrize("scale", [0.05, 3.0])  # flat: beyond the first candidates; peaked: within
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95])
def test_top_p_keeps_the_smallest_set_that_reaches_it(scale, top_p):
    logits = some_logits(scale=scale)
    probs, ids = logits.softmax(-1).sort(descending=True)
    size = int((probs.cumsum(-1) < top_p).sum()) + 1
    assert set(draws(logits, top_p=top_p, seed=1)) <= set(ids[:size].tolist())


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([4.0, 3.0, 2.0, *[1.9] * 50]).log_softmax(-1)
    # Among the first three alone, the first two hold 0.91: 0.9 keeps just these.
    assert set(draws(logits, top_k=3, top_p=0.9, seed=2)) == {0, 1}


def test_top_p_after_a_wide_top_k_uses_its_total():
    logits = torch.zeros(V)
    k = FIRST_CANDIDATES + 88  # 600 equal tokens: half of them reach 0.5
    kept = draws(logits, count=4000, top_k=k, top_p=0.5, seed=5)
    assert len(kept) <= k // 2 + 1


def test_min_p_drops_the_unlikely():
    logits = torch.tensor([5.0, 5.0 + math.log(0.6), 5.0 + math.log(0.4)])
    assert set(draws(logits, min_p=0.5, seed=1)) == {0, 1}


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    for params in ({}, {"top_p": 0.9999}, {"top_k": 3}):
        drawn = draws(logits, count=4000, seed=7, **params)
        for token, probability in enumerate((0.5, 0.3, 0.2)):
            assert abs(drawn[token] / 4000 - probability) < 0.03


def test_temperature_flattens():
    logits = torch.tensor([2.0, 0.0])
    hot, cold = draws(logits, temperature=5.0, seed=1), draws(logits, temperature=0.2, seed=1)
    assert hot[1] > 100 > 5 > cold[1]


def test_repetition_penalty_counts_prompt_and_output():
    logits = torch.tensor([2.0, 1.9, -1.0, -1.1])
    assert sample([logits], request(prompt=[0], temperature=0.0, repetition_penalty=1.2), vocab_size=4) == [1]
    output = request(output=[0, 1], temperature=0.0, repetition_penalty=4.0)
    assert sample([logits], output, vocab_size=4) == [0]  # 0.5 beats 0.475 beats the negatives
    negative = torch.tensor([-1.0, -1.1])
    assert sample([negative], request(prompt=[0], temperature=0.0, repetition_penalty=1.2), vocab_size=2) == [
        1
    ]


def test_presence_and_frequency_count_output_alone():
    logits = torch.tensor([2.0, 1.5, 0.0])
    assert sample([logits], request(prompt=[0], temperature=0.0, presence_penalty=1.0), vocab_size=3) == [0]
    assert sample([logits], request(output=[0], temperature=0.0, presence_penalty=1.0), vocab_size=3) == [1]
    assert sample([logits], request(output=[0], temperature=0.0, frequency_penalty=0.3), vocab_size=3) == [0]
    assert sample([logits], request(output=[0, 0], temperature=0.0, frequency_penalty=0.3), vocab_size=3) == [
        1
    ]
    assert sample([logits], request(output=[1], temperature=0.0, presence_penalty=-1.0), vocab_size=3) == [1]


@given(st.lists(st.lists(st.integers(0, 20), max_size=9), min_size=1, max_size=5))
def test_places_are_those_of_all_tokens_that_have_a_logit(token_lists):
    places = _places(token_lists, 15)
    assert places.dtype == torch.int64 and places.shape[0] == 2
    expected = [[row, token] for row, tokens in enumerate(token_lists) for token in tokens if token < 15]
    assert places.T.tolist() == expected


def test_min_tokens_forbids_the_end():
    logits = torch.tensor([9.0, 1.0, 0.0])
    stops = {0: None}
    early = request(output=[1], temperature=0.0, min_tokens=2, stop_tokens=stops)
    late = request(output=[1, 1], temperature=0.0, min_tokens=2, stop_tokens=stops)
    assert sample([logits, logits], early, late, vocab_size=3) == [1, 0]


def test_rows_that_are_not_finite_are_reported_and_hurt_nobody():
    good = some_logits()
    for bad in (torch.nan, torch.inf):
        broken = good.clone()
        broken[5] = bad
        dead = torch.full_like(good, -torch.inf)
        result = sample([broken, good, dead], *[request(temperature=0.0), request(seed=1), request(seed=2)])
        assert result[0] is None and result[2] is None
        assert result[1] == sample([good], request(seed=1))[0]


def test_padding_of_the_vocabulary_is_never_sampled():
    logits = torch.zeros(V)
    logits[900:] = 50.0
    for params in ({"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.9}, {"seed": 1, "top_k": 1000}):
        assert sample([logits], request(**params), vocab_size=900)[0] < 900


@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_candidates_first_or_all_at_once_choose_alike(scale, monkeypatch):
    """A GPU ranks the whole vocabulary at once; a CPU first looks at the likeliest few hundred."""
    logits = some_logits(scale=scale)
    every = [{"top_p": 0.5}, {"top_p": 0.99}, {"top_k": 7}, {"top_k": 900, "top_p": 0.9}]
    drawn = []
    for candidates in (FIRST_CANDIDATES, V):
        monkeypatch.setattr("engine.sampler.FIRST_CANDIDATES", candidates)
        drawn.append([sample([logits], request(seed=s, **one))[0] for one in every for s in range(20)])
    assert drawn[0] == drawn[1]


params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 1, 3, 50, 700]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 5),
    }
)


@given(st.lists(params, min_size=2, max_size=5))
def test_a_row_does_not_depend_on_its_neighbours(rows):
    logits = [some_logits(seed) for seed in range(len(rows))]
    make = [lambda kwargs=kwargs: request(prompt=[1, 2], output=[3, 3], **kwargs) for kwargs in rows]
    together = sample(logits, *[one() for one in make])
    alone = [sample([row], one())[0] for row, one in zip(logits, make, strict=True)]
    assert together == alone


def test_seeded_output_does_not_depend_on_batch_mates_preemption_or_mode():
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=42, ignore_eos=True)
    expected = tiny_llm().generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    others = [SamplingParams(max_tokens=25, temperature=1.0, seed=s, ignore_eos=True) for s in range(5)]
    for options in ({}, {"mode": "static"}, {"mode": "naive"}, {"num_blocks": 12, "max_num_seqs": 6}):
        llm = tiny_llm(**options)
        outputs = llm.generate(
            [[9] * 5] * 3 + [[1, 2, 3]] + [[8] * 4] * 2, [*others[:3], params, *others[3:]], False
        )
        assert outputs[3].outputs[0].token_ids == expected, options


def test_requests_without_a_seed_differ_but_runs_repeat():
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    runs = [
        [o.outputs[0].token_ids for o in tiny_llm(seed=s).generate([[1]] * 3, params, False)]
        for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.5, None, True, "3"]),
        ("min_tokens", [-1, 17]),  # 17 is more than max_tokens
        ("temperature", [-0.1, math.nan, math.inf, "hot", None]),
        ("top_k", [-2, 1.5]),
        ("top_p", [0.0, -0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, 1e-42, math.nan]),
        ("presence_penalty", [2.1, -2.1, math.nan]),
        ("frequency_penalty", [2.1, -2.1, math.nan]),
        ("seed", [1.5, "x"]),
        ("stop", ["", ["a", ""], [3]]),
        ("stop_token_ids", ["12", [-1], [1.5], 3]),
        ("ignore_eos", [1, None]),
        ("skip_special_tokens", ["no"]),
        ("n", [0, -1, 1.5, 10**6]),
        ("logprobs", [-1, 21, 1.5, True]),
        ("logit_bias", [[1], {-1: 2.0}, {"a": 1.0}, {1: 101.0}, {1: math.nan}]),
    ],
)
def test_bad_values_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


def test_end_token_stops_unless_ignored():
    llm = tiny_llm()
    prompt = [1, 2, 3]
    free = llm.generate([prompt], SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True), False)[0]
    third = free.outputs[0].token_ids[2]
    first_at = free.outputs[0].token_ids.index(third)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, stop_token_ids=[third])
    (stopped,) = llm.generate([prompt], params, False)
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: first_at + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", third)
    # On the last allowed token, a stop is a stop.
    params = SamplingParams(max_tokens=first_at + 1, temperature=0.0, ignore_eos=True, stop_token_ids=[third])
    assert llm.generate([prompt], params, False)[0].outputs[0].finish_reason == "stop"
    params = SamplingParams(
        max_tokens=10, min_tokens=first_at + 1, temperature=0.0, ignore_eos=True, stop_token_ids=[third]
    )
    later = llm.generate([prompt], params, False)[0].outputs[0].token_ids
    assert third not in later[: first_at + 1]
    assert EOS_ID in llm.engine._factory._eos_token_ids


def test_ids_that_the_tokenizer_does_not_know_are_never_sampled():
    """Gaps in the vocabulary, be they ever so likely."""
    gaps = [1, 4]
    sampler = Sampler(6, gaps)
    logits = torch.tensor([[0.0, 9.0, 1.0, 0.0, 9.0, 0.0]] * 3)
    requests = [
        request(temperature=0.0),
        request(temperature=1.0, seed=1),
        request(temperature=1.0, top_p=0.9, seed=2),
    ]
    for _ in range(20):
        plan = sampler.plan(requests)
        greedy, *random_ones = sampler.read(sampler(logits.clone(), plan), plan)
        assert greedy.token_id == 2
        assert not {one.token_id for one in random_ones} & set(gaps)
