"""Faults of scheduling: livelock, starvation, lost places, wrong order, results mixed up."""

from __future__ import annotations

import random

import pytest

from engine.scheduler import MAX_OVERTAKES
from tests.support import (
    Mirror,
    assert_clean,
    assert_solo,
    collect,
    greedy,
    reference_model,
    run_to_end,
    tiny_folder,
    tiny_llm,
)


def test_resumed_tokens_count_as_prompt():
    """Penalties, log-probabilities and usage are the same with and without preemptions."""
    params = greedy(24, frequency_penalty=1.0, logprobs=2)
    prompts = [[10 * n + i for i in range(9)] for n in range(4)]
    roomy, tight = tiny_llm(num_blocks=64), tiny_llm(num_blocks=14)
    for expected, output in zip(
        roomy.generate(prompts, params, False), tight.generate(prompts, params, False), strict=True
    ):
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert len(output.outputs[0].logprobs) == 24
        for one, other in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            assert {token: pytest.approx(p.logprob, abs=1e-4) for token, p in other.items()} == {
                token: p.logprob for token, p in one.items()
            }
    assert tight.engine.stats().num_preemptions > 0 == roomy.engine.stats().num_preemptions
    assert tight.engine.stats().num_prompt_tokens == 36 and tight.engine.stats().num_output_tokens == 96


def test_victim_was_already_scheduled_in_the_same_step():
    """A full pool, and urgent arrivals in every step: nobody is put out and computed in one step."""
    llm = tiny_llm(num_blocks=12, max_num_seqs=5)
    mirror = Mirror(llm)
    outputs, prompts = {}, {}
    for number in range(24):
        id = str(number)
        prompts[id] = [number] * (1 + number % 7)
        llm.engine.add_request(id, prompts[id], greedy(9), priority=-number)
        collect(outputs, llm.engine.step())
        mirror.check()
    while llm.engine.has_unfinished():
        collect(outputs, llm.engine.step())
        mirror.check()
    assert llm.engine.stats().num_preemptions > 0
    for id, prompt in prompts.items():
        assert len(outputs[id].outputs[0].token_ids) == 9
        assert_solo(prompt, outputs[id].outputs[0].token_ids)
    assert_clean(llm)


def test_urgent_waits_behind_low():
    """All slots busy: who is urgent gets the next one that falls free. Whoever runs is left to run."""
    llm = tiny_llm(max_num_seqs=2)
    for id in ("busy 1", "busy 2"):
        llm.engine.add_request(id, [1], greedy(6))
    llm.engine.step()
    for id, priority in (("low", 3), ("low too", 3), ("urgent", -2), ("normal", 0)):
        llm.engine.add_request(id, [2], greedy(6), priority)
    run_to_end(llm)
    kinds = ("admitted", "injected")
    entered = [e.request_id for e in llm.engine.events.read(0).events if getattr(e, "kind", "") in kinds]
    assert entered == ["busy 1", "busy 2", "urgent", "normal", "low", "low too"]
    assert llm.engine.stats().num_preemptions == 0


@pytest.mark.parametrize("newcomers", ["short", "long prompts", "long answers"])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_preempted_or_normal_request_starves_behind_urgent_newcomers(newcomers, num_blocks):
    """Two urgent requests a step for as long as it takes: what came before them ends all the same."""
    llm = tiny_llm(num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=48)
    prompts = {"normal": [1] * 14, "second": [2] * 6, "forks": [3] * 7}
    outputs = {}
    for id, prompt in prompts.items():
        llm.engine.add_request(id, prompt, greedy(20, n=1 + (id == "forks")))
    left = set(prompts)
    length, max_tokens = {"short": (2, 2), "long prompts": (20, 1), "long answers": (2, 24)}[newcomers]
    for step in range(3000):
        for which in range(2):
            id = f"{step}.{which}"
            llm.engine.add_request(id, [(step + i) % 256 for i in range(length)], greedy(max_tokens), -1)
        deltas = llm.engine.step()
        left -= {delta.request_id for delta in deltas if delta.finished}
        collect(outputs, deltas)
        if not left:
            break
    assert not left, f"{left} starved for {step} steps"
    for id, prompt in prompts.items():
        for output in outputs[id].outputs:
            assert_solo(prompt, output.token_ids)
    most = {"short": 300, "long prompts": 700, "long answers": 1500}[newcomers]
    assert step < most


def test_overtaken_so_often_and_no_more():
    llm = tiny_llm(max_num_seqs=1)
    llm.engine.add_request("busy", [1], greedy(2))
    llm.engine.step()
    llm.engine.add_request("patient", [2], greedy(2))
    for number in range(3 * MAX_OVERTAKES):
        llm.engine.add_request(f"urgent {number}", [3], greedy(1), -1)
    finished = [out for _ in range(100) for out in llm.engine.step() if out.finished]
    assert [out.request_id for out in finished].index("patient") == 1 + MAX_OVERTAKES


def test_what_one_has_waited_is_not_handed_down():
    """The first in line gives up just before its turn; the next has waited for nobody yet."""
    llm = tiny_llm(max_num_seqs=1)
    llm.engine.add_request("busy", [1], greedy(2))
    llm.engine.step()
    llm.engine.add_request("gives up", [2], greedy(2), priority=1)
    llm.engine.add_request("next", [2], greedy(2), priority=1)
    for number in range(2 * MAX_OVERTAKES):
        llm.engine.add_request(f"urgent {number}", [3], greedy(1))
    finished = []
    while llm.engine.has_unfinished():
        finished += [out.request_id for out in llm.engine.step() if out.finished]
        if finished[-1:] == [f"urgent {MAX_OVERTAKES - 2}"]:
            llm.engine.abort("gives up")
    assert finished.index("next") == 1 + (MAX_OVERTAKES - 1) + MAX_OVERTAKES


