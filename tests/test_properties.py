"""Random lives of an engine: whatever happens in whatever order, the books and the outputs are right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import RequestOutput
from tests.support import Mirror, assert_clean, assert_solo, collect, greedy, tiny_llm

BLOCK_SIZE = 4
# Few prefixes and lengths around multiples of the block size: where sharing and boundaries go wrong.
prompts = st.builds(
    lambda prefix, blocks, extra, tail: ([prefix] * (blocks * BLOCK_SIZE + extra) + [tail])[:24],
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(10, 12),
)


class EngineLife(RuleBasedStateMachine):
    """Submits, steps, aborts and switches modes at random in a pool too small for everybody."""

    @initialize(
        num_blocks=st.integers(8, 20),
        slots=st.integers(1, 5),
        chunk=st.sampled_from([1, 3, 4, 5, 9, 64]),
        caching=st.booleans(),
        mode=st.sampled_from(["naive", "static", "continuous"]),
    )
    def start(self, num_blocks, slots, chunk, caching, mode):
        self.llm = tiny_llm(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=slots,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caching,
            mode=mode,
        )
        self.mirror = Mirror(self.llm)
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.unfinished: list[str] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), priority=st.integers(-1, 1))
    def submit(self, prompt, max_tokens, priority):
        id = str(len(self.prompts))
        self.llm.engine.add_request(id, prompt, greedy(max_tokens), priority)
        self.prompts[id] = prompt
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
        self._check_output(id)

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
        assert stats.num_running + stats.num_waiting == len(self.unfinished)

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        for _ in range(5000):
            if not self.unfinished:
                break
            self.step(1)
        assert not self.unfinished, "work that never ends"
        assert_clean(self.llm)

    def _check_output(self, id: str) -> None:
        """A finished output is the reference's; an aborted one is a beginning of it."""
        assert_solo(self.prompts[id], self.outputs[id].outputs[0].token_ids)


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
