"""Random lives of an engine: whatever happens in whatever order, the books and the outputs are right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import RequestOutput, SamplingParams
from tests.support import Mirror, Oracle, assert_clean, collect, tiny_llm, token_of

BLOCK_SIZE = 4
# Few prefixes and lengths around multiples of the block size: where sharing and boundaries go wrong.
prompts = st.builds(
    lambda prefix, blocks, extra, tail: ([prefix] * (blocks * BLOCK_SIZE + extra) + [tail])[:24],
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(10, 12),
)

# Two letters made so likely that stop strings of them are met at every turn: whole, in part, and overlapping.
LETTERS = {token_of("a"): 9.0, token_of("b"): 9.0}
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logit_bias=st.sampled_from([None, LETTERS]),
    stop=st.sampled_from([(), ("ab",), ("aab", "bb"), ("aba", "b")]),
    stop_token_ids=st.sampled_from([(), (token_of("b"),)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


class EngineLife(RuleBasedStateMachine):
    """Submits, steps, aborts and switches modes at random in a pool too small for everybody."""

    @initialize(
        block_size=st.sampled_from([1, 2, BLOCK_SIZE, BLOCK_SIZE]),
        num_tokens=st.integers(32, 80),
        slots=st.integers(1, 5),
        chunk=st.sampled_from([1, 3, 4, 5, 9, 64]),
        caching=st.booleans(),
        mode=st.sampled_from(["naive", "static", "continuous"]),
    )
    def start(self, block_size, num_tokens, slots, chunk, caching, mode):
        self.llm = tiny_llm(
            block_size=block_size,
            num_blocks=num_tokens // block_size,
            max_num_seqs=slots,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caching,
            mode=mode,
        )
        self.mirror = Mirror(self.llm)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.unfinished: list[str] = []

    @rule(prompt=prompts, params=params, priority=st.integers(-1, 1))
    def submit(self, prompt, params, priority):
        id = str(len(self.asked))
        self.llm.engine.add_request(id, prompt, params, priority)
        self.asked[id] = prompt, params
        self.unfinished.append(id)

    @precondition(lambda self: self.unfinished)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            deltas = self.llm.engine.step()
            collect(self.outputs, deltas)
            for delta in deltas:
                if delta.finished:
                    self.unfinished.remove(delta.request_id)
                    self._check_output(delta.request_id)
            self.check_books()
            assert sum(use.num_tokens for use in self.mirror.last_step.slots), "a step with work did nothing"
            if not self.unfinished:
                return

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        id = self.unfinished.pop(data.draw(st.integers(0, len(self.unfinished) - 1)))
        collect(self.outputs, [self.llm.engine.abort(id)])
        assert self.llm.engine.abort(id) is None
        self._check_output(id, aborted=True)

    @rule(mode=st.sampled_from(["naive", "static", "continuous"]))
    def switch(self, mode):
        self.llm.engine.set_mode(mode)

    @invariant()
    def check_books(self):
        if not hasattr(self, "llm"):
            return
        self.llm.engine.check_integrity()
        self.mirror.check()
        stats = self.llm.engine.stats()
        assert stats.num_used_blocks + stats.num_cached_blocks + stats.num_free_blocks == stats.num_blocks
        live = [m for id in self.unfinished for m in self.llm.engine._groups[id] if m.finish_reason is None]
        assert stats.num_running + stats.num_waiting == len(live)
        assert all(any(id == m.leader.request_id for m in live) for id in self.unfinished)

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        for _ in range(5000):
            if not self.unfinished:
                break
            self.step(1)
        assert not self.unfinished, "work that never ends"
        assert_clean(self.llm)

    def _check_output(self, id: str, aborted: bool = False) -> None:
        """A finished continuation is what the reference makes of it; an aborted one begins like it."""
        prompt, params = self.asked[id]
        outputs = self.outputs[id].outputs
        assert [output.index for output in outputs] == list(range(params.n))
        for output in outputs:
            assert aborted or output.finish_reason != "abort"
            oracle = Oracle(prompt, params, output.index, self.llm.engine.info.context_limit)
            oracle.check(output, is_whole=output.finish_reason != "abort")


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
