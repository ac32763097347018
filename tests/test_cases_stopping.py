"""Faults of stopping: text that leaks or is lost, end tokens overlooked, reasons reported wrong or late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import SamplingParams
from tests.support import EOS, EOS_ID, assert_clean, greedy, run_to_end, tiny_llm, tiny_loaded, token_of

MODES = ("naive", "static", "continuous")
BOS_ID = 256


def stream(llm, prompt, params):
    """The deltas of one request, and the number of the step each came from."""
    llm.engine.add_request("x", prompt, params)
    deltas = []
    for step in range(1000):
        if not llm.engine.has_unfinished():
            return deltas
        deltas += [(step, delta) for delta in llm.engine.step()]
    raise AssertionError("it never ends")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_stop_text_wrongly_included(mode, include):
    llm = tiny_llm(mode=mode)
    params = SamplingParams(
        max_tokens=40,
        temperature=8.0,
        seed=2,
        ignore_eos=True,
        logit_bias={token_of("a"): 100.0, token_of("b"): 100.0},
        stop=["bbba", "abab"],
        include_stop_str_in_output=include,
    )
    deltas = [delta for _, delta in stream(llm, [1], params)]
    text = "".join(delta.outputs[0].text for delta in deltas)
    last = deltas[-1].outputs[0]
    tokens = [token for delta in deltas for token in delta.outputs[0].token_ids]
    decoded = llm.tokenizer.decode(tokens)
    assert last.finish_reason == "stop" and last.stop_reason in params.stop
    assert decoded.endswith(last.stop_reason)
    assert text == (decoded if include else decoded.removesuffix(last.stop_reason))
    assert not any(stop in decoded[:-1] for stop in params.stop)
    (whole,) = llm.generate([[1]], params, use_tqdm=False)
    assert (whole.outputs[0].text, whole.outputs[0].stop_reason) == (text, last.stop_reason)


def test_text_held_back_is_lost_at_the_end():
    """The beginning of a stop string is shown once nothing can complete it: at the last token or an abort."""
    bias = {token_of("a"): 100}
    llm = tiny_llm()
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logit_bias=bias, stop="aaaaaaaab")
    deltas = [delta.outputs[0] for _, delta in stream(llm, [1], params)]
    assert [delta.text for delta in deltas] == ["", "", "", "", "aaaaa"]
    assert deltas[-1].finish_reason == "length"
    llm.engine.add_request("y", [1], params)
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.abort("y").outputs[0].text == "aaa"
    assert_clean(llm)


@pytest.mark.parametrize("ends", [(EOS_ID, BOS_ID), (EOS_ID, 65)])
def test_end_token_list_overrides_ignore_eos(ends):
    """Whichever end token is forced: it ends the output and stays unseen, or, if ignored, never ends it."""
    llm = tiny_llm(replace(tiny_loaded(), eos_token_ids=frozenset(ends)))
    for end in ends:
        params = SamplingParams(max_tokens=7, temperature=0.0, logit_bias={end: 100})
        output = llm.generate([[1]], params, use_tqdm=False)[0].outputs[0]
        assert (output.token_ids, output.text, output.finish_reason) == ([end], "", "stop")
        output = llm.generate([[1]], replace(params, ignore_eos=True), use_tqdm=False)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == ([end] * 7, "length")
        shown = replace(params, skip_special_tokens=False)
        assert llm.generate([[1]], shown, use_tqdm=False)[0].outputs[0].text == ""
        late = llm.generate([[1]], replace(params, min_tokens=4), use_tqdm=False)[0].outputs[0]
        assert len(late.token_ids) == 5 and late.token_ids[-1] == end
        assert not set(ends) & set(late.token_ids[:4])


def test_finish_reported_late_or_wrong():
    """Stop on the very last token allowed, plain length, stop string: with that token, not a step later."""
    cases = [
        (SamplingParams(max_tokens=3, min_tokens=2, logit_bias={EOS_ID: 100}), "stop", 3),
        (greedy(3), "length", 3),
        (
            SamplingParams(max_tokens=9, ignore_eos=True, stop="aa", logit_bias={token_of("a"): 100}),
            "stop",
            2,
        ),
        (SamplingParams(max_tokens=1, logit_bias={EOS_ID: 100}), "stop", 1),
        (greedy(1), "length", 1),
    ]
    for params, reason, count in cases:
        deltas = stream(tiny_llm(), [1, 2], params)
        assert [len(delta.outputs[0].token_ids) for _, delta in deltas] == [1] * count, reason
        assert [step for step, _ in deltas] == list(range(count))
        assert [delta.outputs[0].finish_reason for _, delta in deltas] == [None] * (count - 1) + [reason]
        assert [delta.finished for _, delta in deltas] == [False] * (count - 1) + [True]


@pytest.mark.parametrize("mode", MODES)
def test_context_limit_off_by_one(mode):
    llm = tiny_llm(mode=mode, num_blocks=12, max_model_len=22)
    for length in (1, 20, 21):
        output = llm.generate([[3] * length], greedy(100), use_tqdm=False)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (22 - length, "length")
    with pytest.raises(ValueError, match="context limit is 22"):
        llm.generate([[3] * 22], greedy(1), use_tqdm=False)
    end = SamplingParams(max_tokens=100, temperature=0.0, logit_bias={EOS_ID: 100})
    assert llm.generate([[3] * 21], end, use_tqdm=False)[0].outputs[0].finish_reason == "stop"


def test_stop_strings_count_only_from_min_tokens_on():
    bias = {token_of("a"): 100}
    options = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True, "logit_bias": bias}
    for least in range(6):
        output = (
            tiny_llm()
            .generate([[1]], SamplingParams(stop="a", min_tokens=least, **options), False)[0]
            .outputs[0]
        )
        assert len(output.token_ids) == max(least, 1) and output.finish_reason == "stop"
        assert output.text == "a" * (max(least, 1) - 1)


def test_special_token_as_stop_string_is_matched_shown_or_not():
    for skip in (True, False):
        for include in (True, False):
            params = SamplingParams(
                max_tokens=5,
                temperature=0.0,
                ignore_eos=True,
                stop=["<|eos|>"],
                skip_special_tokens=skip,
                include_stop_str_in_output=include,
                logit_bias={EOS_ID: 100},
            )
            llm = tiny_llm()
            llm.engine.add_request("x", [1], params)
            output = run_to_end(llm)["x"].outputs[0]
            assert (output.finish_reason, output.stop_reason) == ("stop", "<|eos|>")
            assert output.text == ("<|eos|>" if include and not skip else "")


def test_stop_string_that_the_text_can_never_contain():
    """A special token is not shown, so a stop string with one inside is refused instead of ignored."""
    with pytest.raises(ValueError, match=r"stop: .*skip_special_tokens=False"):
        tiny_llm().generate(["x"], SamplingParams(stop=[f"a{EOS}"]), use_tqdm=False)
    shown = SamplingParams(stop=[f"{EOS}{EOS}"], skip_special_tokens=False, ignore_eos=True, max_tokens=9)
    biased = replace(shown, logit_bias={EOS_ID: 100.0}, temperature=0.0)
    (output,) = tiny_llm().generate(["x"], biased, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", f"{EOS}{EOS}")