def test_queue_holds_each_of_many_waiting_continuations_once():
    """While a long prompt with n continuations is computed, waiting costs no more memory every step."""
    llm = tiny_llm(num_blocks=256, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=500)
    llm.engine.add_request("many", [1] * 400, greedy(1, n=40))
    for _ in range(60):
        llm.engine.step()
    queue = llm.engine._scheduler.waiting
    assert len(queue) == 39
    assert len(queue._by_service._heap) <= 40 and len(queue._by_arrival._heap) <= 40


@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_prompt_waits_for_a_long_prefill(n):
    """Nor for one that is to be shared by several continuations, which themselves must wait for it."""
    llm = tiny_llm(num_blocks=128, max_num_batched_tokens=16, max_model_len=400)
    outputs = {}
    llm.engine.add_request("long", [1] * 320, greedy(3, n=n))
    collect(outputs, llm.engine.step())
    llm.engine.add_request("short", [2] * 5, greedy(3))
    first = []
    while llm.engine.has_unfinished():
        deltas = llm.engine.step()
        first += [delta.request_id for delta in deltas if delta.request_id not in first]
        collect(outputs, deltas)
    assert first == ["short", "long"]
    for id, prompt in (("long", [1] * 320), ("short", [2] * 5)):
        for output in outputs[id].outputs:
            assert_solo(prompt, output.token_ids)


def test_unfitting_head_and_its_smaller_followers():
    """Documented: nobody overtakes a head that waits for blocks, so neither side starves."""
    llm = tiny_llm(num_blocks=16, max_num_seqs=4)
    llm.engine.add_request("half", [1] * 28, greedy(8))
    llm.engine.step()
    llm.engine.add_request("big", [2] * 40, greedy(4))
    prompts = {"half": [1] * 28, "big": [2] * 40}
    outputs, finished = {}, []
    for number in range(60):
        id = f"small {number}"
        if number < 20:
            prompts[id] = [3, number]
            llm.engine.add_request(id, prompts[id], greedy(3))
        deltas = llm.engine.step()
        collect(outputs, deltas)
        finished += [delta.request_id for delta in deltas if delta.finished]
    kinds = ("admitted", "injected")
    entered = [e.request_id for e in llm.engine.events.read(0).events if getattr(e, "kind", "") in kinds]
    assert entered[:2] == ["half", "big"]
    assert len(finished) == 22
    for id, prompt in prompts.items():
        assert_solo(prompt, outputs[id].outputs[0].token_ids)


@pytest.mark.parametrize("mode", ["naive", "static", "continuous"])
def test_lost_wake_up(mode):
    """At the limit of slots, cancelled at random: a queue never stands still before idle slots."""
    llm = tiny_llm(mode=mode, max_num_seqs=3, num_blocks=32, max_model_len=40)
    rng = random.Random(26)
    alive: list[str] = []
    for tick in range(300):
        for _ in range(rng.randint(0, 2)):
            alive.append(f"{tick} {len(alive)}")
            llm.engine.add_request(alive[-1], [tick % 256] * rng.randint(1, 20), greedy(rng.randint(1, 9)))
        for _ in range(rng.randint(0, 2)):
            if alive:
                llm.engine.abort(alive.pop(rng.randrange(len(alive))))
        had_work = llm.engine.has_unfinished()
        done = {delta.request_id for delta in llm.engine.step() if delta.finished}
        alive = [id for id in alive if id not in done]
        assert not had_work or llm.engine.events.read(0).events[-1].slots
    run_to_end(llm)
    assert_clean(llm)


def test_second_call_mixes_up_results():
    llm = tiny_llm(max_num_seqs=3)
    model = reference_model(tiny_folder())
    before = model.generation_config.to_dict(), model.config.to_dict()
    rng = random.Random(29)
    for _ in range(2):
        prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(8)]
        params = [greedy(rng.randint(1, 12)) for _ in prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, one, output in zip(prompts, params, outputs, strict=True):
            assert output.prompt_token_ids == prompt and len(output.outputs[0].token_ids) == one.max_tokens
            assert_solo(prompt, output.outputs[0].token_ids)
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before


@pytest.mark.parametrize("mode", ["naive", "static", "continuous"])
def test_output_cut_short_under_load(mode):
    llm = tiny_llm(mode=mode, num_blocks=80, max_num_seqs=16, max_model_len=100)
    outputs = llm.generate([[n] * (1 + n % 9) for n in range(50)], greedy(64), use_tqdm=False)
    assert {len(output.outputs[0].token_ids) for output in outputs} == {64}
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("priority", ["high", None, 1.5, True])
def test_priority_that_cannot_be_compared(priority):
    llm = tiny_llm()
    llm.engine.add_request("good", [1], greedy(2))
    with pytest.raises(ValueError, match="priority"):
        llm.engine.add_request("bad", [1], greedy(2), priority=priority)
    assert list(run_to_end(llm)) == ["good"]


def test_running_prefill_starves_beside_urgent_ones():
    """Half of a step's tokens go to the oldest prompt, the rest first to the best priority."""
    llm = tiny_llm(max_num_batched_tokens=16, num_blocks=128, max_model_len=200)
    llm.engine.add_request("low", [1] * 96, greedy(1), 2)
    llm.engine.add_request("urgent", [2] * 160, greedy(1), -1)
    ends = {}
    for step in range(1, 20):
        ends |= {delta.request_id: step for delta in llm.engine.step()}
    assert ends == {"low": 12, "urgent": 16}
