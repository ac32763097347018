"""`n` continuations of one prompt: forks that share its blocks, and one output that holds them all."""

from __future__ import annotations

import pytest

from engine import EngineRunner, SamplingParams
from tests.support import Mirror, assert_clean, assert_solo, collect, greedy, run_to_end, tiny_llm

MODES = ("naive", "static", "continuous")
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]  # two full blocks of 4 and a half


def sampled(n: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=2.0, ignore_eos=True, n=n, **options)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_continuation_is_that_of_its_own_seed(mode, caching):
    options = {"mode": mode, "enable_prefix_caching": caching, "max_model_len": 40}
    (single,) = tiny_llm(**options).generate([PROMPT], sampled(1, seed=5), False)
    llm = tiny_llm(**options)
    (many,) = llm.generate([PROMPT], sampled(3, seed=5), False)
    assert [output.index for output in many.outputs] == [0, 1, 2]
    assert many.outputs[0].token_ids == single.outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in many.outputs}) == 3
    assert all(len(output.token_ids) == 9 and output.finish_reason == "length" for output in many.outputs)
    assert_clean(llm)
    (again,) = tiny_llm(mode="continuous").generate([PROMPT], sampled(3, seed=5), False)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in many.outputs]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 10])
def test_greedy_forks_equal_the_reference_at_every_block_boundary(length):
    llm = tiny_llm()
    (output,) = llm.generate([PROMPT[:length]], greedy(6, n=3), False)
    for continuation in output.outputs:
        assert_solo(PROMPT[:length], continuation.token_ids)
    assert_clean(llm)


@pytest.mark.parametrize("caching", [False, True])
def test_forks_share_full_prompt_blocks_and_copy_the_part_full_one(caching):
    llm = tiny_llm(enable_prefix_caching=caching)
    mirror = Mirror(llm)
    llm.engine.add_request("x", PROMPT, sampled(3, seed=1))
    for _ in range(3):
        llm.engine.step()
        mirror.check()
        llm.engine.check_integrity()
    tables = [request.block_table for request in llm.engine._scheduler.running]
    assert len(tables) == 3
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [llm.engine._pool.ref_count(block) for block in tables[0][:2]] == [3, 3]
    assert len({table[2] for table in tables}) == 3
    computed = sum(
        use.num_tokens for event in llm.engine.events.read(0).events for use in getattr(event, "slots", ())
    )
    assert computed < 2 * len(PROMPT)  # the prompt once, not three times
    run_to_end(llm)
    assert_clean(llm)


def test_forks_survive_preemption_and_mode_switches():
    llm = tiny_llm(num_blocks=12, max_num_seqs=6)
    mirror = Mirror(llm)
    for name in "abc":
        llm.engine.add_request(name, [*PROMPT[:6], ord(name)], greedy(14, n=2))
    outputs = {}
    for step in range(2000):
        if not llm.engine.has_unfinished():
            break
        collect(outputs, llm.engine.step())
        if step in (9, 14, 20):
            llm.engine.set_mode({9: "static", 14: "naive", 20: "continuous"}[step])
        mirror.check()
        llm.engine.check_integrity()
    assert llm.engine.stats().num_preemptions
    for name in "abc":
        assert outputs[name].finished and len(outputs[name].outputs) == 2
        for continuation in outputs[name].outputs:
            assert_solo([*PROMPT[:6], ord(name)], continuation.token_ids)
    assert_clean(llm)


def test_finished_only_when_all_are_and_one_delta_each():
    llm = tiny_llm()
    llm.engine.add_request("x", PROMPT, sampled(4, seed=3, stop_token_ids=list(range(0, 256, 9))))
    deltas = []
    while llm.engine.has_unfinished():
        deltas += llm.engine.step()
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert {delta.request_id for delta in deltas} == {"x"}
    ends = [delta.outputs[0].index for delta in deltas if delta.outputs[0].finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]
    assert_clean(llm)


def test_abort_and_failure_end_all_that_is_left():
    llm = tiny_llm(max_num_seqs=2)
    for steps in (0, 1, 2, 4):
        llm.engine.add_request("x", PROMPT, sampled(4, seed=3))
        for _ in range(steps):
            llm.engine.step()
        output = llm.engine.abort("x")
        assert output.finished and len(output.outputs) == 4
        assert {continuation.finish_reason for continuation in output.outputs} == {"abort"}
        assert llm.engine.abort("x") is None
        assert_clean(llm)


def test_ids_of_continuations_are_in_use_too():
    llm = tiny_llm()
    llm.engine.add_request("x", PROMPT, sampled(2, seed=3))
    for taken in ("x", "x:1"):
        with pytest.raises(ValueError, match="in use"):
            llm.engine.add_request(taken, PROMPT, greedy(2))
    run_to_end(llm)
    assert_clean(llm)


def test_a_handle_gets_all_continuations():
    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    output = runner.submit(PROMPT, sampled(3, seed=5)).result(20)
    runner.shutdown(timeout=20)
    expected = tiny_llm().generate([PROMPT], sampled(3, seed=5), False)[0]
    assert [o.text for o in output.outputs] == [o.text for o in expected.outputs]
