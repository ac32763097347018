"""What a request asks for: `SamplingParams`, checked when made.

Names and meaning follow vLLM, which follows the OpenAI API where that says anything. Nothing is
accepted and then ignored: what the engine cannot do yet is refused by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LOGPROBS = 20
MAX_N = 128
SMALLEST_PENALTY = 1e-3  # a logit divided by much less would overflow
NEARLY_ZERO = 1e-5  # dividing by a temperature below this would overflow: it means greedy


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Raises ValueError naming the field that is out of range.

    max_tokens: most output tokens, at least 1 (cut to what the context limit leaves).
    min_tokens: no end-of-sequence or stop token before this many output tokens.
    temperature: 0 is greedy; otherwise logits are divided by it before the filters below.
    top_k: keep the k likeliest tokens; -1 or 0 keeps all.
    top_p: keep the fewest likeliest tokens whose probabilities reach this sum, in (0, 1].
    min_p: drop tokens less likely than this fraction of the likeliest one, in [0, 1].
    repetition_penalty: > 1 makes tokens of prompt and output less likely (CTRL, Keskar et al. 2019).
    presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once, or once
        for each time they occurred; in [-2, 2].
    seed: makes the request's sampling its own, whatever else runs beside it.
    stop: strings that end the output; the text is cut before the match.
    stop_token_ids: tokens that end the output, besides the model's own end tokens.
    include_stop_str_in_output: leave the stop string in the text.
    ignore_eos: do not stop at the model's end tokens.
    skip_special_tokens: leave special tokens out of the text.
    logit_bias: token id -> a number from -100 to 100 that is added to its logit before all else.
    logprobs: report the log-probabilities of the chosen token and of this many likeliest ones, 0 to 20.
        They are the model's own, before bias, penalties, temperature and filters.
    n: how many continuations of the same prompt, each sampled on its own. With a `seed`, the first is what
        that seed gives with n=1, and the others have seeds derived from it.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        _check_float("temperature", self.temperature, low=0.0)
        _check_int("top_k", self.top_k, low=-1)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=SMALLEST_PENALTY)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            _check_int("seed", self.seed)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        _check_int("n", self.n, low=1, high=MAX_N)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature < NEARLY_ZERO or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


def _check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
    if high is not None and value > high:
        raise ValueError(f"{name} must be at most {high}, not {value}")


def _check_float(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # neither NaN nor infinity is
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value > high or value < low or (open_low and value == low):
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], not {value}")


def _checked_stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    is_list = isinstance(stop, Iterable) and not isinstance(stop, str | bytes | Mapping)
    strings = tuple(stop) if is_list else (stop,)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop must be a non-empty string or a list of them, not {stop!r}")
    return strings


def _checked_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}")
    for token_id, value in bias.items():
        _check_int("logit_bias: each token id", token_id, low=0)
        _check_float("logit_bias: each value", value, low=-100.0, high=100.0)
    return dict(bias)


def _checked_token_ids(token_ids: Any) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise ValueError(f"stop_token_ids must be a list of token ids, not {token_ids!r}")
    for token_id in token_ids:
        _check_int("stop_token_ids: each one", token_id, low=0)
    return tuple(token_ids)
