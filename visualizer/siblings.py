"""Further engines over the live engine's model: for a race, or for one visitor alone."""

from __future__ import annotations

from dataclasses import replace

from engine import LLM, ContinuousEngine, Turns
from engine.events import Mode


class Siblings:
    """Makes engines with the live one's weights and settings, each with a small KV pool of its own.

    All of them take turns with the live engine, step by step: none computes while another does. So
    what one of them measures is not the others' doing, and all of them get on at the same pace.
    """

    def __init__(self, llm: LLM):
        self._loaded = llm.loaded
        self._config = llm.config
        self._live = llm.engine.info
        self.turns = Turns()

    def make(self, mode: Mode, pool_tokens: int, max_num_seqs: int, max_model_len: int) -> ContinuousEngine:
        """An engine with at most so many tokens of KV cache, slots and tokens a request."""
        live = self._live
        config = replace(
            self._config,
            mode=mode,
            num_blocks=min(live.num_blocks, -(-pool_tokens // live.block_size)),
            max_num_seqs=min(live.max_num_seqs, max_num_seqs),
            max_model_len=min(live.context_limit, max_model_len),
        )
        with self.turns:  # memory is laid out, and on a GPU graphs are recorded: better alone
            return ContinuousEngine(self._loaded, config)
