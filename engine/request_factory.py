"""The front door: turns a prompt and its parameters into a checked `Request`, or says why not.

Everything here reads only what never changes, so any thread may call it. What is refused is refused
before it is queued, and costs nobody else anything.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection, Sequence
from typing import Any

from engine.detokenizer import Detokenizer, make_decoder
from engine.model import LoadedModel
from engine.request import Request
from engine.sampling_params import SamplingParams

MOST_ID_CHARS = 256  # a trace's reader takes no more than 300, and a continuation's id adds its number
BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but not of token ids


def check_text(text: str) -> None:
    """Raises ValueError for a string that no encoding can hold."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"a prompt must be text, and half a surrogate pair is none: {text!r:.80}")


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """A prompt's token ids. Raises ValueError if the tokenizer cannot read the text, even if it panics."""
    check_text(text)
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a tokenizer written in Rust may panic, which is no Exception
        raise ValueError(f"the tokenizer cannot read this prompt: {error}") from error


class RequestFactory:
    """Makes requests for one model.

    context_limit: most tokens of a prompt and its output together.
    known_tokens: ids that can be sampled; the rest of the vocabulary is padding.
    """

    def __init__(self, loaded: LoadedModel, context_limit: int, known_tokens: Collection[int], seed: int):
        self._tokenizer = loaded.tokenizer
        self._special_tokens: dict[str, int] = loaded.tokenizer.get_added_vocab()
        added = loaded.tokenizer.added_tokens_decoder
        self._hidden = frozenset(token for token, about in added.items() if about.special)
        self._eos_token_ids = loaded.eos_token_ids
        self._vocab_size = loaded.config.vocab_size
        self._context_limit = context_limit
        self._known_tokens = known_tokens
        self._seed = seed
        self._arrivals = itertools.count()

    def make(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int
    ) -> Request:
        """The first of `params.n` requests; its `group` holds them all.

        Raises ValueError if the prompt is empty, not text or token ids, or too long, and if a parameter
        names a token that this model cannot produce.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, not {request_id!r}")
        if len(request_id) > MOST_ID_CHARS:
            raise ValueError(
                f"request_id must have at most {MOST_ID_CHARS} characters, not {len(request_id)}: "
                f"{request_id!r:.40}..."
            )
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {params!r:.80}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, not {priority!r}")
        if params.skip_special_tokens:
            self._check_stop_can_match(params.stop)
        token_ids = self._token_ids(prompt)
        room = self._context_limit - len(token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for an answer: the context "
                f"limit is {self._context_limit} tokens (max_model_len, or what num_blocks blocks hold)"
            )
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens or ():
                if token not in self._known_tokens:
                    raise ValueError(
                        f"{name}: token id {token} is not in the vocabulary (0 to {max(self._known_tokens)})"
                    )
        group: list[Request] = []
        for index in range(params.n):
            arrival = next(self._arrivals)
            # Without a seed of its own, a request is seeded by its place in the engine's life. The words keep
            # the two kinds of seed apart, and a string keeps its sign, which a number would lose.
            seed = f"engine {self._seed}:{arrival}" if params.seed is None else f"own {params.seed}:{index}"
            Request(
                request_id=f"{request_id}:{index}" if index else request_id,
                prompt_token_ids=token_ids,
                params=params,
                max_tokens=min(params.max_tokens, room),
                stop_tokens=self._stop_tokens(params),
                detokenizer=Detokenizer(
                    make_decoder(self._tokenizer, params.skip_special_tokens),
                    params.stop,
                    params.include_stop_str_in_output,
                    self._hidden if params.skip_special_tokens else (),
                ),
                rng=random.Random(seed),
                arrival=arrival,
                arrival_time=time.monotonic(),
                priority=priority,
                index=index,
                group=group,
            )
        return group[0]

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = encode(self._tokenizer, prompt)
        elif (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, BYTES)
            and all(type(token) is int for token in prompt)
        ):
            token_ids = list(prompt)  # type: ignore[arg-type]  # no str any more
        else:
            raise ValueError(f"a prompt must be a string or a list of token ids, not {prompt!r:.80}")
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"prompt token id {token} is not in the vocabulary (0 to {self._vocab_size - 1})"
                )
        return token_ids

    def _stop_tokens(self, params: SamplingParams) -> dict[int, int | str | None]:
        """Tokens that end the request, each with the `stop_reason` to report for it."""
        stop_tokens: dict[int, int | str | None] = {}
        if not params.ignore_eos:
            stop_tokens.update(dict.fromkeys(self._eos_token_ids))
        stop_tokens.update({token: token for token in params.stop_token_ids})
        # A special token never shows in the text when those are skipped, so it is matched as a token.
        stop_tokens.update({self._special_tokens[s]: s for s in params.stop if s in self._special_tokens})
        return stop_tokens

    def _check_stop_can_match(self, stop: Sequence[str]) -> None:
        """Special tokens are skipped in the text, so a stop string with one *inside* would never be found."""
        for string in stop:
            for special, token in self._special_tokens.items():
                if token in self._hidden and special != string and special in string:
                    raise ValueError(
                        f"stop: {string!r} contains {special!r}, which the text does not show: set "
                        f"skip_special_tokens=False, or stop at {special!r} itself"
                    )
