"""The engine on a tiny random model: every mode gives the reference's tokens, and nothing leaks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from engine import EngineConfig, SamplingParams, sizing
from tests.support import Mirror, assert_clean, assert_solo, collect, greedy, run_to_end, tiny_llm

MODES = ("naive", "static", "continuous")


def ragged_prompts(count: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_equals_the_reference(mode):
    llm = tiny_llm(mode=mode)
    prompts = ragged_prompts(12)
    outputs = llm.generate(prompts, greedy(15), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].finish_reason == "length"
        assert_solo(prompt, output.outputs[0].token_ids)
    assert_clean(llm)


def test_injected_mid_decode_changes_nobody():
    llm = tiny_llm()
    prompts = ragged_prompts(8)
    outputs = {}
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(20))
        for _ in range(3):
            collect(outputs, llm.engine.step())
    outputs |= {id: out for id, out in run_to_end(llm).items() if id not in outputs}
    kinds = {getattr(event, "kind", "") for event in llm.engine.events.read(0).events}
    assert "injected" in kinds
    for number, prompt in enumerate(prompts):
        request_tokens = outputs[str(number)].outputs[0].token_ids
        assert_solo(prompt, request_tokens)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_lose_nothing(prefix_caching):
    llm = tiny_llm(num_blocks=16, enable_prefix_caching=prefix_caching)
    mirror = Mirror(llm)
    prompts = ragged_prompts(6, longest=12)
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(30))
    outputs = {}
    while llm.engine.has_unfinished():
        collect(outputs, llm.engine.step())
        mirror.check()
        llm.engine.check_integrity()
    assert llm.engine.stats().num_preemptions > 0
    for number, prompt in enumerate(prompts):
        output = outputs[str(number)]
        assert output.prompt_token_ids == prompt
        assert len(output.outputs[0].token_ids) == 30
        assert_solo(prompt, output.outputs[0].token_ids)
    assert_clean(llm)


def test_requests_that_do_not_fit_together_finish_one_after_the_other():
    llm = tiny_llm(num_blocks=10)  # 40 tokens: each request ends with 36
    prompts = [[i] * 6 for i in range(4)]
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(30))
    outputs = run_to_end(llm, most_steps=4 * 4 * 31)
    for number, prompt in enumerate(prompts):
        assert_solo(prompt, outputs[str(number)].outputs[0].token_ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 1000])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunk_size_changes_nothing(mode, chunk, prefix_caching):
    llm = tiny_llm(mode=mode, max_num_batched_tokens=chunk, enable_prefix_caching=prefix_caching)
    lengths = [max(1, chunk % 50 - 1), chunk % 50, chunk % 50 + 1, 3 * (chunk % 50) + 1, 17]
    prompts = [[(7 * i + j) % 256 for j in range(max(1, length))] for i, length in enumerate(lengths)]
    for max_tokens in (1, 2, 3):
        outputs = llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_solo(prompt, output.outputs[0].token_ids)
    assert_clean(llm)


def test_mode_switch_keeps_every_request_and_token():
    llm = tiny_llm()
    mirror = Mirror(llm)
    prompts = ragged_prompts(8)
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(24))
    outputs = {}
    modes = iter(("naive", "static", "continuous", "static", "naive", "continuous") * 100)
    while llm.engine.has_unfinished():
        for _ in range(5):
            collect(outputs, llm.engine.step())
            mirror.check()
        llm.engine.set_mode(next(modes))
        mirror.check()
        llm.engine.check_integrity()
    for number, prompt in enumerate(prompts):
        assert_solo(prompt, outputs[str(number)].outputs[0].token_ids)
    assert llm.engine.stats().num_preemptions == 0  # a switch is no preemption
    assert_clean(llm)


def test_policies_reserve_and_admit_as_taught():
    prompts = [[i] * 5 for i in range(6)]
    most_running, most_used = {}, {}
    for mode in MODES:
        llm = tiny_llm(mode=mode, num_blocks=32, max_num_seqs=4, max_model_len=40)  # maximum: 10 blocks
        for number, prompt in enumerate(prompts):
            llm.engine.add_request(str(number), prompt, greedy(4 + 3 * (number % 2)))
        running, used = [], []
        while llm.engine.has_unfinished():
            llm.engine.step()
            running.append(llm.engine.stats().num_running)
            used.append(llm.engine.stats().num_used_blocks)
        most_running[mode], most_used[mode] = max(running), max(used)
    assert most_running == {"naive": 1, "static": 3, "continuous": 4}
    assert most_used["naive"] == 10 and most_used["static"] == 30 and most_used["continuous"] <= 12


def test_static_admits_nobody_before_the_batch_is_over():
    llm = tiny_llm(mode="static", max_model_len=64, num_blocks=64)
    for number, max_tokens in enumerate((3, 12, 12)):
        llm.engine.add_request(str(number), [number] * 4, greedy(max_tokens))
    llm.engine.step()
    llm.engine.add_request("late", [9] * 4, greedy(2))
    finished: list[str] = []
    while llm.engine.has_unfinished():
        finished += [out.request_id for out in llm.engine.step() if out.finished]
        if llm.engine.stats().num_running:
            assert llm.engine.stats().num_waiting == 1 or "1" in finished
    assert finished == ["0", "1", "2", "late"]


def test_short_prompt_does_not_wait_behind_a_long_one():
    llm = tiny_llm(num_blocks=128, max_num_batched_tokens=16, max_model_len=400)
    llm.engine.add_request("long", [1] * 320, greedy(4))
    llm.engine.step()
    llm.engine.add_request("short", [2] * 5, greedy(4))
    llm.engine.add_request("short2", [3] * 5, greedy(4))
    first = []
    while len(first) < 3:
        first += [out.request_id for out in llm.engine.step() if out.request_id not in first]
    assert first[-1] == "long"


def test_step_never_exceeds_the_token_budget():
    llm = tiny_llm(max_num_batched_tokens=7)
    for number, prompt in enumerate(ragged_prompts(10)):
        llm.engine.add_request(str(number), prompt, greedy(9))
    run_to_end(llm)
    steps = [event for event in llm.engine.events.read(0).events if hasattr(event, "times")]
    assert max(sum(use.num_tokens for use in step.slots) for step in steps) == 7


def test_context_limit_cuts_to_the_exact_token():
    llm = tiny_llm(num_blocks=6)  # 24 tokens
    for length in (1, 20, 22, 23):
        (output,) = llm.generate([[5] * length], greedy(1000), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 24 - length
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="context limit is 24"):
        llm.generate([[5] * 24], greedy(1), use_tqdm=False)


def test_abort_anywhere_keeps_what_was_made_and_frees_the_blocks():
    llm = tiny_llm(num_blocks=32)
    prompts = ragged_prompts(6)
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(20))
    outputs = {}
    for _ in range(8):
        collect(outputs, llm.engine.step())
    for id in ("0", "5"):  # one that runs, one that waits
        collect(outputs, [llm.engine.abort(id)])
        assert llm.engine.abort(id) is None
        llm.engine.check_integrity()
    assert outputs["5"].outputs[0].token_ids == []
    collect(outputs, list(run_to_end(llm).values()))
    for number, prompt in enumerate(prompts):
        output = outputs[str(number)].outputs[0]
        assert_solo(prompt, output.token_ids)
        assert output.finish_reason == ("abort" if number in (0, 5) else "length")
    assert_clean(llm)


def test_shared_prefix_is_computed_once():
    llm = tiny_llm(max_num_seqs=4)
    prefix = [11, 12, 13, 14, 15, 16, 17, 18]
    (first,) = llm.generate([[*prefix, 1]], greedy(5), use_tqdm=False)
    outputs = llm.generate([[*prefix, 1], [*prefix, 2, 3], prefix], greedy(5), use_tqdm=False)
    assert first.num_cached_tokens == 0
    # A fully cached prompt still computes its last token: its last block is not hit.
    assert [output.num_cached_tokens for output in outputs] == [8, 8, 4]
    for prompt, output in zip([[*prefix, 1], [*prefix, 2, 3], prefix], outputs, strict=True):
        assert_solo(prompt, output.outputs[0].token_ids)
    assert llm.engine.stats().num_prefix_hit_tokens == 20


def test_priority_goes_first():
    llm = tiny_llm(max_num_seqs=1)
    for id, priority in (("low", 1), ("normal", 0), ("urgent", -1)):
        llm.engine.add_request(id, [3, 4], greedy(2), priority=priority)
    finished = []
    while llm.engine.has_unfinished():
        finished += [out.request_id for out in llm.engine.step() if out.finished]
    assert finished == ["urgent", "normal", "low"]


# -- what is refused, and what fails ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([-1], "-1 is not in the vocabulary"),
        ([10**6], "not in the vocabulary"),
        ([1.5], "string or a list of token ids"),
        (7, "string or a list of token ids"),
        ([1] * 1000, "context limit"),
        ("half a \ud83d", "surrogate"),
    ],
)
def test_bad_prompts_are_refused_and_neighbours_unharmed(prompt, message):
    llm = tiny_llm()
    llm.engine.add_request("good", [1, 2, 3], greedy(5))
    llm.engine.step()
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("bad", prompt, greedy(5))
    outputs = run_to_end(llm)
    assert list(outputs) == ["good"]
    assert_clean(llm)


def test_one_bad_prompt_queues_none():
    llm = tiny_llm()
    with pytest.raises(ValueError):
        llm.generate([[1, 2], []], greedy(3), use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_generate_neither_runs_nor_harms_requests_added_by_hand():
    llm = tiny_llm()
    llm.engine.add_request("llm-1", [1], greedy(3))  # even under an id that generate() would give
    with pytest.raises(RuntimeError, match="unfinished requests"):
        llm.generate([[1], [2]], greedy(3), use_tqdm=False)
    assert llm.engine.unfinished_ids == ["llm-1"]
    assert_solo([1], run_to_end(llm)["llm-1"].outputs[0].token_ids)
    assert len(llm.generate([[1], [2]], greedy(3), use_tqdm=False)) == 2
    assert_clean(llm)


def test_generate_interrupted_while_it_queues_leaves_nothing(monkeypatch):
    llm = tiny_llm()
    enqueue = llm.engine.enqueue

    def interrupted(request):
        if llm.engine.has_unfinished():
            raise KeyboardInterrupt
        enqueue(request)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3]], greedy(3), use_tqdm=False)
    assert not llm.engine.unfinished_ids


def test_request_that_returns_with_one_token_missing_is_served_in_the_same_step():
    # Two requests in three blocks of one token: the second is put out, and finds all but one token cached.
    llm = tiny_llm(block_size=1, num_blocks=3, max_num_batched_tokens=2)
    for number in range(2):
        llm.engine.add_request(str(number), [number + 1], greedy(2))
    outputs = {}
    while llm.engine.has_unfinished():
        collect(outputs, llm.engine.step())
        assert llm.engine.events.read(0).events[-1].slots, "a step that computed nothing"
    for number in range(2):
        assert_solo([number + 1], outputs[str(number)].outputs[0].token_ids)
    assert llm.engine.stats().num_preemptions == 1


def test_what_is_no_prompt_message_or_parameter_is_said():
    llm = tiny_llm()
    for call, message in (
        (lambda: llm.generate(None, greedy(1)), "prompts must be"),
        (lambda: llm.generate([[1]], {"max_tokens": 3}), "SamplingParams"),
        (lambda: llm.generate([[1], [2]], [greedy(1)]), "2 prompts, but 1"),
        (lambda: llm.generate(b"hello", greedy(1)), "prompts must be"),
        (lambda: llm.generate([b"hello"], greedy(1)), "a prompt must be"),
        (lambda: llm.generate("x", {}), "SamplingParams"),
        (lambda: llm.chat([{"role": "user"}], greedy(1)), "role and a content"),
        (lambda: llm.chat([{"role": "user", "content": "half \ud83d"}], greedy(1)), "surrogate"),
        (lambda: llm.chat({"role": "user", "content": "x"}, greedy(1)), "conversations must be"),
        (lambda: llm.engine.add_request(5, [1], greedy(1)), "request_id"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not llm.engine.has_unfinished()


def test_id_in_use_is_refused():
    llm = tiny_llm()
    llm.engine.add_request("same", [1], greedy(3))
    with pytest.raises(ValueError, match="'same'"):
        llm.engine.add_request("same", [2], greedy(3))
    assert len(run_to_end(llm)) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"dtype": "int4"}, "unknown dtype"),
        ({"device": "tpu"}, "unknown device"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": -3}, "num_blocks"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"model": None}, "model must be a name or a path"),
        ({"seed": "x"}, "seed must be int"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be bool"),
        ({"quantization": "int3"}, "unknown quantization 'int3'"),
        ({"speculative": "ngram"}, "speculative is not supported yet"),
    ],
)
def test_bad_configuration_names_the_field(option, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**option)


def test_unknown_mode_leaves_the_engine_as_it_was():
    llm = tiny_llm()
    with pytest.raises(ValueError, match="unknown mode 'turbo'"):
        llm.engine.set_mode("turbo")
    assert llm.engine.mode == "continuous"


def test_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="max_model_len"):
        tiny_llm(max_model_len=4096)


def test_missing_model_is_a_clear_error():
    from engine import LLM

    with pytest.raises(ValueError, match="no-such-folder"):
        LLM("./no-such-folder/model")


def test_nan_in_one_row_fails_that_request_alone(monkeypatch):
    llm = tiny_llm()
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6] * 9}
    for id, prompt in prompts.items():
        llm.engine.add_request(id, prompt, greedy(8))
    outputs = {}
    for _ in range(3):
        collect(outputs, llm.engine.step())
    forward = llm.engine._runner.forward

    def poisoned(batch):
        logits, finite = forward(batch)
        logits = logits.clone()
        logits[1] = torch.nan
        return logits, finite

    monkeypatch.setattr(llm.engine._runner, "forward", poisoned)
    collect(outputs, llm.engine.step())
    monkeypatch.setattr(llm.engine._runner, "forward", forward)
    collect(outputs, list(run_to_end(llm).values()))
    failed = [id for id, output in outputs.items() if output.outputs[0].finish_reason == "error"]
    assert len(failed) == 1 and "not finite" in outputs[failed[0]].error
    for id, prompt in prompts.items():
        assert_solo(prompt, outputs[id].outputs[0].token_ids)
    assert_clean(llm)


def test_exception_in_a_step_ends_only_those_in_it(monkeypatch):
    llm = tiny_llm(max_num_seqs=2)
    mirror = Mirror(llm)
    prompts = [[i, i + 1] for i in range(4)]
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, greedy(4))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "forward", lambda batch: 1 / 0)
        outputs = {out.request_id: out for out in llm.engine.step()}
    assert [out.outputs[0].finish_reason for out in outputs.values()] == ["error", "error"]
    mirror.check()
    outputs |= run_to_end(llm)
    mirror.check()
    for number in (2, 3):
        assert_solo(prompts[number], outputs[str(number)].outputs[0].token_ids)
    assert_clean(llm)


def test_generate_is_refused_while_a_runner_drives():
    from engine import EngineRunner

    llm = tiny_llm()
    runner = EngineRunner(llm.engine)
    with pytest.raises(RuntimeError, match="EngineRunner"):
        llm.generate([[1]], SamplingParams(max_tokens=1))
    runner.shutdown()
    assert len(llm.generate([[1]], greedy(1), use_tqdm=False)) == 1


@pytest.mark.parametrize(
    "sizes",
    [{"num_blocks": 10**12}, {"block_size": 10**12, "num_blocks": 2}, {"kv_cache_memory_bytes": 10**16}],
)
def test_cache_larger_than_memory_is_refused_at_once(sizes):
    options = {"num_blocks": None, "max_num_seqs": 10**9} | sizes
    with pytest.raises(ValueError, match=r"GiB is free: lower num_blocks"):
        tiny_llm(**options)


GIB = 1 << 30
STAT = f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 64),
        ({"memory.max": "max", "memory.current": 3 * GIB, "memory.stat": STAT}, 64),
        ({"memory.max": 8 * GIB, "memory.current": 5 * GIB, "memory.stat": STAT}, 5),
        ({"memory.max": 8 * GIB, "memory.current": 9 * GIB, "memory.stat": ""}, 0),
        ({"memory.max": 500 * GIB, "memory.current": 9 * GIB, "memory.stat": STAT}, 64),
        ({"memory.max": 8 * GIB}, 64),  # half of it cannot be read
        ({"memory.max": 8 * GIB, "memory.current": GIB, "memory.stat": "no numbers here"}, 64),
        (
            {
                "memory/memory.limit_in_bytes": 4 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": STAT,
            },
            3,
        ),
        (
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,  # no limit
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": STAT,
            },
            64,
        ),
    ],
)
def test_memory_is_what_host_and_container_both_have(files, free, tmp_path, monkeypatch):
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(str(content))
    monkeypatch.setattr(sizing, "CGROUPS", tmp_path)
    monkeypatch.setattr(sizing.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    assert sizing._free_bytes(torch.device("cpu")) == free * GIB
