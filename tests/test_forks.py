"""n > 1: one prompt, several continuations that share its blocks, in every mode and under every pressure."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineRunner, SamplingParams
from tests.support import (
    POISON,
    Mirror,
    Oracle,
    assert_clean,
    collect,
    greedy,
    poisoned_loaded,
    run_to_end,
    tiny_llm,
)

MODES = ("naive", "static", "continuous")
PROMPT = [*range(1, 11)]  # two blocks of four and a half-full one


def seeded(n: int, **options) -> SamplingParams:
    defaults = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    return SamplingParams(n=n, **(defaults | options))


def check(prompt, params, output) -> None:
    assert [one.index for one in output.outputs] == list(range(params.n))
    for one in output.outputs:
        Oracle(prompt, params, one.index).check(one)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [9, 64])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 10])
def test_each_continuation_is_its_own(mode, caching, num_blocks, length):
    llm = tiny_llm(mode=mode, enable_prefix_caching=caching, num_blocks=num_blocks)
    prompts = [PROMPT[:length], [9] * length]
    params = [seeded(3), seeded(5, seed=1, logprobs=1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        check(prompt, one, output)
        assert output.finished and output.prompt_token_ids == prompt
        assert len({tuple(one.token_ids) for one in output.outputs}) == one.n
    assert_clean(llm)


def test_first_continuation_is_that_of_n_1():
    (single,) = tiny_llm().generate([PROMPT], seeded(1), use_tqdm=False)
    (several,) = tiny_llm().generate([PROMPT], seeded(4), use_tqdm=False)
    assert several.outputs[0].token_ids == single.outputs[0].token_ids
    (again,) = tiny_llm(num_blocks=9, max_num_seqs=2).generate([PROMPT], seeded(4), use_tqdm=False)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in several.outputs]


@pytest.mark.parametrize("caching", [False, True])
def test_prompt_blocks_are_shared_and_the_part_full_one_copied(caching):
    llm = tiny_llm(enable_prefix_caching=caching)
    llm.engine.add_request("x", PROMPT, seeded(3))
    llm.engine.step()
    llm.engine.step()
    tables = [request.block_table for request in llm.engine._scheduler.running]
    assert len(tables) == 3
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert [llm.engine._pool.ref_count(block) for block in tables[0]] == [3, 3, 1]
    assert llm.engine.stats().num_used_blocks == 5
    llm.engine.abort("x")
    assert_clean(llm)


def test_prompt_is_computed_once():
    llm = tiny_llm()
    llm.engine.add_request("x", PROMPT, greedy(2, n=4))
    run_to_end(llm)
    steps = [event for event in llm.engine.events.read(0).events if hasattr(event, "times")]
    computed = sum(use.num_tokens for step in steps for use in step.slots)
    # Of each fork, the prompt's last token, whose logits it needs; and of all four, one token decoded.
    assert computed == len(PROMPT) + 3 + 4


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 10])
def test_prompt_is_computed_once_though_the_first_is_done_before_the_last_comes(caching, length):
    """Two slots for eight; the two end at different times, so somebody always has the prompt's blocks."""
    llm = tiny_llm(max_num_seqs=2, enable_prefix_caching=caching)
    params = seeded(8, max_tokens=6)
    llm.engine.add_request("x", PROMPT[:length], params)
    outputs = run_to_end(llm)
    check(PROMPT[:length], params, outputs["x"])
    steps = [event for event in llm.engine.events.read(0).events if hasattr(event, "times")]
    # The second enters a step after the first, and so on: of each but the first, the prompt's last token.
    assert sum(use.num_tokens for step in steps for use in step.slots) == length + 7 + 8 * 5
    assert_clean(llm)


@pytest.mark.parametrize("mode", MODES)
def test_deltas_carry_indices_and_one_finish(mode):
    llm = tiny_llm(mode=mode, num_blocks=20, max_num_seqs=2)
    params = seeded(3, max_tokens=6)
    llm.engine.add_request("x", PROMPT, params)
    mirror, outputs, finishes = Mirror(llm), {}, []
    while llm.engine.has_unfinished():
        for delta in llm.engine.step():
            assert not outputs or not outputs["x"].finished
            (one,) = delta.outputs
            assert len(one.token_ids) == 1
            finishes += [one.index] if one.finish_reason else []
            assert delta.finished == (len(finishes) == 3)
            collect(outputs, [delta])
        mirror.check()
    check(PROMPT, params, outputs["x"])
    assert sorted(finishes) == [0, 1, 2]


def test_events_and_books_under_preemption():
    llm = tiny_llm(num_blocks=11, max_num_seqs=4)
    mirror = Mirror(llm)
    asked = {str(n): ([n] * (5 + n), seeded(1 + n % 3, seed=n, max_tokens=16)) for n in range(6)}
    for id, (prompt, params) in asked.items():
        llm.engine.add_request(id, prompt, params)
    outputs = {}
    while llm.engine.has_unfinished():
        collect(outputs, llm.engine.step())
        mirror.check()
        llm.engine.check_integrity()
    assert llm.engine.stats().num_preemptions > 0
    for id, (prompt, params) in asked.items():
        check(prompt, params, outputs[id])
    assert_clean(llm)


@pytest.mark.parametrize("steps", range(7))
def test_abort_ends_all_that_is_left(steps):
    llm = tiny_llm(max_num_seqs=2, num_blocks=16)
    params = seeded(4, max_tokens=3)
    llm.engine.add_request("x", PROMPT, params)
    outputs = {}
    for _ in range(steps):
        collect(outputs, llm.engine.step())
    whole = llm.engine.abort("x")
    assert whole.finished and not llm.engine.has_unfinished()
    collect(outputs, [whole])
    for one in outputs["x"].outputs:
        Oracle(PROMPT, params, one.index).check(one, is_whole=one.finish_reason != "abort")
    assert [one.index for one in outputs["x"].outputs] == [0, 1, 2, 3]
    assert llm.engine.abort("x") is None
    assert_clean(llm)


def test_one_that_fails_leaves_the_others(monkeypatch):
    llm = tiny_llm()
    params = seeded(3)
    llm.engine.add_request("x", PROMPT, params)
    outputs = {}
    for _ in range(4):
        collect(outputs, llm.engine.step())
    forward = llm.engine._runner.forward

    def poisoned(batch):
        logits, finite = forward(batch)
        logits = logits.clone()
        logits[1] = torch.nan
        return logits, finite

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "forward", poisoned)
        collect(outputs, llm.engine.step())
    collect(outputs, list(run_to_end(llm).values()))
    reasons = [one.finish_reason for one in outputs["x"].outputs]
    assert sorted(reasons) == ["error", "length", "length"] and outputs["x"].error
    for one in outputs["x"].outputs:
        Oracle(PROMPT, params, one.index).check(one, is_whole=one.finish_reason == "length")
    assert_clean(llm)


def test_prompt_that_fails_fails_all_its_continuations():
    llm = tiny_llm(poisoned_loaded())
    llm.engine.add_request("x", [1, POISON, 2], greedy(3, n=3))
    output = run_to_end(llm)["x"]
    assert [one.finish_reason for one in output.outputs] == ["error"] * 3
    assert_clean(llm)


def test_mode_switch_keeps_all_continuations():
    llm = tiny_llm(num_blocks=24)
    params = seeded(5)
    llm.engine.add_request("x", PROMPT, params)
    outputs = {}
    modes = iter(("static", "naive", "continuous") * 50)
    while llm.engine.has_unfinished():
        for _ in range(3):
            collect(outputs, llm.engine.step())
        llm.engine.set_mode(next(modes))
        llm.engine.check_integrity()
    check(PROMPT, params, outputs["x"])
    assert_clean(llm)


def test_ids_of_a_group_are_in_use():
    llm = tiny_llm()
    llm.engine.add_request("a", [1], greedy(3, n=2))
    for id in ("a", "a:1"):
        with pytest.raises(ValueError, match=id):
            llm.engine.add_request(id, [2], greedy(3))
    llm.engine.add_request("b:1", [1], greedy(3))
    with pytest.raises(ValueError, match="b:1"):
        llm.engine.add_request("b", [2], greedy(3, n=2))
    assert set(run_to_end(llm)) == {"a", "b:1"}


def test_id_of_a_continuation_that_is_done_stays_in_use_till_all_are():
    llm = tiny_llm()
    llm.engine.add_request("a", [1], greedy(3, n=2))
    for _ in range(2):
        llm.engine.step()
    fork = llm.engine._groups["a"][1]
    llm.engine._stop_short(fork, "stop")  # as if it had met its end before the first
    with pytest.raises(ValueError, match="a:1"):
        llm.engine.add_request("a:1", [2], greedy(3))
    assert set(run_to_end(llm)) == {"a"}
    llm.engine.add_request("a:1", [2], greedy(3))
    assert set(run_to_end(llm)) == {"a:1"}
    assert_clean(llm)


ids = st.sampled_from(["a", "a:1", "a:2", "a:1:1"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ids, st.integers(1, 3), st.integers(0, 99), st.sampled_from("asx")), max_size=25))
def test_ids_that_look_like_forks_are_never_mixed_up(actions):
    """Added, stepped and aborted in any order, some ending at once by a sampled end token."""
    llm = tiny_llm(max_num_seqs=2)
    alive = {}
    for id, n, seed, action in actions:
        if action == "a":
            params = seeded(n, seed=seed, max_tokens=1 + seed % 5, stop_token_ids=tuple(range(0, 250, 3)))
            with contextlib.suppress(ValueError):
                llm.engine.add_request(id, [seed], params)
                assert id not in alive
                alive[id] = n
        elif action == "x":
            output = llm.engine.abort(id)
            assert (output is not None) == (alive.pop(id, None) is not None)
            assert output is None or (output.request_id == id and output.finished)
        else:
            for delta in llm.engine.step():
                assert delta.request_id in alive and delta.error is None
                if delta.finished:
                    del alive[delta.request_id]
        assert set(llm.engine.unfinished_ids) == set(alive)
        llm.engine.check_integrity()
    assert set(run_to_end(llm)) == set(alive)
    assert_clean(llm)
    assert not llm.engine._ids_in_use


def test_deltas_on_a_handle_are_not_changed_by_later_ones():
    """They are read at leisure, when the whole has grown already."""
    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    params = seeded(3, logprobs=1)
    handle = runner.submit(PROMPT, params)
    whole = handle.result(30)
    deltas = list(handle)
    runner.shutdown(timeout=20)
    check(PROMPT, params, whole)
    assert all(len(one.token_ids) == 1 for delta in deltas for one in delta.outputs)
    for one in whole.outputs:
        mine = [d.outputs[0] for d in deltas if d.outputs[0].index == one.index]
        assert "".join(delta.text for delta in mine) == one.text
        assert [token for delta in mine for token in delta.token_ids] == one.token_ids
        assert [entry for delta in mine for entry in delta.logprobs] == one.logprobs
